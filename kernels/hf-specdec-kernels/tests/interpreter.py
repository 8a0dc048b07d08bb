"""
Triton's interpreter without what it does anew for each launch and each integer, which is half of what kernels take
there, and with the rounding of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """Patches of `triton.language` that stay."""

    def restore(self) -> None:
        pass


def patch_the_language_once() -> None:
    """
    Replaces the functions of `triton.language` once. The interpreter replaces them in every launch, and in every call
    of a function by a kernel looks for those that it has to replace. Nothing else runs in this process: they may stay.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched: dict[int, dict[str, Any]] = {}

    def patch_once(function: Any) -> _Kept:
        module = function.__globals__
        if id(module) not in patched:
            patched[id(module)] = module
            patch(function)
        return _Kept()

    interpreter._patch_lang = patch_once


def let_integers_overflow() -> None:
    """Lets sums wrap around, as where kernels are compiled. Else each is computed in 64 bits as well."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def round_to_the_nearest() -> None:
    """Lets conversions to bfloat16 round to the nearest number, as on a GPU. The interpreter cuts bits off."""
    convert: Callable[..., Any] = interpreter._convert_float

    def convert_float(values: Any, of: Any, to: Any, rounding: Any) -> Any:
        if (of, to) != (tl.float32, tl.bfloat16):
            return convert(values, of, to, rounding)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = convert_float
