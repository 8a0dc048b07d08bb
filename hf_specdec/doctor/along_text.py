"""What heads predict along a text that the target wrote: for every row the tokens of a chain, given the text's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..block import BlockHead
from ..block.anchored import blocks_after
from ..drafters.heads import Borrowed, borrowed_lm_head
from ..eagle import EagleHead
from ..eagle.unroll import unroll
from ..gemma import GemmaAssistant
from .assistants import TextKV, assistant_logits


Head = EagleHead | BlockHead | GemmaAssistant
Logits = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """
    What a head reads along a text, and where its chains begin.

    Args:
        ids (`torch.Tensor` of shape `[tokens]`, int64): the text.
        features (`torch.Tensor` of shape `[1, tokens, feature_size]`): the target's features of the text.
        first (`int`): position of the root of the first chain; that of the last has `depth` tokens after it.
        depth (`int`): length of the chains.
        embed (callable): embeds tokens.
        lm_head (`nn.Module` or callable): makes logits of states.
        shared (`dict`, *optional*): for assistants of Gemma 4, what they attend to.
    """

    ids: torch.Tensor
    features: torch.Tensor
    first: int
    depth: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Any
    shared: TextKV = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        head: Head,
        target: PreTrainedModel,
        ids: torch.Tensor,
        features: torch.Tensor,
        first: int,
        depth: int,
        shared: TextKV,
    ) -> Rows:
        """The rows of a head, which may use its target's embeddings and lm_head."""
        borrowed = Borrowed(target.get_input_embeddings(), target.dtype)
        embed: Any = borrowed if head.embed_tokens is None else head.embed_tokens
        lm_head: Any = borrowed_lm_head(head, target) if head.lm_head is None else head.lm_head
        return cls(
            ids.to(head.device),
            features.to(head.device),
            first,
            depth,
            lambda tokens: embed(tokens).to(head.dtype),
            lm_head,
            shared,
        )

    @property
    def roots(self) -> torch.Tensor:
        """Positions of the roots of all chains, `[rows]`."""
        return torch.arange(self.first, len(self.ids) - self.depth, device=self.ids.device)

    def tokens(self, step: int) -> torch.Tensor:
        """The text's tokens that the chains draft at a step (0: right after the roots), `[rows]`."""
        return self.ids[self.roots + 1 + step]


def logits_along(head: Head, rows: Rows) -> Iterator[Logits]:
    """
    For every step of the chains, given the text's tokens before, the logits by which the head drafts, and those that
    give every token a probability: without a selector, which leaves most tokens none. `[rows, draft vocab]` all.
    """
    if isinstance(head, GemmaAssistant):
        return assistant_logits(head, rows)
    return eagle_logits(head, rows) if isinstance(head, EagleHead) else block_logits(head, rows)


def eagle_logits(head: EagleHead, rows: Rows) -> Iterator[Logits]:
    """See `logits_along`: the states of a head that is unrolled over the text."""
    first, last = rows.first - 1, len(rows.ids) - 1 - rows.depth  # rows whose next token is a root
    for states in unroll(head, rows.features, rows.embed(rows.ids[None]), rows.depth):
        logits = rows.lm_head(states[0, first:last])
        yield logits, logits


def block_logits(head: BlockHead, rows: Rows, mask: torch.Tensor | None = None) -> Iterator[Logits]:
    """
    See `logits_along`: a block for every root, all in one forward.

    Args:
        mask (`torch.Tensor` of shape `[H]`, *optional*): an embedding in place of the mask token's.
    """
    roots, carried = rows.roots, None
    states = blocks_after(head, rows.features, rows.ids[None], roots[None], rows.embed, mask=mask)[0][
        :, head.first_row :
    ]
    for step in range(rows.depth):
        here = states[:, step : step + 1]
        base = head.compute_logits(here, rows.lm_head)
        logits, carried = head.conditional_logits(base, here, rows.ids[roots + step][:, None], carried)
        yield logits[:, 0], (logits if head.candidate_selector is None else base)[:, 0]
