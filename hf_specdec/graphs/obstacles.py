"""Which models can be captured in CUDA graphs, and on which state of a model a capture depends."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..attention import implementation_of, obstacle_to_branches, partial_kinds_of, supports_switching
from ..models.asked_once import asked_once
from ..models.hooks import has_hooks_for_graphs
from ..models.modules import buffers_of, modules_of, parameters_of
from ..ranks import Ranks
from ..states import is_attention_free, layer_kinds_of
from ..states.served import obstacle_to_kernels
from .capturing import RECORDERS
from .experts import experts_of, has_experts


def obstacle_to_graphs(model: PreTrainedModel, wanted: bool | Literal["auto"]) -> str | None:
    """
    The reason why forwards of a model cannot be captured; None if they can.

    Raises:
        ValueError: if the model cannot be captured, and graphs are demanded (`wanted` is True, not "auto").
    """
    obstacle = _obstacle(model)
    if obstacle is not None and wanted is True:
        raise ValueError(
            f"`cuda_graphs=True`: {type(model).__name__} {obstacle}. Use `cuda_graphs='auto'`, which then goes "
            "without."
        )
    return obstacle


@asked_once
def _obstacle(model: PreTrainedModel) -> str | None:
    """The reason why forwards of a model cannot be captured; None if they can."""
    if model.device.type not in RECORDERS:
        return f"runs on {model.device.type}"
    modules = modules_of(model)
    if len({parameter.device for parameter in parameters_of(modules)}) > 1 or hasattr(model, "_hf_hook"):
        return "is spread over devices"
    obstacle = _obstacle_of_ranks(model)
    if obstacle is not None:
        return obstacle
    if model.training:
        return "is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "runs under autocast, which caches the weights that it has converted"
    if hasattr(model, "_orig_mod"):
        return "is wrapped by `torch.compile`"
    obstacle = None if getattr(model, "attends_by_itself", False) else _obstacle_of_layers(model)
    if obstacle is not None:
        return obstacle
    if has_hooks_for_graphs(modules):
        return "has forward hooks, which a graph would pass by"
    return None


def _obstacle_of_ranks(model: PreTrainedModel) -> str | None:
    """What keeps the exchanges between the processes of a tensor-parallel model out of graphs."""
    ranks = Ranks.of(model)
    if ranks.group is None:
        return None
    if model.device.type == "cuda" and "nccl" not in dist.get_backend(ranks.group):
        return f"is spread over processes that exchange by {dist.get_backend(ranks.group)}, and not by nccl"
    if has_experts(model):
        return "has experts that are spread over processes"
    return None


def _obstacle_of_layers(model: PreTrainedModel) -> str | None:
    """What keeps layers from attending by the kernels."""
    if not (supports_switching(model) or is_attention_free(model)):
        return "does not attend through transformers' `AttentionInterface`"
    obstacle = None if layer_kinds_of(model) is None else obstacle_to_kernels(model)
    obstacle = obstacle_to_branches(model) if obstacle is None else obstacle
    if obstacle is not None:
        return obstacle
    kinds = partial_kinds_of(model)
    if kinds:
        return f"attends to a part of the keys ({', '.join(sorted(kinds))}) that the tree-attention kernel cannot tell"
    return None


@asked_once
def fingerprint_of(model: PreTrainedModel) -> Any:
    """
    Addresses of the weights, classes of the modules and their forwards, active adapters, implementations of attention
    and experts: when one changes, graphs are captured anew.
    """
    modules = modules_of(model)
    tensors = (*parameters_of(modules), *buffers_of(modules))
    places = tuple(getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors)  # this rank's part
    adapters = tuple(
        str([getattr(module, name, None) for name in ("active_adapters", "disable_adapters", "merged", "scaling")])
        for module in modules
        if hasattr(type(module), "disable_adapters")  # asking the module instead of its class is slow
        if isinstance(module.disable_adapters, bool)  # a model has a method of that name
    )
    kinds: tuple[Any, ...] = tuple(map(type, modules))
    forwards = tuple(kind.forward for kind in dict.fromkeys(kinds))
    return hash((places, kinds)), forwards, implementation_of(model), experts_of(model), adapters


def reason_of(error: Exception) -> str:
    """First line of an error's text; the second, too, if the first ends in a colon, as in errors of the compiler."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def warn_of_failed_capture(
    model: PreTrainedModel, error: Exception, part: str = "A forward", what: str = "captured in a CUDA graph"
) -> None:
    """Warns that a model goes on without graphs, and why."""
    reason = reason_of(error)
    warnings.warn(
        f"{part} of {type(model).__name__} could not be {what}, and runs without: {reason}",
        stacklevel=3,
    )
