"""The attention function of an implementation, and what of it the tree-attention kernel is to compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def implementation_over_trees(implementation: str, kwargs: dict[str, Any]) -> str:
    """The implementation for a tree forward: the model's own if it takes a dense mask, else the nearest that does."""
    if implementation in ("eager", "sdpa"):
        return implementation
    # sdpa supports neither soft-capping nor attention sinks.
    return "eager" if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None else "sdpa"


def attention_function(implementation: str, module: torch.nn.Module) -> Callable:
    """
    The function that a layer calls for an implementation.

    Raises:
        ValueError: if the layer's model file defines no eager attention.
    """
    if implementation == "eager":
        # Every model file defines its own eager attention; a subclass may live in another file.
        for kind in type(module).__mro__:
            function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
            if function is not None:
                return function
        raise ValueError(
            f"`assistant_model`: no eager attention found for {type(module).__name__}. Load the model with "
            "attn_implementation='sdpa'."
        )
    return ALL_ATTENTION_FUNCTIONS[implementation]


def kernel_options(implementation: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Arguments of `KernelInputs.attend` in place of a layer's call. Soft-capping and sinks are applied where the
    implementation applies them: sdpa does not, whatever the layer asks for.

    Args:
        implementation (`str`): "eager" or "sdpa".
        options (`Mapping`): the keyword arguments of the call.
    """
    is_eager = implementation == "eager"
    return {
        "scale": options.get("scaling"),
        "softcap": options.get("softcap") if is_eager else None,
        "sinks": options.get("s_aux") if is_eager else None,
    }
