"""What a captured step is told of its rows: all of it at one place, which one copy fills."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from ..blocks import ZERO_BLOCK, BlockTable
from ..distribution import uniform
from ..graphs import FEWEST_BLOCKS, next_power_of_two, next_size
from ..request import Request
from ..waiting_features import WaitingFeatures


class Kind(IntEnum):
    """How a row's next token is found."""

    RESTS = 0
    GREEDY = 1
    TARGET = 2
    REJECTION = 3


@dataclass(frozen=True)
class Size:
    """
    What a step has room for.

    Args:
        rows (`int`): requests.
        blocks (`int`): blocks of a request; the last is nobody's.
        depth (`int`): levels of the tree.
        lag (`int`): tokens that a draft can catch up with.
    """

    rows: int
    blocks: int
    depth: int
    lag: int

    @classmethod
    def of(cls, requests: list[Request], depth: int, lag: int) -> Size:
        """One with room for these requests."""
        blocks = max(len(request.table.blocks) for request in requests) + 1
        return cls(next_size(len(requests)), max(FEWEST_BLOCKS, next_power_of_two(blocks)), depth, lag)


class InFlightRows:
    """
    The rows of a step. Behind those that somebody has are some that rest: theirs are no blocks, so that they write
    where nobody reads.

    Args:
        size (`Size`): how many there are, and what each has room for.
        device (`torch.device`): where the step runs.
    """

    def __init__(self, size: Size, device: torch.device):
        self.size, self.device = size, device
        rows, new = size.rows, size.depth + 1
        shapes = {
            "lengths": (rows,),
            "room": (rows,),
            "kinds": (rows,),
            "counts": (rows,),
            "places": (rows,),
            "slots": (rows,),
            "tail": (rows, size.lag),
            "temperature": (rows,),
            "top_k": (rows,),
            "top_p": (rows,),
            "sharpness": (rows,),
            "uniforms": (rows, new),
            "tables": (rows, size.blocks),
        }
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self._staged = torch.zeros(sum(sizes.values()), dtype=torch.long, pin_memory=device.type == "cuda")
        self._told = torch.zeros_like(self._staged, device=device)
        self._was_told = torch.cuda.Event() if device.type == "cuda" else None
        staged, told, start = {}, {}, 0
        for name, shape in shapes.items():
            part = slice(start, start + sizes[name])
            is_real = name in ("temperature", "top_p", "sharpness", "uniforms")
            values = self._told[part].view(torch.float64) if is_real else self._told[part]
            staged[name] = self._staged.numpy()[part].view(np.float64 if is_real else np.int64).reshape(shape)
            told[name] = values.view(shape)
            start = part.stop
        self._host = staged
        self._loaded: list[tuple[BlockTable, int]] = []
        """Whose rows they are at present, by their tables, and how often these had changed."""
        self.lengths: torch.Tensor = told["lengths"]
        """Tokens of every row, the root included, `[rows]` int64."""
        self.room: torch.Tensor = told["room"]
        """Levels of draft tokens that each can use, `[rows]` int64."""
        self.kinds: torch.Tensor = told["kinds"]
        """A `Kind` for each, `[rows]` int64."""
        self.counts: torch.Tensor = told["counts"]
        """How many tokens the draft has not seen, the root included, `[rows]` int64."""
        self.places: torch.Tensor = told["places"]
        """Where features of each wait, see `WaitingFeatures`, `[rows]` int64."""
        self.slots: torch.Tensor = told["slots"]
        """The first slot there, counted through all places, for new ones, `[rows]` int64."""
        self.tail: torch.Tensor = told["tail"]
        """These tokens, the last of the text again behind them, `[rows, lag]` int64."""
        self.temperature: torch.Tensor = told["temperature"]
        """`[rows]` float64, like `top_p`; 1 where there is none."""
        self.top_k: torch.Tensor = told["top_k"]
        """`[rows]` int64; 0 where there is none."""
        self.top_p: torch.Tensor = told["top_p"]
        self.sharpness: torch.Tensor = told["sharpness"]
        """See `Drawing`, `[rows]` float64."""
        self.uniforms: torch.Tensor = told["uniforms"]
        """What a row with a seed draws with, by depth, `[rows, depth + 1]` float64; negative without a seed."""
        self.tables: torch.Tensor = told["tables"]
        """Block numbers, `[rows, blocks]` int64."""
        self._clear(0)

    def _clear(self, first: int) -> None:
        """Lets the rows from `first` on rest."""
        host = self._host
        for name in ("room", "kinds", "top_k", "tail"):
            host[name][first:] = 0
        host["places"][first:] = WaitingFeatures.NOBODY
        host["slots"][first:] = WaitingFeatures.UNWANTED * WaitingFeatures.CAPACITY
        for name in ("counts", "temperature", "top_p", "sharpness"):
            host[name][first:] = 1
        host["lengths"][first:] = 2  # a head is a token behind
        host["uniforms"][first:] = -1.0
        host["tables"][first:] = ZERO_BLOCK

    def load(
        self,
        requests: list[Request],
        kinds: list[Kind],
        room: list[int],
        counts: list[int],
        places: list[int],
        slots: list[int],
        sharpness: list[float],
        starts: list[int] | None = None,
    ) -> None:
        """
        Takes the rows of a step; for the lists see the attributes. With `starts` a row's text ends so many tokens
        (`counts`) behind its start, for now; its tail begins there, and goes on as far as there is room.
        """
        if self._was_told is not None:
            self._was_told.synchronize()  # what the device has not been told yet is not written over
        host, number = self._host, len(requests)
        if starts is None:
            starts = [request.length - count for request, count in zip(requests, counts, strict=True)]
        host["lengths"][:number] = [start + count for start, count in zip(starts, counts, strict=True)]
        lists: dict[str, Any] = {"kinds": kinds, "room": room, "counts": counts, "sharpness": sharpness}
        lists |= {"places": places, "slots": slots}
        for name, values in lists.items():
            host[name][:number] = values
        if self.size.lag == 1:
            host["tail"][:number, 0] = [request.tokens[-1] for request in requests]
        host["uniforms"][:number] = -1.0
        for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
            if self.size.lag > 1:
                tail = request.tokens[start : start + self.size.lag]
                host["tail"][row] = request.tokens[-1]
                host["tail"][row, : len(tail)] = tail
            if request.options.seed is not None and request.options.do_sample:
                positions = range(request.length, request.length + self.size.depth + 1)
                host["uniforms"][row] = [uniform(request.options.seed, position) for position in positions]
        self._load_what_stays(requests)
        self._clear(number)
        self._told.copy_(self._staged, non_blocking=True)
        if self._was_told is not None:
            self._was_told.record()

    def _load_what_stays(self, requests: list[Request]) -> None:
        """What is the same from step to step: only of rows that were others', or have other blocks now."""
        host, before = self._host, self._loaded
        self._loaded = [(request.table, request.table.num_changes) for request in requests]
        for row, (request, now) in enumerate(zip(requests, self._loaded, strict=True)):
            if row < len(before) and before[row] == now:
                continue
            warpers = request.options.device_warpers
            values = {} if warpers is None else warpers.values
            for name, without in {"temperature": 1.0, "top_k": 0, "top_p": 1.0}.items():
                host[name][row] = values.get(name, without)
            host["tables"][row] = ZERO_BLOCK
            host["tables"][row, : len(request.table.blocks)] = request.table.blocks

    def keep_no_features(self) -> None:
        """Until rows are loaded again, their new features are lost."""
        self.slots.fill_(WaitingFeatures.UNWANTED * WaitingFeatures.CAPACITY)

    @property
    def roots(self) -> torch.Tensor:
        """The last token of every row, `[rows, 1]`: the last of its tail, too."""
        return self.tail[:, -1:]
