"""Heads for tests: trained and tiny ones, a drafter that keeps what it proposes, and drafting from scratch."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import BlockConfig, BlockHead, DraftTree, EagleConfig, EagleHead, MedusaHeads, TokenTree
from hf_specdec.drafters import BlockDrafter, EagleDrafter, FeatureDrafter
from hf_specdec.forwards.features import watch_features
from hf_specdec.sequences import Sequences

from .goldens import TINY_TARGET
from .models import noisy_copy


GOLDENS = TINY_TARGET.parent


class Recording(FeatureDrafter):
    """A drafter that appends every tree it proposes to `trees`, and the rows' lengths then to `lengths`."""

    def __init__(self, head: Any):
        super().__init__(head)
        self.trees: list[DraftTree] = []
        self.lengths: list[list[int]] = []

    def propose(self, sequences: Sequences) -> DraftTree | None:
        draft = super().propose(sequences)
        if draft is not None:
            self.trees.append(draft)
            self.lengths.append(list(sequences.lengths))
        return draft


class RecordingDrafter(Recording, EagleDrafter):
    """An `EagleDrafter` that keeps what it proposes."""


class RecordingBlockDrafter(Recording, BlockDrafter):
    """A `BlockDrafter` that keeps what it proposes."""


def save_models(target: PreTrainedModel, folder: Path) -> None:
    """Saves a target, a draft model for it and a head, each in a folder of its name."""
    target.save_pretrained(folder / "target")
    noisy_copy(target, 0.05).save_pretrained(folder / "draft")
    tiny_head(target).save_pretrained(folder / "head")


def tiny_head(
    target: PreTrainedModel,
    seed: int = 0,
    eagle_version: int = 3,
    draft_vocab_size: int | None = None,
    sharpness: float = 3.0,
    layers: dict[str, Any] | None = None,
    **overrides: Any,
) -> EagleHead:
    """
    A random head for a tiny target, in its dtype. `layers` goes to the config of its decoder layers. Its draft
    vocabulary are every second of the target's tokens and what is left.
    """
    config = target.config.get_text_config(decoder=True)
    hidden_size, vocab_size = config.hidden_size, config.vocab_size
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24}
    text_config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": 1,
        **sizes,
        **(layers or {}),
    }
    overrides = {"aux_layer_ids": [0, 1, 2]} | overrides if eagle_version == 3 else overrides
    head_config = EagleConfig(
        text_config=text_config, eagle_version=eagle_version, draft_vocab_size=draft_vocab_size, **overrides
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = EagleHead(head_config).to(target.dtype).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    if draft_vocab_size is not None:
        order = sorted(range(vocab_size), key=lambda token: (token % 2 == 0, token))
        ids = torch.tensor(sorted(order[:draft_vocab_size]))
        head.d2t.copy_(ids - torch.arange(draft_vocab_size))
    return head


BLOCK_KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"num_layers": 2},
    "anchor first": {"anchor_first": True},
    "causal": {"causal": True, "num_layers": 2},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "windows that see all": {"layer_types": ["sliding_attention"], "sliding_window": 6, "window_is_causal": False},
    "own mask": {"has_mask_embedding": True},
    "draft vocabulary": {"draft_vocab_size": 6},
    "own embeddings": {"has_embeddings": True, "has_lm_head": True},
    "markov": {"anchor_first": True, "markov_rank": 4},
    "markov, draft vocabulary": {"markov_rank": 4, "draft_vocab_size": 6},
    "gated": {"anchor_first": True, "markov_rank": 4, "markov_type": "gated"},
    "rnn": {"anchor_first": True, "markov_rank": 4, "markov_type": "rnn"},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5},
    "peagle": {"is_peagle": True},
}
"""Block heads of every kind, as arguments of `tiny_block_head`."""
HOST_KINDS: dict[str, dict[str, Any]] = {
    "windows from the anchor": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "window_from_anchor": True,
    },
}
"""Those that no captured step can hold."""

CONFIDENCE_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"anchor_first": True, "has_confidence_head": True},
    "markov": {
        "anchor_first": True,
        "markov_rank": 4,
        "has_confidence_head": True,
        "confidence_with_markov": True,
        "draft_vocab_size": 6,
    },
    "rnn": {"markov_rank": 4, "markov_type": "rnn", "has_confidence_head": True, "confidence_with_markov": True},
}
"""Arguments of heads of small ranks that estimate their acceptance."""


def tiny_block_head(
    target: PreTrainedModel,
    seed: int = 0,
    num_layers: int = 1,
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
    sharpness: float = 3.0,
    **fields: Any,
) -> BlockHead:
    """
    A random block head of four rows for a tiny target, in its dtype. Its layers have other sizes than the target's;
    its draft vocabulary are every second of the target's tokens and what is left.
    """
    config = target.config.get_text_config(decoder=True)
    num_layers = len(layer_types or [None] * num_layers)
    text_config = {
        "model_type": "llama" if fields.get("is_peagle") else "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "layer_types": layer_types or ["full_attention"] * num_layers,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fields = {"block_size": 4, "mask_token_id": 1, "aux_layer_ids": [0, 1]} | fields
        head = BlockHead(BlockConfig(text_config=text_config, **fields)).to(target.dtype).eval()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() > 1 or parameter is head.mask_embedding:
                    parameter.normal_(std=sharpness * parameter.shape[-1] ** -0.5)
    if head.d2t is not None:
        order = sorted(range(config.vocab_size), key=lambda token: (token % 2 == 0, token))
        ids = torch.tensor(sorted(order[: len(head.d2t)]))
        head.d2t.copy_(ids - torch.arange(len(ids)))
    return head


def golden(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a reference implementation computed with a trained head, and what of it is no tensor."""
    return load_file(GOLDENS / name / "golden.safetensors"), json.loads((GOLDENS / name / "golden.json").read_text())


def trained_head(name: str = "safeailab_eagle3", **options: Any) -> EagleHead:
    """A head of the trained target, in float32: the caller's own."""
    if options:
        return EagleHead.from_pretrained(GOLDENS / name, dtype=torch.float32, **options)
    return copy.deepcopy(_read_head(name))


@lru_cache
def _read_head(name: str) -> EagleHead:
    return EagleHead.from_pretrained(GOLDENS / name, dtype=torch.float32)


def trained_block_head(name: str = "dspark", **options: Any) -> BlockHead:
    """A block head of the trained target, in float32: the caller's own."""
    return BlockHead.from_pretrained(GOLDENS / name, dtype=torch.float32, **options)


def trained_medusa_heads() -> MedusaHeads:
    return MedusaHeads.from_pretrained(GOLDENS / "medusa")


# ---------------------------------------------------------------------------------------------------- from scratch


def features_of(head: EagleHead, target: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """What the head reads of one forward of the target, `[1, tokens, feature_size]`."""
    boundaries = head.config.aux_boundaries(target.config.get_text_config().num_hidden_layers)
    with torch.no_grad(), watch_features(target, boundaries) as features:
        target(**inputs)
        return features.take(target.device, target.dtype)


@torch.no_grad()
def block_from_scratch(
    head: BlockHead, target: PreTrainedModel, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    States `[1, drafts, H]` of the positions after a text `ids` `[tokens]`, and their logits, by the head's own forward
    over nothing but the text: the context of all tokens but the last, then a block.
    """
    cache, lm_head, root = DynamicCache(), target.get_output_embeddings(), ids[None, -1:]
    embed = head.embed_tokens or target.get_input_embeddings()
    features = features_of(head, target, input_ids=ids[None, :-1])
    inputs = {"inputs_embeds": embed(ids[None, 1:])} if head.config.is_peagle else {}
    true_rows = head(features=features, past_key_values=cache, logits_to_keep=None, **inputs).hidden_states
    inputs = head.block_embeddings(head.block_tokens(root[0]), embed)
    block = head(inputs_embeds=inputs, past_key_values=cache, logits_to_keep=None)
    states = block.hidden_states[:, head.first_row :]
    if true_rows is not None:
        states = torch.cat([true_rows[:, -1:], states], dim=1)
    if head.target_ids is not None and head.lm_head is None:
        base = lm_head(states)[..., head.target_ids]
    else:
        base = head.compute_logits(states, lm_head)
    return states, base


def chain_from_scratch(
    head: EagleHead, target: PreTrainedModel, features: torch.Tensor, tokens: torch.Tensor, count: int, first: int = 0
) -> list[int]:
    """
    The chain of `count` tokens that the head drafts: one forward over all rows, then one row after the other.

    Args:
        features (`torch.Tensor` of shape `[1, rows, feature_size]`): the target's, from position `first` on.
        tokens (`torch.Tensor` of shape `[rows]`): those one position behind, the root last.
    """
    cache, lm_head = DynamicCache(), target.get_output_embeddings()
    embed = head.embed_tokens or target.get_input_embeddings()
    inputs, chain, tokens = {"features": features}, [], tokens[None]
    positions = torch.arange(first, first + tokens.shape[1])[None]
    for _ in range(count):
        with torch.no_grad():
            output = head(
                inputs_embeds=embed(tokens), position_ids=positions, past_key_values=cache, lm_head=lm_head, **inputs
            )
        best = int(output.logits[0, -1].argmax())
        chain.append(best if head.target_ids is None else int(head.target_ids[best]))
        tokens, inputs = torch.tensor([[chain[-1]]]), {"hidden_states": output.hidden_states[:, -1:]}
        positions = positions[:, -1:] + 1
    return chain


WIDE = TokenTree.from_branching((12, 2))
"""So wide that a random head hits now and then."""


def assert_drafts_as_from_scratch(
    drafter: RecordingDrafter, target: PreTrainedModel, text: torch.Tensor, pads: list[int], **inputs: Any
) -> None:
    """
    Asserts that the first path of every tree of `WIDE` that was proposed, for every row, is what the head drafts from
    nothing but the text so far. `inputs` go to the target beside the text.
    """
    first_path, compared = [0, WIDE.children[1][0] - 1], 0
    for draft, lengths in zip(drafter.trees, drafter.lengths, strict=True):
        for row, length in enumerate(lengths):
            if draft.topology.depth < WIDE.depth or draft.num_valid(row) < draft.num_nodes:
                continue  # at the end of the text
            ids = text[row, pads[row] : length]
            features = features_of(drafter.head, target, input_ids=ids[None, :-1], **inputs)
            expected = chain_from_scratch(drafter.head, target, features, ids[1:], 2)
            assert draft.tokens[row, first_path].tolist() == expected
            compared += 1
    assert compared > 10


def pads_of(inputs: dict[str, torch.Tensor]) -> list[int]:
    return (inputs["attention_mask"] == 0).sum(dim=1).tolist()
