"""Inputs of a captured step per row, as the host stages and loads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...adapters import Choice
from ...cache.blocks import ZERO_BLOCK, BlockTable
from ...cache.pending_features import PendingFeatures
from ...verification import Verifier
from ...verification.choosing import uniform
from ...verification.device_warpers import INTEGERS, NONE, Warpers
from ..request import Request
from .biases import RowBiases
from .keys import StepSize
from .row_buffer import RowBuffer


DTYPES = dict.fromkeys(({*NONE} - {*INTEGERS}) | {"draft_temperature"}, torch.float32) | {"numbers": torch.float64}
"""Dtypes of a row's values that are not int64."""


@dataclass
class RowValues:
    """
    What the host loads for the rows of a captured step, in lists with one entry per request; see the attributes of
    `InFlightRows`.
    """

    kinds: list[Verifier]
    room: list[int]
    counts: list[int]
    draft_slots: list[int]
    places: list[int]
    slots: list[int]
    slot_steps: list[int]
    draft_temperature: list[float]

    @classmethod
    def empty(cls) -> RowValues:
        """The values of no request: all rows of the step rest."""
        return cls([], [], [], [], [], [], [], [])


class StagedRows:
    """
    The rows of a captured step on the host. Rows after those of requests are padding rows: they rest and have no
    blocks, so that they write to `WASTE_BLOCK`.

    Args:
        size (`StepSize`), device (`torch.device`), trash_slot (`int`), adapter_index (`dict`),
            processing (`Collection[str]`), text_length (`int`): see `InFlightRows`.
    """

    def __init__(
        self,
        size: StepSize,
        device: torch.device,
        trash_slot: int,
        adapter_index: Mapping[Choice, int],
        processing: Collection[str],
        text_length: int,
    ):
        self.size, self.device, self._trash_slot = size, device, trash_slot
        self._adapter_index = adapter_index
        rows, new = size.rows, size.depth + 1
        moving = {
            "lengths": (rows,),
            "room": (rows,),
            "counts": (rows,),
            "slots": (rows,),
            "state_slots": (rows,),
            "draft_slots": (rows,),
            "tail": (rows, size.lag),
            "texts": (rows, text_length),
        }
        fixed = {
            "kinds": (rows,),
            "places": (rows,),
            "slot_steps": (rows,),
            **dict.fromkeys(NONE, (rows,)),
            "draft_temperature": (rows,),
            "adapters": (rows,),
            "noise_keys": (rows,),
            "numbers_from": (rows,),
            "numbers": (rows, 2 * new),
            "position_shifts": (rows, size.axes),
            "forced": (rows, new),
            "tables": (rows, size.blocks),
        }
        self._buffer = RowBuffer(moving, fixed, DTYPES, device)
        self._host = self._buffer.host
        self.biases = RowBiases.for_kinds(rows, processing, device)
        """The biases of each row."""
        self.has_grammars = False
        """Whether rows may have a grammar."""
        self._loaded: list[tuple[BlockTable, int]] = []
        """Block table of each row as last loaded, with its `num_changes` at that time."""
        self._resting: set[int] = set()
        """Rows whose requests have ended since they were loaded."""
        self._texts: list[tuple[BlockTable, int]] = []
        """Block table of each row, and how much of its text has been staged."""
        self._clear(0)

    def _clear(self, first: int) -> None:
        """Makes the rows from `first` on padding rows."""
        host = self._host
        for name in ("room", "kinds", "slot_steps", "adapters", "noise_keys", "tail", "position_shifts"):
            host[name][first:] = 0
        for name, without in NONE.items():
            host[name][first:] = without
        host["places"][first:] = PendingFeatures.DUMMY
        for name in ("state_slots", "draft_slots", "forced"):
            host[name][first:] = -1
        host["slots"][first:] = self._trash_slot
        for name in ("counts", "draft_temperature"):
            host[name][first:] = 1
        host["lengths"][first:] = 2  # a head's cache is one token behind
        host["numbers_from"][first:] = host["lengths"][first:]
        host["numbers"][first:] = -1.0
        host["tables"][first:] = ZERO_BLOCK

    def load(
        self,
        requests: list[Request],
        values: RowValues,
        starts: list[int] | None = None,
        state_slots: Sequence[int] = (),
    ) -> None:
        """
        Copies the rows of a step to the device. With `starts`, as in prefill, a row's text counts only up to `starts +
        counts`, and its tail begins at its start and is filled with as many tokens as it has room for. `state_slots`
        are the slots of the rows' states, if the target has any.
        """
        self._buffer.wait()
        host, number, counts = self._host, len(requests), values.counts
        if starts is None:
            starts = [request.length - count for request, count in zip(requests, counts, strict=True)]
        host["lengths"][:number] = [start + count for start, count in zip(starts, counts, strict=True)]
        for name, of_rows in vars(values).items():
            host[name][:number] = of_rows
        host["state_slots"][:number] = state_slots or -1
        if self.size.lag == 1:
            host["tail"][:number, 0] = [request.tokens[-1] for request in requests]
        for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
            if self.size.lag > 1:
                tail = request.tokens[start : start + self.size.lag]
                host["tail"][row] = request.tokens[-1]
                host["tail"][row, : len(tail)] = tail
        if self._host["texts"].shape[1] > 0:
            self._load_texts(requests)
        if self.has_grammars:
            self._load_forced(requests)
        host["numbers"][:number] = -1.0
        self._load_numbers(requests)
        host["numbers_from"][:number] = host["lengths"][:number]
        self._load_tables(requests)
        self._resting.clear()
        self._clear(number)
        self._buffer.copy()
        self.biases.load([warpers_of(request).biases for request in requests])

    def _load_forced(self, requests: list[Request]) -> None:
        """Stages what grammars ask for; the tokens that runs on their way may add are not known."""
        forced = self._host["forced"]
        forced[: len(requests)] = -1
        for row, request in enumerate(requests):
            mask = request.options.grammar
            chain = [] if mask is None else mask.forced(request.new_tokens, [], forced.shape[1])
            forced[row, : len(chain)] = chain

    def load_changes(self, requests: list[Request], draft_temperature: list[float]) -> None:
        """
        Copies what has changed in the loaded rows, besides the values that `advance` moves on, to the device, for
        another run of the step: block tables, draft temperatures, and the random numbers of seeds. Rows of requests
        that have ended rest from then on.
        """
        self._buffer.wait()
        before = self._host["draft_temperature"][: len(requests)]
        have_changed = [not np.array_equal(before, np.asarray(draft_temperature, dtype=before.dtype))]
        have_changed += [self._load_tables(requests), self._load_numbers(requests), self._rest(requests)]
        if any(have_changed):
            before[:] = draft_temperature
            self._buffer.copy(moving=False)

    def _rest(self, requests: list[Request]) -> bool:
        """
        Lets the rows of requests that have ended rest: they stay where they are, and have no blocks. Returns whether
        any did not rest yet.
        """
        ended = {row for row, request in enumerate(requests) if request.is_over}
        new = sorted(ended - self._resting)
        self._resting = ended
        self._host["kinds"][new], self._host["tables"][new] = Verifier.RESTS, ZERO_BLOCK
        return bool(new)

    def _load_numbers(self, requests: list[Request]) -> bool:
        """
        Stages the random numbers of requests with a seed for the positions from the end of their texts on: as many as
        two runs can use, since one may be on its way. Returns whether there are any.
        """
        has_any, host = False, self._host
        for row, request in enumerate(requests):
            seed, length = request.options.seed, request.length
            if seed is not None and request.options.do_sample:
                positions = range(length, length + host["numbers"].shape[1])
                host["numbers"][row] = [uniform(seed, position) for position in positions]
                host["numbers_from"][row], has_any = length, True
        return has_any

    def _load_texts(self, requests: list[Request]) -> None:
        """Stages the tokens of texts up to their lengths, of those that have been in the same row the new ones."""
        before, ends = self._texts, self._host["lengths"][: len(requests)].tolist()
        self._texts = [(request.table, end) for request, end in zip(requests, ends, strict=True)]
        for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
            is_known = row < len(before) and before[row][0] is request.table
            first = before[row][1] - 1 if is_known else 0
            self._host["texts"][row, first:end] = request.tokens[first:end]

    def _load_tables(self, requests: list[Request]) -> bool:
        """
        Stages warpers, keys of noise, adapters, position shifts and block tables of rows whose request or blocks have
        changed since the last step. Returns whether there were any.
        """
        host, before = self._host, self._loaded
        self._loaded = [(request.table, request.table.num_changes) for request in requests]
        for row, (request, now) in enumerate(zip(requests, self._loaded, strict=True)):
            if row < len(before) and before[row] == now:
                continue
            warpers = warpers_of(request)
            for name, without in NONE.items():
                host[name][row] = warpers.values.get(name, without)
            host["noise_keys"][row] = 0 if request.noise is None else request.noise.key
            host["adapters"][row] = self._adapter_index.get(request.adapter, 0)
            shift = request.position_shift
            host["position_shifts"][row] = 0 if shift is None else shift[:, 0].numpy()
            host["tables"][row] = ZERO_BLOCK
            host["tables"][row, : len(request.table.blocks)] = request.table.blocks
        return before != self._loaded


def warpers_of(request: Request) -> Warpers:
    """What steps do for a request."""
    return request.options.device_warpers or Warpers({})
