"""Checks of arguments. No check reads a device value, so all of them may run while a CUDA graph is captured."""

from __future__ import annotations

import torch


INTEGERS = (torch.int32, torch.int64)
Sizes = int | tuple[int, ...] | None


def check(
    name: str,
    tensor: torch.Tensor | None,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] | None,
    *sizes: Sizes,
) -> None:
    """Checks shape, dtype (unless `dtypes` is None) and device of an argument, which may be None."""
    if tensor is not None:
        check_shape(name, tensor, *sizes)
        if dtypes is not None:
            check_dtype(name, tensor, dtypes)
        check_device(name, tensor, device)


def check_shape(name: str, tensor: torch.Tensor, *sizes: Sizes) -> None:
    """
    Raises:
        ValueError: if the tensor's shape is not `sizes`; a tuple names the sizes allowed, None allows any.
    """
    allowed = [size if isinstance(size, tuple) else (size,) for size in sizes]
    fits = tensor.dim() == len(sizes) and all(
        any(size is None or actual == size for size in choices)  # `in` is not traced where sizes are symbols
        for actual, choices in zip(tensor.shape, allowed, strict=True)
    )
    if not fits:
        wanted = ", ".join(
            " or ".join("any" if size is None else str(size) for size in choices) for choices in allowed
        )
        raise ValueError(f"`{name}` has shape {list(tensor.shape)}; it must be [{wanted}].")


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """
    Raises:
        TypeError: if the tensor's dtype is not among `allowed`.
    """
    if tensor.dtype not in allowed:
        raise TypeError(f"`{name}` has dtype {tensor.dtype}; convert it to {' or '.join(map(str, allowed))}.")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """
    Raises:
        ValueError: if the tensor is on another device than the other arguments.
    """
    if tensor.device != device:
        raise ValueError(f"`{name}` is on {tensor.device}, the other arguments on {device}; move it there.")
