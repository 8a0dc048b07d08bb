"""What a model's layers hand to a cache and to attention, found by one forward of its shadow."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.moe import ExpertsInterface
from transformers.utils import logging

from ..compat import CACHE, cache_argument
from .layer_kinds import is_attention_free, layer_kinds_of
from .probed_cache import ProbedCache
from .probed_layers import Layers
from .shadow import Shadow
from .structure import execution_device, forward_parameters


logger = logging.get_logger(__name__)

_NAME = "hf_specdec_probe"


_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Layers | None]] = weakref.WeakKeyDictionary()
_read_alone: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_running = threading.local()


def layers_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Layers | None:
    """
    What the layers of a model do, found once per model and dtype by `probe`; None for a model that cannot be probed.

    Args:
        model (`PreTrainedModel`): the model.
        dtype (`torch.dtype`, *optional*): the dtype that it is to have, if it is not its own.
    """
    model = getattr(model, "_orig_mod", model)
    found, key = _found.setdefault(model, {}), dtype or model.dtype
    if key not in found:
        found[key] = probe(model, key)
    return found[key]


def reads_tokens_alone(model: PreTrainedModel) -> bool:
    """Whether a model's forward takes tokens without an image or the like; some refuse that with a ValueError."""
    if model not in _read_alone:
        try:
            _probe(model, Shadow(model, model.dtype), model.dtype, is_whole=True, with_context=False)
        except ValueError:
            _read_alone[model] = False
        except Exception:  # noqa: BLE001  (what depends on data fails in any way)
            _read_alone[model] = True
        else:
            _read_alone[model] = True
    return _read_alone[model]


def probe(model: PreTrainedModel, dtype: torch.dtype) -> Layers | None:
    """
    Runs a model's shadow over one token: without data, or with the model's weights if its shapes depend on data. Where
    the whole model wants more than tokens, its decoder runs.
    """
    has_states = isinstance(model, PreTrainedModel) and layer_kinds_of(model) is not None
    for has_data in (False, True):
        for is_whole, with_context in dict.fromkeys(
            (is_whole, with_context) for with_context in (has_states, False) for is_whole in (True, False)
        ):
            try:
                found = _probe(model, Shadow(model, dtype, has_data), dtype, is_whole, with_context)
            except Exception as error:  # noqa: BLE001  (the forwards of others fail in any way)
                logger.debug(f"{type(model).__name__} was not probed: {error}")
                continue
            if found.cached or found.states:
                return found
    return None


def _probe(model: PreTrainedModel, shadow: Shadow, dtype: torch.dtype, is_whole: bool, with_context: bool) -> Layers:
    for config in shadow.configs:
        config._attn_implementation_internal = config._experts_implementation_internal = _NAME
    cache = ProbedCache(model, shadow)
    before, _running.cache = getattr(_running, "cache", None), cache
    forwarded = shadow.model if is_whole else shadow.model.get_decoder()
    device = execution_device(model) if shadow.has_data else torch.device("meta")
    try:
        with torch.no_grad():
            context = {"tree_context": cache} if with_context else {}
            inputs = _inputs_of(forwarded, cache, dtype, device)
            cache.mask = inputs.get("attention_mask")
            forwarded(**inputs, **context)
    finally:
        _running.cache = before
    return Layers(cache.cached, cache.calls, cache.states, with_context and not cache.lacks_context)


def _inputs_of(forwarded: Any, cache: Cache, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a forward over one token."""
    if hasattr(forwarded, "inputs_of_one_row"):  # a head
        return forwarded.inputs_of_one_row(dtype, device) | {"past_key_values": cache}
    parameters = forward_parameters(forwarded)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    inputs = {"position_ids": token, "attention_mask": mask, "use_cache": True, "output_router_logits": False}
    if isinstance(forwarded, PreTrainedModel) and is_attention_free(forwarded):
        del inputs["attention_mask"]
    inputs = {name: value for name, value in inputs.items() if name in parameters}
    return {"input_ids": token, cache_argument(parameters) or CACHE: cache, "return_dict": True} | inputs


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    _running.cache.attended(module, [query, key, value], mask, options)
    batch, heads, queries, _ = query.shape
    return query.new_zeros(batch, queries, heads, value.shape[3]), None


def _experts(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Which experts a token goes to is a matter of data, which a shadow has not."""
    return torch.zeros_like(hidden_states)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
ExpertsInterface.register(_NAME, _experts)
