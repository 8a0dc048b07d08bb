"""Checks of the walks' arguments."""

from __future__ import annotations

import torch

from ..checks import INTEGERS, check


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
        ValueError, TypeError: if the arguments that all walks over logits share do not fit together.
    """
    check_logits(logits)
    check_nodes(logits, tokens, parents, max_depth, end_tokens, active)


def check_nodes(
    of_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
) -> None:
    """
    Raises:
        ValueError, TypeError: if a tree and what a walk needs besides do not fit `of_nodes`, `[batch, nodes, …]`.
    """
    batch, nodes = of_nodes.shape[:2]
    if max_depth < 0:
        raise ValueError(f"`max_depth` is {max_depth}; pass the depth of the deepest node, 0 for a root alone.")
    check("tokens", tokens, of_nodes.device, (torch.int64,), batch, nodes)
    check("parents", parents, of_nodes.device, (torch.int64,), (1, batch), nodes)
    check("end_tokens", end_tokens, of_nodes.device, (torch.int64,), None)
    for name, tensor in (("tokens", tokens), ("parents", parents), ("end_tokens", end_tokens)):
        if tensor is not None:
            _check_last_stride(name, tensor)
    if end_tokens is not None and len(end_tokens) == 0:
        raise ValueError("`end_tokens` is empty; pass None.")
    check("active", active, of_nodes.device, (torch.bool,), batch)


def check_logits(logits: torch.Tensor) -> None:
    """
    Raises:
        ValueError, TypeError: if the logits are not `[batch, nodes, vocab]`, or of a wrong dtype or stride.
    """
    check("logits", logits, logits.device, FLOATS, None, None, None)
    _check_last_stride("logits", logits)


def check_chosen(chosen: torch.Tensor) -> None:
    """
    Raises:
        ValueError, TypeError: if the tokens are not `[batch, nodes]` int64.
    """
    check("chosen", chosen, chosen.device, (torch.int64,), None, None)


def check_uniforms(logits: torch.Tensor, uniforms: torch.Tensor) -> None:
    """
    Raises:
        ValueError, TypeError: if there is not one random number for every node.
    """
    check("uniforms", uniforms, logits.device, (torch.float64, torch.float32), *logits.shape[:2])
    _check_last_stride("uniforms", uniforms)


def check_rows(logits: torch.Tensor, **values: torch.Tensor | None) -> None:
    """
    Raises:
        ValueError, TypeError: if values per row are not `[batch]`, or of a wrong dtype.
    """
    for name, tensor in values.items():
        check(name, tensor, logits.device, INTEGERS if name == "top_k" else (torch.float32,), logits.shape[0])


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
    columns = vocab if draft_columns is None else None
    check("draft_logits", draft_logits, logits.device, FLOATS, batch, None, columns)
    _check_last_stride("draft_logits", draft_logits)
    check("draft_index", draft_index, logits.device, (torch.int64,), (1, batch), nodes)
    if draft_index is not None:
        _check_last_stride("draft_index", draft_index)
    check("draft_columns", draft_columns, logits.device, INTEGERS, vocab)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"`{name}` has strides {tensor.stride()}; the last must be 1: pass `{name}.contiguous()`.")
