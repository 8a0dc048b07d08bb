"""
Attention over the nodes of a tree.

- `context`: what the queries of a forward attend to.
- `registered`: the attention and mask functions that transformers calls.
- `selection`: layers that attend to chunks, or to keys that they select.
- `switch`: switching a model to them during a call.
- `branches`: models that can read none.
- `kernel`: the Triton kernel, where it can run.
- `functions`: by which layers attend elsewhere.
"""

from .branches import obstacle_to_branches, obstacle_to_masks
from .context import AttentionContext, TreeContext, mask_values
from .registered import layer_window, register, tree_attention, tree_attention_mask, window_of
from .selection import tells_selection
from .switch import (
    NAME,
    has_windows,
    implementation_of,
    is_exact,
    needs_context,
    partial_kinds_of,
    supports_switching,
    switched_to_tree_attention,
)


__all__ = [
    "NAME",
    "AttentionContext",
    "TreeContext",
    "has_windows",
    "implementation_of",
    "is_exact",
    "layer_window",
    "mask_values",
    "tells_selection",
    "needs_context",
    "obstacle_to_branches",
    "obstacle_to_masks",
    "partial_kinds_of",
    "register",
    "supports_switching",
    "switched_to_tree_attention",
    "tree_attention",
    "tree_attention_mask",
    "window_of",
]
