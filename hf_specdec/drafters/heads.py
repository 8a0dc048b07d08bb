"""Code shared by drafters with heads: the head in its target's dtype, and the target's modules that a head borrows."""

from __future__ import annotations

import copy
import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.pretrained import PublishedModel
from ..sequences import Rows
from ..trees import DynamicTree, Tree, as_tree


Head = TypeVar("Head", bound=PreTrainedModel)

_copies: weakref.WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, tuple[tuple, PreTrainedModel]]] = (
    weakref.WeakKeyDictionary()
)


def tree_of_head(head: PreTrainedModel, depth: int, top_k: int, num_nodes: int, num_tokens: int) -> Tree:
    """
    The tree that a head's config names; else a dynamic one of this size, or as large as a choice among `num_tokens`
    tokens allows.
    """
    if head.config.default_tree is not None:
        return as_tree(head.config.default_tree)
    top_k = min(top_k, num_tokens)
    return DynamicTree(depth=depth, top_k=top_k, num_nodes=min(num_nodes, top_k + (depth - 1) * top_k**2))


def in_dtype_of(head: Head, target: PreTrainedModel) -> Head:
    """
    The head in the target's dtype, unless the head's own was asked for (`follows_target_dtype`): a copy with the same
    config, kept for the next call. Where the head's weights have changed since, the copy takes them over in place.
    """
    dtype, tensors = dtype_for(head, target), _tensors_of(head)
    if head.dtype == dtype:
        return head
    weights = tuple(map(_state_of, tensors))
    of_head: dict[torch.dtype, tuple[tuple, Any]] = _copies.setdefault(head, {})
    known, converted = of_head.get(dtype, ((), None))
    if converted is None or known != weights:
        if converted is None or not _take_over(_tensors_of(converted), tensors):
            converted = _converted(head, dtype)
        of_head[dtype] = weights, converted
    return converted


def dtype_for(head: PreTrainedModel, target: PreTrainedModel) -> torch.dtype:
    """The dtype in which the head runs beside the target."""
    is_fixed = not head.follows_target_dtype or any(p.device.type == "meta" for p in head.parameters())
    return head.dtype if is_fixed else target.dtype


def dtype_in_use(model: PreTrainedModel, target: PreTrainedModel) -> torch.dtype:
    """The dtype in which a model of a call runs: a head may run in the target's."""
    return dtype_for(model, target) if isinstance(model, PublishedModel) else model.dtype


def _tensors_of(head: PreTrainedModel) -> list[torch.Tensor]:
    return [*head.parameters(), *head.buffers()]


def _state_of(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Address and version, which tell that a tensor has changed. Inference tensors have no version."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _take_over(held: list[Any], values: list[Any]) -> bool:
    """
    Copies `values` into the tensors `held`, in the dtype of these, so that captured CUDA graphs over them stay valid;
    False if number, shapes or devices differ.
    """
    if len(held) != len(values) or [a is None for a in held] != [b is None for b in values]:
        return False
    pairs = [(a, b) for a, b in zip(held, values, strict=True) if a is not None]
    if not all(a.shape == b.shape and a.device == b.device for a, b in pairs):
        return False
    with torch.inference_mode():  # inference tensors can be written nowhere else
        for one, value in pairs:
            one.data.copy_(value.data)
    return True


def _converted(head: Head, dtype: torch.dtype) -> Head:
    configs = {id(config): config for module in head.modules() if (config := getattr(module, "config", None))}
    converted = copy.deepcopy(head, memo=configs)
    for parameter in converted.parameters():  # not buffers: frequencies of rotary embeddings stay in float32
        parameter.data = parameter.data.to(dtype)
    return converted


def roots_of(sequences: Rows) -> torch.Tensor:
    """The root of every sequence, its last token, `[batch, 1]` int64."""
    last = torch.tensor(sequences.lengths, device=sequences.device)[:, None] - 1
    return sequences.gather(last)


def borrowed_lm_head(head: PreTrainedModel, target: PreTrainedModel) -> Borrowed:
    """The target's lm_head; for a head with a draft vocabulary (`target_ids`), only the rows of these tokens."""
    module = target.get_output_embeddings()
    if head.target_ids is None:
        return Borrowed(module, target.dtype)
    return BorrowedRows(module, target.dtype, head.target_ids)


class ModelRefs:
    """
    Weak references to the head and the target that the drafter of a call was made for. Captured graphs may hold the
    drafter and are kept with the models, so that the drafter must not keep the models alive.

    Args:
        head, target (`PreTrainedModel`): the models as they were given to the call.
    """

    def __init__(self, head: PreTrainedModel, target: PreTrainedModel):
        self._models = weakref.ref(head), weakref.ref(target)

    def models(self) -> tuple[Any, Any] | None:
        """Head and target; None if one of them has been freed."""
        head, target = (model() for model in self._models)
        return None if head is None or target is None else (head, target)


class Borrowed:
    """
    A module of the target that a head uses: token embeddings, or the lm_head. The module may be on another device than
    the head, or be loaded by accelerate when it is called.

    Args:
        module (`nn.Module`): the target's module.
        dtype (`torch.dtype`): dtype in which the module computes.
    """

    def __init__(self, module: Any, dtype: torch.dtype):
        self.module, self.dtype = module, dtype
        is_hooked = getattr(module, "_hf_hook", None) is not None  # accelerate's hook moves the inputs itself
        weights = () if is_hooked else module.parameters()  # a wrapper's are those of what it wraps
        self._device = next((weight.device for weight in weights), None)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The module's output for `inputs`, on the device of `inputs`."""
        dtype = self.dtype if inputs.is_floating_point() else None
        moved = inputs.to(device=self._device or inputs.device, dtype=dtype or inputs.dtype)
        return self.module(moved).to(inputs.device)


class BorrowedRows(Borrowed):
    """
    Rows of the target's lm_head for a draft vocabulary. The rows are copied once; when the lm_head's weight has
    changed, `_rows_of` updates the copy in place.

    Args:
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64): the target's token of each row.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, token_ids: torch.Tensor):
        super().__init__(module, dtype)
        self._token_ids, self.rows = token_ids, None
        if self._device is not None and type(module) is nn.Linear:
            self.rows = _rows_of(module, token_ids.to(self._device))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits `[…, draft vocab]` of hidden states, on their device."""
        if self.rows is None:  # no copy of a quantized or offloaded lm_head
            return super().__call__(inputs).index_select(-1, self._token_ids.to(inputs.device))
        moved = inputs.to(device=self._device, dtype=self.dtype)
        return nn.functional.linear(moved, *self.rows).to(inputs.device)


_rows: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, torch.Tensor, tuple]] = weakref.WeakKeyDictionary()


def _rows_of(module: nn.Linear, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = module.weight, module.bias
    state = (_state_of(weight), None if bias is None else _state_of(bias))
    held = _rows.get(module)
    is_same = held is not None and torch.equal(held[1], token_ids)
    if held is None or not is_same or held[0] != state:
        with torch.no_grad():
            rows = weight[token_ids], None if bias is None else bias[token_ids]
        if held is not None and is_same and held[2][0].dtype == weight.dtype and _take_over([*held[2]], [*rows]):
            rows = held[2]
        held = _rows[module] = state, token_ids.clone(), rows
    return held[2]
