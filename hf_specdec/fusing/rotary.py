"""Attention layers whose rotary embedding is fused: their own forwards, with another function of that name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

import torch

from ..kernels import DEVICES
from ..models.numbers import some_numbers


ROTARY = "apply_rotary_pos_emb"
"""Name of the function in transformers' model files."""


def has_rotary(forward: Any) -> bool:
    """Whether a forward, or one that its decorators wrap, calls the function."""
    while isinstance(forward, FunctionType):
        if ROTARY in forward.__code__.co_names:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def functions_named_in(function: Any) -> tuple[FunctionType, ...]:
    """The functions of its file that a function names, as they are now."""
    if not isinstance(function, FunctionType):
        return ()
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return tuple(one for one in named if isinstance(one, FunctionType))


def fused_rotary(forward: FunctionType) -> Callable[..., Any] | None:
    """
    The forward of an attention layer with our rotary embedding in place of its file's; None if that is not the
    function of a model file. The file's names are as they are now: nothing in it changes. Decorators stay.
    """
    if ROTARY not in forward.__code__.co_names:
        wrapped = vars(forward)["__wrapped__"]
        inner = fused_rotary(wrapped)
        cells = [CellType(inner) if _holds(cell, wrapped) else cell for cell in forward.__closure__ or ()]
        return None if inner is None else _rebuilt(forward, forward.__globals__, tuple(cells))
    own = forward.__globals__.get(ROTARY)
    if not isinstance(own, FunctionType) or own.__name__ != ROTARY or own.__code__.co_freevars:
        return None
    if own.__globals__ is not forward.__globals__ and not own.__module__.startswith("transformers."):
        return None

    code = own, *functions_named_in(own)

    def rotate(*args: Any, **options: Any) -> Any:
        turned = None if len(args) != 4 or options else _turned(code, *args)
        return own(*args, **options) if turned is None else turned

    return _rebuilt(forward, {**forward.__globals__, ROTARY: rotate}, forward.__closure__)


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _rebuilt(function: FunctionType, names: dict[str, Any], cells: tuple[CellType, ...] | None) -> FunctionType:
    """A function with the code of another one, and other global names and cells."""
    rebuilt = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


def _turned(
    code: tuple[FunctionType, ...], query: Any, key: Any, cos: Any, sin: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Queries and keys turned by the kernel; None if the file's own function must do it, `code[0]`."""
    if not all(type(one) is torch.Tensor for one in (query, key, cos, sin)) or query.dim() != 4 or cos.dim() != 3:
        return None
    if query.dtype not in DEVICES.get(query.device.type, ()) or cos.dtype not in (query.dtype, torch.float32):
        return None
    batch, _, nodes, size = query.shape
    fits = (
        key.dtype == query.dtype
        and key.dim() == 4
        and (key.shape[0], *key.shape[2:]) == (batch, nodes, size)
        and cos.shape[:2] in ((1, nodes), (batch, nodes))
        and (sin.shape, sin.dtype) == (cos.shape, cos.dtype)
        and len({one.device for one in (query, key, cos, sin)}) == 1
    )
    found = _arithmetic_of(code, query.dtype, cos.dtype, size, cos.shape[2]) if fits else None
    if found is None:
        return None
    from hf_specdec_kernels.rotary import unchecked

    return unchecked(query, key, cos, sin, *found)


@lru_cache(maxsize=256)
def _arithmetic_of(
    code: tuple[FunctionType, ...], dtype: torch.dtype, of_cos: torch.dtype, size: int, rotary_dim: int
) -> tuple[str, bool] | None:
    """
    How a function turns queries and keys, see `hf_specdec_kernels.rotary`; None if not as the kernel can. `code` is
    the function, and those that it calls.
    """
    from hf_specdec_kernels.rotary import LAYOUTS, rotary_naive

    query, key = (some_numbers((2, heads, 3, size), heads).to(dtype) for heads in (4, 2))
    cos, sin = (some_numbers((2, 3, rotary_dim), step).to(of_cos) for step in (0.3, 0.7))
    try:
        turned = code[0](query, key, cos, sin)
        for layout in LAYOUTS:
            for in_float in (False, True):
                ours = rotary_naive(query, key, cos, sin, layout, in_float)
                if len(turned) == 2 and all(
                    one.dtype == mine.dtype and torch.equal(one, mine) for one, mine in zip(turned, ours, strict=True)
                ):
                    return layout, in_float
    except Exception:  # noqa: BLE001  (code of others, to which our numbers may be anything)
        pass
    return None
