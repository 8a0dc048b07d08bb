"""Which rows see which, where the caller does not say."""

from __future__ import annotations

import torch

from ..attention.context import mask_values
from ..attention.switch import previous_implementation
from ..checkpoints.layer_fields import windows_of
from .configuration_block import BlockConfig
from .layers import is_causal_within


def masks_of_rows(
    config: BlockConfig, past: int, states: torch.Tensor, visible: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """
    The additive mask `[1 or batch, 1, rows, past + rows]` of every layer, for rows that follow `past` rows in the
    cache: they see all of these, within the layer's window, and one another as the config says. None under flash
    attention, whose layers know it themselves.

    Args:
        config (`BlockConfig`): the head's config.
        past (`int`): rows in the cache.
        states (`torch.Tensor` of shape `[batch, rows, H]`): the rows; dtype and device of the masks.
        visible (`torch.Tensor` of shape `[batch, past + rows]`, *optional*): 0 for padding.

    Raises:
        ValueError: for a window that counts from the anchor under flash attention, which cannot express it.
    """
    windows, rows = windows_of(config.text_config), states.shape[1]
    if visible is None and "flash" in previous_implementation(config.text_config):
        if config.window_from_anchor and any(windows):
            raise ValueError(
                "`window_from_anchor`=True: flash attention counts a window from each row. Load the head with "
                "attn_implementation='sdpa'."
            )
        return [None] * len(windows)
    slots = torch.arange(past + rows, device=states.device)
    distances = slots[past:, None] - slots
    masks: dict[int | None, torch.Tensor] = {}
    for window in set(windows):
        if window is None:
            allowed = torch.ones_like(distances, dtype=torch.bool)
        elif config.window_from_anchor:
            allowed = (past - slots <= window).expand_as(distances)
        else:
            allowed = distances < window
        if is_causal_within(config, window):
            allowed = allowed & (distances >= 0)
        allowed = allowed[None] if visible is None else allowed & visible[:, None].bool()
        masks[window] = torch.where(allowed[:, None], *mask_values(states.dtype, states.device))
    return [masks[window] for window in windows]
