"""Heads of the goldens, and the few lines of decoding that they are checked with."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from hf_specdec import BlockHead
from hf_specdec.eagle import EagleHead

from .goldens import trained_target


GOLDENS = Path(__file__).parent.parent / "goldens"
EAGLE_1 = "safeailab_eagle1"
EAGLE_3 = ("safeailab_eagle3", "speculators_eagle3", "specforge_eagle3", "modelopt_eagle3", "modelopt_eagle3_yarn")
SAFEAILAB, SPECULATORS, SPECFORGE, *MODELOPTS = EAGLE_3
MODELOPT = MODELOPTS[0]
ALL = (EAGLE_1, *EAGLE_3)


@lru_cache
def arrays(golden: str) -> dict[str, torch.Tensor]:
    """The reference's numbers."""
    return load_file(GOLDENS / golden / "golden.safetensors")


def head_of(golden: str, **options) -> EagleHead:
    """The golden's head, in float32 whatever is on disk."""
    return EagleHead.from_pretrained(GOLDENS / golden, **{"dtype": torch.float32} | options).eval()


@torch.no_grad()
def features_of(head: EagleHead | BlockHead, input_ids: torch.Tensor) -> torch.Tensor:
    """What the head reads of the target over `[1, T]` tokens: `[1, T, feature_size]`."""
    target = trained_target()
    hidden_states = target.model(input_ids, output_hidden_states=True).hidden_states
    boundaries = head.config.aux_boundaries(target.config.num_hidden_layers)
    return torch.cat([hidden_states[k] for k in boundaries], dim=-1) if boundaries else hidden_states[-1]


class Rows:
    """
    A head that is fed row after row, with its own cache.

    Its `states` are the layer's output, before the final norm, which the goldens hold; `fed_back` is what the head
    wants back.
    """

    def __init__(self, head: EagleHead):
        self.head, self.cache = head, DynamicCache()
        self.states = self.fed_back = self.logits = None

    @torch.no_grad()
    def feed(self, tokens: torch.Tensor, features: torch.Tensor | None = None, position: int | None = None) -> Rows:
        """`tokens` `[1, rows]`; without features the state of the last row is fed back."""
        target, layer_output = trained_target(), []
        hook = self.head.layers[-1].register_forward_hook(lambda module, args, output: layer_output.append(output))
        first = self.cache.get_seq_length() if position is None else position
        try:
            output = self.head(
                inputs_embeds=target.get_input_embeddings()(tokens),
                features=features,
                hidden_states=self.fed_back[:, -1:] if features is None else None,
                position_ids=torch.arange(first, first + tokens.shape[1])[None],
                past_key_values=self.cache,
                lm_head=target.lm_head,
            )
        finally:
            hook.remove()
        self.states, self.fed_back, self.logits = layer_output[0], output.hidden_states, output.logits
        return self

    def best_token(self) -> torch.Tensor:
        """The target's id of the most likely token after the last row, `[1, 1]`."""
        best = self.logits[:, -1:].argmax(-1)
        return best if self.head.target_ids is None else self.head.target_ids[best]


def golden_rows(head: EagleHead, golden: str, features: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What the head makes of a golden's prompt and forced chain, under the names of its arrays."""
    expected = arrays(golden)
    if features is None:
        features = features_of(head, expected["input_ids"])
    rows = Rows(head).feed(expected["head_input_ids"], features)
    found = {"head_hidden": rows.states, "head_logits": rows.logits}
    states, logits = [], []
    for token in expected["chain_tokens"][0]:
        rows.feed(token[None, None])
        states.append(rows.states[0, 0])
        logits.append(rows.logits[0, 0])
    return found | {"chain_hidden": torch.stack(states), "chain_logits": torch.stack(logits)}


def largest_difference(found: dict[str, torch.Tensor], golden: str, suffix: str = "") -> dict[str, float]:
    """The largest absolute difference to each of the golden's arrays."""
    expected = arrays(golden)
    return {name: (found[name] - expected[name + suffix]).abs().max().item() for name in found}


@torch.no_grad()
def draft_chain(head: EagleHead, features: torch.Tensor, text: torch.Tensor, committed: int, depth: int) -> list[int]:
    """
    The tokens that the head drafts greedily after `committed` tokens and the bonus token behind them.

    Args:
        features (`torch.Tensor` of shape `[1, tokens, feature_size]`): the target's over the text.
        text (`torch.Tensor` of shape `[1, tokens]`): the text, at least `committed + 1` long.
    """
    rows = Rows(head).feed(text[:, 1 : committed + 1], features[:, :committed])
    drafted = [rows.best_token()]
    while len(drafted) < depth:
        drafted.append(rows.feed(drafted[-1]).best_token())
    return [int(token) for token in drafted]


def published(golden: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """The golden's config.json and weights as they were published, to be changed."""
    folder = GOLDENS / golden
    config = json.loads((folder / "config.json").read_text())
    if (folder / "pytorch_model.bin").exists():
        return config, torch.load(folder / "pytorch_model.bin")
    return config, load_file(folder / "model.safetensors")


def publish(folder: Path, config: dict, weights: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    """Writes a checkpoint; `file` may be `pytorch_model.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / file)
    else:
        torch.save(weights, folder / file)
    return folder


def publish_shards(folder: Path, config: dict, weights: dict[str, torch.Tensor], suffix: str, count: int = 3) -> Path:
    """Writes a checkpoint in several files with an index; `suffix` is "safetensors" or "bin"."""
    stem, keys, files = "model" if suffix == "safetensors" else "pytorch_model", sorted(weights), {}
    for shard in range(count):
        part = {key: weights[key] for key in keys[shard::count]}
        name = f"{stem}-{shard + 1:05d}-of-{count:05d}.{suffix}"
        publish(folder, config, part, name)
        files |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def equal_weights(one: EagleHead, other: EagleHead) -> bool:
    """Whether two heads hold the same bits under the same names."""
    mine, yours = one.state_dict(), other.state_dict()
    return mine.keys() == yours.keys() and all(
        mine[key].dtype == yours[key].dtype and torch.equal(mine[key], yours[key]) for key in mine
    )


def refused(folder, *words, error=ValueError):
    with pytest.raises(error) as caught:
        EagleHead.from_pretrained(folder)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message
