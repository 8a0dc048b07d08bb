"""Heads as decoding runs them: one chain of forwards with the head's own cache."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from hf_specdec.eagle import EagleConfig, EagleHead


def random_head(config: EagleConfig) -> EagleHead:
    """A random head in float64 whose weights, norms included, all make a difference."""
    head = EagleHead(config).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 3 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1))
    return head


class _Chain(DynamicCache):
    """Keeps all rows (the mask does the window), and counts those of whole forwards only."""

    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0


def decoded(head: EagleHead, features: torch.Tensor, embeddings: torch.Tensor, row: int, steps: int) -> torch.Tensor:
    """States `[batch, steps, H]` of the chain behind `row`, by the head's own forward and cache."""
    cache = _Chain()
    states, collected = None, []
    for step in range(steps):
        if step == 0:
            source = {"features": features[:, : row + 1]}
            embeds = embeddings[:, 1 : row + 2]
            positions = torch.arange(row + 1)[None]
        else:
            source = {"hidden_states": states}
            embeds = embeddings[:, row + 1 + step, None]
            positions = torch.tensor([[row + step]])
        output = head(**source, inputs_embeds=embeds, position_ids=positions, past_key_values=cache)
        cache.length = row + 1 + step
        states = output.hidden_states[:, -1:]
        last = states if head.norm is None or head.config.norm_output else head.norm(states)
        collected.append(last[:, 0])
    return torch.stack(collected, dim=1)
