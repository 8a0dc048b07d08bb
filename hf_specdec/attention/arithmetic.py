"""Whether the tree-attention kernel computes what the layers of a model compute."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.numbers import some_numbers
from ..models.probe import layers_of
from ..models.probed_layers import AttentionCall
from .functions import attention_function, implementation_over_trees, kernel_options


_COMMITTED, _NODES = 4, 3
_TOLERANCE = 1e-4

_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def is_known(model: PreTrainedModel, implementation: str, is_paged: bool = False) -> bool:
    """
    Whether the kernel computes what every layer of a model computes with `implementation`; found once per model. An
    eager attention, of which every model file has its own, is run over a few numbers and compared.

    Args:
        is_paged (`bool`, *optional*, defaults to `False`): whether the kernel is to read a paged cache in place.
            Layers that expand what they cache, as those with a latent do, would expand all blocks.
    """
    found = _known.setdefault(model, {})
    key = implementation, is_paged, model.dtype
    if key not in found:
        found[key] = _is_known(model, implementation, is_paged)
    return found[key]


def _is_known(model: PreTrainedModel, implementation: str, is_paged: bool) -> bool:
    layers = layers_of(model)
    calls = [] if layers is None else layers.calls
    if not calls:
        return False
    if is_paged and not all(call.reads_cache for call in calls):
        return False
    alike: dict[Any, bool] = {}
    for call in calls:
        own = implementation_over_trees(implementation, call.options)
        options = sorted((name, _plain(value)) for name, value in call.options.items())
        key = own, type(call.module).__mro__[1], call.query, call.key, call.value, repr(options)
        if key not in alike:
            alike[key] = _is_computed(call, own)
    return all(alike.values())


def _plain(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _is_computed(call: AttentionCall, implementation: str) -> bool:
    if call.query[0] % call.key[0]:
        return False
    if implementation == "sdpa":
        return "position_bias" not in call.options
    try:
        return _differs_by(call) < _TOLERANCE
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):  # the functions of others fail in any way
        return False


def _differs_by(call: AttentionCall) -> float:
    """Largest difference between a layer's eager attention and the kernel's arithmetic, over some numbers."""
    from hf_specdec_kernels import pack_ancestors
    from hf_specdec_kernels.tree_attention.naive import tree_attention_naive

    module = _with_numbers(call.module)
    own = vars(call.module)["_parameters"]
    names = {id(parameter): name for name, parameter in own.items()}
    options = dict(call.options)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if sinks is not None:
        name = names.get(id(sinks))
        options["s_aux"] = some_numbers(tuple(sinks.shape)) if name is None else vars(module)["_parameters"][name]
    (heads, dim), (kv_heads, _), (_, value_dim) = call.query, call.key, call.value
    scale = options.get("scaling") or dim**-0.5
    slots = _COMMITTED + _NODES
    # Scores differ by about 1, around the soft cap, where there is one.
    size = (scale * dim**0.5) ** -0.5
    query, key = size * some_numbers((1, heads, _NODES, dim)), size * some_numbers((1, kv_heads, slots, dim), 0.7)
    query[..., 0] = key[..., 0] = ((softcap or 0.0) / scale) ** 0.5
    value = some_numbers((1, kv_heads, slots, value_dim), 1.3)
    ancestors = torch.ones(1, _NODES, _NODES, dtype=torch.bool, device="cpu").tril()
    allowed = torch.nn.functional.pad(ancestors, (_COMMITTED, 0), value=True)[:, None]
    mask = query.new_zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        attended, _ = attention_function("eager", module)(module, query, key, value, mask, **options)
    of_kernel = kernel_options("eager", options) | {"scale": scale}
    lengths = torch.tensor([_COMMITTED], device="cpu")
    expected = tree_attention_naive(query, key, value, lengths, pack_ancestors(ancestors), _NODES, **of_kernel)
    if attended.shape != expected.shape:
        return float("inf")
    return (attended - expected).abs().nan_to_num(nan=float("inf")).max().item()


def _with_numbers(module: nn.Module) -> nn.Module:
    """A copy of a shadow whose parameters of one dimension, such as sinks, hold numbers."""
    double = nn.Module.__new__(type(module))
    double.__dict__.update(vars(module))
    double.__dict__["_parameters"] = {
        name: one if one is None or one.dim() != 1 else some_numbers(tuple(one.shape), 2.1)
        for name, one in vars(module)["_parameters"].items()
    }
    return double
