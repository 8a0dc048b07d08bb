"""The inputs of each image of a prompt, where they can be told apart."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any

import torch


def runs_of(places: Collection[int]) -> list[tuple[int, int]]:
    """Where runs of successive places begin and end."""
    found = list[tuple[int, int]]()
    for place in sorted(places):
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        else:
            found.append((place, place + 1))
    return found


def has_one_each(counts: list[int], values: dict[str, Any]) -> bool:
    """
    Whether runs of tokens may have an image each, by their `counts` of tokens for which images stand: none is of
    markers alone, as where a text names one, and none has those of two images without text between them.
    """
    sizes = _sizes_of(values)
    return all(counts) and (
        len(sizes) != len(counts)
        or all(count * sum(sizes) == size * sum(counts) for count, size in zip(counts, sizes, strict=True))
    )


def _sizes_of(values: dict[str, Any]) -> list[int]:
    """How many patches each image has, by `image_grid_thw`; empty without it."""
    grid = values.get("image_grid_thw")
    return grid.prod(dim=-1).tolist() if isinstance(grid, torch.Tensor) and grid.dim() > 0 else []


def parts_of_inputs(count: int, values: dict[str, Any]) -> list[dict[str, Any]]:
    """
    The inputs of each of `count` images: tensors with a row for each, and tensors with rows for patches, of which
    `image_grid_thw` says how many each has. Empty if some inputs are none of these.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    sizes = _sizes_of(tensors)
    ends = dict[str, list[int]]()
    for name, value in tensors.items():
        if len(value) == count:
            ends[name] = list(range(count + 1))
        elif len(sizes) == count and len(value) == sum(sizes):
            ends[name] = [0, *accumulate(sizes)]
        else:
            return []
    cuts = {name: list(pairwise(of_name)) for name, of_name in ends.items()}
    return [
        values | {name: tensors[name][slice(*of_name[number])] for name, of_name in cuts.items()}
        for number in range(count)
    ]
