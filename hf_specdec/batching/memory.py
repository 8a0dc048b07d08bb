"""What K/V and waiting features take of the memory of each device, and what is free there."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafters.heads import dtype_for
from ..eagle import EagleHead
from ..forward import execution_device
from ..kv_sizes import kv_bytes_per_layer
from .waiting_features import WaitingFeatures


DEFAULT_SHARES = {"cpu": 0.25}
"""By type of device, the share of the free memory that blocks take; elsewhere 0.8."""


def bytes_per_token(models: Sequence[PreTrainedModel]) -> dict[torch.device, int]:
    """Bytes of K/V per token of a text, on the devices where the models' layers run. The first model is the target."""
    total: Counter[torch.device] = Counter()
    for model in models:
        config = model.config.get_text_config(decoder=True)
        per_layer = kv_bytes_per_layer(config, _dtype_in_use(model, models[0]))
        for layer in _layers(model, config.num_hidden_layers):
            total[_device_of(layer, model)] += int(per_layer * _share_of_heads(layer))
    return dict(total)


def bytes_per_request(models: Sequence[PreTrainedModel]) -> dict[torch.device, int]:
    """Bytes of features that wait for heads, of each request that may run, where there are any."""
    total: Counter[torch.device] = Counter()
    for model in models:
        if isinstance(model, EagleHead):
            size = model.config.feature_size * _dtype_in_use(model, models[0]).itemsize
            total[execution_device(model)] += WaitingFeatures.CAPACITY * size
    return dict(total)


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has; on a GPU torch first gives back what it holds for later, or for managers that were."""
    if device.type == "cuda":
        gc.collect()  # their parts know each other
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def _dtype_in_use(model: PreTrainedModel, target: PreTrainedModel) -> torch.dtype:
    """In which it runs: a head may follow the target's."""
    return dtype_for(model, target) if isinstance(model, EagleHead) else model.dtype


def _layers(model: PreTrainedModel, number: int) -> list[nn.Module]:
    """The decoder layers; the whole model instead of each, where they cannot be told."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    return list(lists[0]) if lists else [model] * number


def _device_of(layer: nn.Module, model: PreTrainedModel) -> torch.device:
    """Where a layer runs: by accelerate's hook, if there is one."""
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = next((parameter.device for parameter in layer.parameters()), torch.device("meta"))
    device = torch.device(device)
    return execution_device(model) if device.type == "meta" else device


def _share_of_heads(layer: nn.Module) -> float:
    """The share of the key and value heads that this process has: with `tp_plan` not all of them."""
    for name, parameter in layer.named_parameters():
        if name.endswith("k_proj.weight") and hasattr(parameter, "to_local"):
            return parameter.to_local().numel() / parameter.numel()
    return 1.0
