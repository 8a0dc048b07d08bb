"""Heads for tests: tiny ones for a target of any family, and a drafter that keeps what it proposes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import DraftTree, EagleConfig, EagleHead
from hf_specdec.drafters import EagleDrafter
from hf_specdec.sequences import Sequences


class RecordingDrafter(EagleDrafter):
    """An `EagleDrafter` that appends every tree it proposes to `trees`, and the rows' lengths then to `lengths`."""

    def __init__(self, head: EagleHead):
        super().__init__(head)
        self.trees: list[DraftTree] = []
        self.lengths: list[list[int]] = []

    def propose(self, sequences: Sequences) -> DraftTree | None:
        draft = super().propose(sequences)
        if draft is not None:
            self.trees.append(draft)
            self.lengths.append(list(sequences.lengths))
        return draft


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
