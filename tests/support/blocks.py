"""Block heads of the goldens, and the few lines of decoding that they are checked with."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import DynamicCache

from hf_specdec import BlockHead

from .eagle import GOLDENS, arrays, features_of
from .goldens import trained_target


IN_PLACE = ("dflash", "jetspec", "dflash2")
CONTEXT = (*IN_PLACE, "dspark")
ALL = (*CONTEXT, "peagle")
STEPS = 4
"""Steps of which the goldens hold hidden states and logits."""


def block_head(golden: str, **options) -> BlockHead:
    """The golden's head, in float32 whatever is on disk."""
    return BlockHead.from_pretrained(GOLDENS / golden, **{"dtype": torch.float32} | options).eval()


@lru_cache
def shared_head(golden: str) -> BlockHead:
    """The golden's head, which no test may change."""
    return block_head(golden)


def embed(head: BlockHead, tokens: torch.Tensor) -> torch.Tensor:
    return (head.embed_tokens or trained_target().get_input_embeddings())(tokens)


def keep(cache: DynamicCache, length: int) -> None:
    """Keeps the first rows (`crop` means other things in other releases)."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


class Blocks:
    """A head that drafts blocks after growing prefixes of a text `[1, tokens]`, with its own cache."""

    def __init__(self, head: BlockHead, text: torch.Tensor):
        self.head, self.text, self.cache = head, text, DynamicCache()
        self.features = features_of(head, text)
        self.done = 0

    @torch.no_grad()
    def after(self, prefix: int, fill: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """
        States `[rows, H]` and logits `[rows, draft vocab]` of the rows that predict, after the anchor at position
        `prefix`; with `fill`, these tokens stand in place of the first masks.
        """
        head, target = self.head, trained_target()
        rows = self._true_rows(prefix) if head.config.is_peagle else self._context(prefix)
        tokens = head.block_tokens(self.text[:, prefix])
        if fill is not None:
            tokens[0, 1 : 1 + len(fill)] = fill
        positions = torch.arange(tokens.shape[1])[None] + prefix
        block = head(
            inputs_embeds=head.block_embeddings(tokens, lambda tokens: embed(head, tokens)),
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=None,
        )
        keep(self.cache, self.done)
        states = torch.cat([*rows, block.hidden_states], dim=1)
        self.states = states[0]
        predicting = states[:, head.first_row :]
        return predicting[0], head.compute_logits(predicting, target.lm_head)[0]

    def _context(self, prefix: int) -> list[torch.Tensor]:
        output = self.head(
            features=self.features[:, self.done : prefix],
            position_ids=torch.arange(self.done, prefix)[None],
            past_key_values=self.cache,
        )
        assert output.hidden_states is None and output.logits is None
        self.done = prefix
        return []

    def _true_rows(self, prefix: int) -> list[torch.Tensor]:
        """P-EAGLE's rows pair a feature with the token after it; the last of them predicts the first draft."""
        output = self.head(
            inputs_embeds=embed(self.head, self.text[:, self.done + 1 : prefix + 1]),
            features=self.features[:, self.done : prefix],
            position_ids=torch.arange(self.done, prefix)[None],
            past_key_values=self.cache,
            logits_to_keep=None,
        )
        self.done = prefix
        return [output.hidden_states[:, -1:]]


def parents_of(golden: str, step: int) -> torch.Tensor:
    """The tokens before the drafted ones of a step, `[1, drafts]`: the anchor and all drafts but the last."""
    expected = arrays(golden)
    anchor = expected["greedy_ids"][0, expected["spec_prefix_len"][step]]
    return torch.cat([anchor[None], expected["spec_draft_tokens"][step, :-1]])[None]


@torch.no_grad()
def draft_chain(head: BlockHead, states: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
    """The tokens (target ids) drafted greedily from what `Blocks.after` returns."""
    drafted, carried = [anchor], None
    for position in range(len(logits)):
        base, state = logits[None, position : position + 1], states[None, position : position + 1]
        parents = torch.tensor([drafted[-1:]])
        scores, carried = head.conditional_logits(base, state, parents, carried)
        best = int(scores.argmax())
        drafted.append(best if head.target_ids is None else int(head.target_ids[best]))
    return drafted[1:]


@torch.no_grad()
def golden_blocks(head: BlockHead, golden: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """What the head makes of the golden's steps, under the names of its arrays."""
    expected = arrays(golden)
    blocks = Blocks(head, expected["greedy_ids"])
    hidden, logits, chain = [], [], []
    for step, prefix in enumerate(expected["spec_prefix_len"].tolist()[:steps]):
        states, base = blocks.after(prefix)
        hidden.append(blocks.states)
        logits.append(base)
        parents = parents_of(golden, step)
        if len(base) == parents.shape[1]:  # else the head was made to draft another number of tokens
            chain.append(head.conditional_logits(base[None], states[None], parents)[0][0])
    found = {"block_hidden": torch.stack(hidden), "block_logits": torch.stack(logits)}
    if not chain:
        return found
    if "chain_logits" in expected:
        found["chain_logits"] = torch.stack(chain)
    if "chain_scores" in expected:
        found["chain_scores"] = torch.stack(chain).gather(-1, expected["chain_candidates"][:steps])
    return found


def difference(head: BlockHead, golden: str, array: str = "block_logits") -> float:
    """The largest absolute difference to the golden's array; infinite where it has another shape."""
    found = golden_blocks(head, golden)[array]
    expected = arrays(golden)[array]
    return (found - expected).abs().max().item() if found.shape == expected.shape else torch.inf
