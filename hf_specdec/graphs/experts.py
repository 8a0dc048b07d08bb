"""
Mixtures of experts in captured forwards. transformers' "eager" experts read on the host which of them have tokens, and
so does its "grouped_mm" where torch has no kernel for it: a CUDA graph can hold neither. While a forward is captured,
experts run by a function that computes the same without waiting; what the user has set holds everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from ..models.config_switch import ConfigSwitches
from ..models.modules import modules_of


NAME = "hf_specdec_captured"
"""The name under which `captured_experts` is registered with transformers."""

BATCHED_COST = 3
"""How often "batched_mm" moves the weights of an expert for each token sent to it: it copies them first."""
MOST_TOKENS = 128
"""Most tokens that all experts read at once: bounds the memory of their outputs."""
_REPLACED = (None, "eager", "grouped_mm")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def captured_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    The registered function of experts (transformers' `ExpertsInterface`). By the number of tokens, which is fixed in a
    graph, it copies the weights of the chosen experts, or runs all experts on all tokens: each expert's weights are
    then read once, and steps over trees send tokens to most experts anyway.

    Args:
        module (`nn.Module`): the experts, decorated with transformers' `use_experts_implementation`.
        hidden_states (`torch.Tensor` of shape `[tokens, size]`): their inputs.
        top_k_index (`torch.Tensor` of shape `[tokens, k]`, int64), top_k_weights (`torch.Tensor` of the same shape):
            the experts that the router chose for each token, and their weights.

    Returns:
        `torch.Tensor`: the weighted sums of the chosen experts' outputs, `[tokens, size]`.
    """
    if BATCHED_COST * top_k_index.numel() <= module.num_experts:
        found: torch.Tensor = batched_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return found
    given = (hidden_states, top_k_index, top_k_weights)
    parts = zip(*(one.split(MOST_TOKENS) for one in given), strict=True)
    return torch.cat([_all_experts(module, *part) for part in parts])


def _all_experts(module: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    outputs = _linear(module, states.expand(module.num_experts, -1, -1), "gate_up" if module.has_gate else "up")
    outputs = module._apply_gate(outputs) if module.has_gate else module.act_fn(outputs)
    outputs = _linear(module, outputs, "down")
    # Outputs that were not chosen are left out, not multiplied by zero: they may have overflowed.
    outputs = outputs[chosen, torch.arange(len(states), device=states.device)[:, None]]
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    return (outputs * weights[..., None]).sum(dim=1).to(states.dtype)


def _linear(module: Any, states: torch.Tensor, name: str) -> torch.Tensor:
    """A linear layer of every expert, over `[experts, tokens, size]`."""
    weight = getattr(module, f"{name}_proj")
    outputs = torch.bmm(states, weight if module.is_transposed else weight.transpose(1, 2))
    return outputs + getattr(module, f"{name}_proj_bias")[:, None] if module.has_bias else outputs


# ---------------------------------------------------------------------------------------------------------- the switch


_switches: ConfigSwitches[str | None] = ConfigSwitches("_experts_implementation", NAME)


def experts_of(model: PreTrainedModel) -> str | None:
    """The implementation of experts that a model has outside of captures."""
    return _implementation_of(model.config.get_text_config(decoder=True))


def has_experts(model: PreTrainedModel) -> bool:
    """Whether a model has mixtures of experts whose implementation can be switched."""
    return any(map(_are_experts, modules_of(model)))


def _are_experts(module: nn.Module) -> bool:
    return {"has_gate", "is_transposed"} <= vars(module).keys()


def _implementation_of(config: PreTrainedConfig) -> str | None:
    found: str | None = _switches.said(config)
    return found


@contextmanager
def with_captured_experts(*models: PreTrainedModel) -> Iterator[None]:
    """
    Lets the experts of models run by `captured_experts` inside the context, where their own implementation would wait
    for the device. Captures of several threads are counted: the first one switches, the last one restores.
    """
    with _switches.switched(
        lambda: [config for model in models for config in _configs_that_wait(model)],
        lambda config: config._experts_implementation,
        lambda previous: NAME,
    ):
        yield


def _configs_that_wait(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that experts of a model read, each once, if all that read it can be run by `captured_experts`."""
    waits: dict[int, tuple[PreTrainedConfig, list[bool]]] = {}
    for module in modules_of(model):
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and _are_experts(module):
            waits.setdefault(id(config), (config, []))[1].append(_waits(module, _implementation_of(config)))
    return [config for config, found in waits.values() if all(found)]


def _waits(module: Any, implementation: str | None) -> bool:
    """Whether experts wait for the device, and `captured_experts` can take their place (not so in quantized ones)."""
    weight = getattr(module, "down_proj", None)
    if implementation not in _REPLACED or not isinstance(weight, torch.Tensor) or weight.dtype not in _DTYPES:
        return False
    return implementation != "grouped_mm" or not _has_grouped_kernel(weight)


def _has_grouped_kernel(weight: nn.Parameter | torch.Tensor) -> bool:
    """
    Whether torch runs `grouped_mm` by a kernel: of bfloat16, on devices of capability 9 and 10. Elsewhere the host
    reads how large the groups are, and loops over them (torch's `GroupedMMUtils.h`).
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


ExpertsInterface.register(NAME, captured_experts)
