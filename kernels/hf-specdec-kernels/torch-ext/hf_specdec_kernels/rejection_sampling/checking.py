"""Checks of the walks' arguments."""

from __future__ import annotations

import torch

from ..checks import INTEGERS, check_device, check_dtype, check_shape


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_tree(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
) -> None:
    """
    Raises:
        ValueError, TypeError: if the arguments that all walks share do not fit together.
    """
    check_shape("logits", logits, None, None, None)
    _check_floats("logits", logits)
    batch, nodes, _ = logits.shape
    if max_depth < 0:
        raise ValueError(f"`max_depth` is {max_depth}; pass the depth of the deepest node, 0 for a root alone.")
    check_shape("tokens", tokens, batch, nodes)
    check_shape("parents", parents, (1, batch), nodes)
    for name, tensor in (("tokens", tokens), ("parents", parents), ("end_tokens", end_tokens)):
        if tensor is not None:
            check_dtype(name, tensor, (torch.int64,))
            check_device(name, tensor, logits.device)
            _check_last_stride(name, tensor)
    if end_tokens is not None:
        check_shape("end_tokens", end_tokens, None)
        if len(end_tokens) == 0:
            raise ValueError("`end_tokens` is empty; pass None.")
    if active is not None:
        check_shape("active", active, batch)
        check_dtype("active", active, (torch.bool,))
        check_device("active", active, logits.device)


def check_uniforms(logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    """
    Raises:
        ValueError, TypeError: if there is not one random number for every node.
    """
    check_shape("uniforms", uniforms, *logits.shape[:2])
    check_dtype("uniforms", uniforms, (torch.float64, torch.float32))
    check_device("uniforms", uniforms, logits.device)
    _check_last_stride("uniforms", uniforms)


def check_rows(logits: torch.Tensor, **values: torch.Tensor | None) -> None:
    """
    Raises:
        ValueError, TypeError: if values per row are not `[batch]`, or of a wrong dtype.
    """
    for name, tensor in values.items():
        if tensor is not None:
            check_shape(name, tensor, logits.shape[0])
            check_dtype(name, tensor, INTEGERS if name == "top_k" else (torch.float32,))
            check_device(name, tensor, logits.device)


def check_draft(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_index: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
) -> None:
    """
    Raises:
        ValueError, TypeError: if the draft's distributions do not fit the target's.
    """
    batch, nodes, vocab = logits.shape
    check_shape("draft_logits", draft_logits, batch, None, vocab if draft_columns is None else None)
    _check_floats("draft_logits", draft_logits)
    check_device("draft_logits", draft_logits, logits.device)
    if draft_index is not None:
        check_shape("draft_index", draft_index, (1, batch), nodes)
        check_dtype("draft_index", draft_index, (torch.int64,))
        check_device("draft_index", draft_index, logits.device)
        _check_last_stride("draft_index", draft_index)
    if draft_columns is not None:
        check_shape("draft_columns", draft_columns, vocab)
        check_dtype("draft_columns", draft_columns, INTEGERS)
        check_device("draft_columns", draft_columns, logits.device)


def _check_floats(name: str, tensor: torch.Tensor) -> None:
    check_dtype(name, tensor, FLOATS)
    _check_last_stride(name, tensor)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`.")
