"""What drafters with heads share: the head in the dtype of its target, and the target's parts that a head borrows."""

from __future__ import annotations

import copy
import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel


Head = TypeVar("Head", bound=PreTrainedModel)

_copies: weakref.WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, tuple[tuple, PreTrainedModel]]] = (
    weakref.WeakKeyDictionary()
)


def in_dtype_of(head: Head, target: PreTrainedModel) -> Head:
    """
    The head in the target's dtype, unless its own was asked for (`follows_target_dtype`): a copy with the same config,
    kept for the next call. Where the head's weights have changed since, the copy takes them over in place.
    """
    dtype, tensors = dtype_for(head, target), _tensors_of(head)
    if head.dtype == dtype:
        return head
    weights = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
    of_head: dict[torch.dtype, tuple[tuple, Any]] = _copies.setdefault(head, {})
    known, converted = of_head.get(dtype, ((), None))
    if converted is None or known != weights:
        if converted is None or not _take_over(_tensors_of(converted), tensors):
            converted = _converted(head, dtype)
        of_head[dtype] = weights, converted
    return converted


def dtype_for(head: PreTrainedModel, target: PreTrainedModel) -> torch.dtype:
    """In which the head runs beside the target."""
    is_fixed = not head.follows_target_dtype or any(p.device.type == "meta" for p in head.parameters())
    return head.dtype if is_fixed else target.dtype


def _tensors_of(head: PreTrainedModel) -> list[torch.Tensor]:
    return [*head.parameters(), *head.buffers()]


def _take_over(held: list[Any], values: list[Any]) -> bool:
    """
    Writes values to where others are held, in whose dtype, so that CUDA graphs over these go on; False if they do not
    fit.
    """
    if len(held) != len(values) or [a is None for a in held] != [b is None for b in values]:
        return False
    pairs = [(a, b) for a, b in zip(held, values, strict=True) if a is not None]
    if not all(a.shape == b.shape and a.device == b.device for a, b in pairs):
        return False
    with torch.inference_mode():  # those that were made in it can be written nowhere else
        for one, value in pairs:
            one.data.copy_(value.data)
    return True


def _converted(head: Head, dtype: torch.dtype) -> Head:
    configs = {id(config): config for module in head.modules() if (config := getattr(module, "config", None))}
    converted = copy.deepcopy(head, memo=configs)
    for parameter in converted.parameters():  # no buffers: frequencies of rotary embeddings stay in float32
        parameter.data = parameter.data.to(dtype)
    return converted


def borrowed_lm_head(head: PreTrainedModel, target: PreTrainedModel) -> Borrowed:
    """The target's lm_head; for a head with a draft vocabulary (`target_ids`), of those tokens alone."""
    module = target.get_output_embeddings()
    if head.target_ids is None:
        return Borrowed(module, target.dtype)
    return BorrowedRows(module, target.dtype, head.target_ids)


class OfCall:
    """
    What a drafter for calls was made of. Graphs that have it in them are kept with the models, so that these are not
    to be kept by it.

    Args:
        head, target (`PreTrainedModel`): as they were given.
    """

    def __init__(self, head: PreTrainedModel, target: PreTrainedModel):
        self._models = weakref.ref(head), weakref.ref(target)

    def models(self) -> tuple[Any, Any] | None:
        """Head and target; None if one is no more."""
        head, target = (model() for model in self._models)
        return None if head is None or target is None else (head, target)


class Borrowed:
    """
    A module of the target that a head uses: token embeddings, or the lm_head. It may be on another device than the
    head, or be loaded by accelerate when it is called.

    Args:
        module (`nn.Module`): the target's.
        dtype (`torch.dtype`): what it computes in.
    """

    def __init__(self, module: Any, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        hook = getattr(module, "_hf_hook", None)
        self._device = None if hook is not None else module.weight.device  # a hook moves the inputs itself

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the module makes of `inputs`, on the device of `inputs`."""
        dtype = self.dtype if inputs.is_floating_point() else None
        moved = inputs.to(device=self._device or inputs.device, dtype=dtype or inputs.dtype)
        return self.module(moved).to(inputs.device)


class BorrowedRows(Borrowed):
    """
    Some rows of the target's lm_head. They are copied once; where its weight has changed, `_rows_of` writes it there.

    Args:
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64): which.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, token_ids: torch.Tensor):
        super().__init__(module, dtype)
        self._token_ids, self.rows = token_ids, None
        if self._device is not None and type(module) is nn.Linear:
            self.rows = _rows_of(module, token_ids.to(self._device))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits `[…, draft vocab]` of states, on their device."""
        if self.rows is None:  # quantized, or offloaded
            return super().__call__(inputs).index_select(-1, self._token_ids.to(inputs.device))
        moved = inputs.to(device=self._device, dtype=self.dtype)
        return nn.functional.linear(moved, *self.rows).to(inputs.device)


_rows: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, torch.Tensor, tuple]] = weakref.WeakKeyDictionary()


def _rows_of(module: nn.Linear, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = module.weight, module.bias
    state = (weight.data_ptr(), weight._version, None if bias is None else bias._version)
    held = _rows.get(module)
    is_same = held is not None and torch.equal(held[1], token_ids)
    if held is None or not is_same or held[0] != state:
        with torch.no_grad():
            rows = weight[token_ids], None if bias is None else bias[token_ids]
        if held is not None and is_same and held[2][0].dtype == weight.dtype and _take_over([*held[2]], [*rows]):
            rows = held[2]
        held = _rows[module] = state, token_ids.clone(), rows
    return held[2]
