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
    kept for the next call as long as the head and its weights stay as they are.
    """
    dtype, parameters = target.dtype, list(head.parameters())
    if not head.follows_target_dtype or head.dtype == dtype or any(p.device.type == "meta" for p in parameters):
        return head
    weights = tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)
    of_head = _copies.setdefault(head, {})
    if dtype not in of_head or of_head[dtype][0] != weights:
        of_head[dtype] = weights, _converted(head, dtype)
    return of_head[dtype][1]


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
    Some rows of the target's lm_head. They are copied once, and kept as long as its weight stays as it is.

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
    if held is None or held[0] != state or not torch.equal(held[1], token_ids):
        with torch.no_grad():
            rows = weight[token_ids], None if bias is None else bias[token_ids]
        held = _rows[module] = state, token_ids.clone(), rows
    return held[2]
