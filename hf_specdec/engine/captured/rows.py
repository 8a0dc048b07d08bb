"""Inputs of a captured step per row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...adapters import Choice
from ...cache.blocks import ZERO_BLOCK, BlockTable
from ...cache.pending_features import PendingFeatures
from ...graphs.paged import FEWEST_BLOCKS, next_power_of_two, next_size
from ...verification import Verifier
from ...verification.choosing import uniform
from ...verification.device_warpers import INTEGERS, NONE, Warpers
from ..request import Request
from .forcing import ForcedLimits
from .row_biases import RowBiases
from .row_buffer import RowBuffer


DTYPES = dict.fromkeys(({*NONE} - {*INTEGERS}) | {"draft_temperature"}, torch.float32) | {"numbers": torch.float64}
"""Dtypes of a row's values that are not int64."""


@dataclass(frozen=True)
class StepSize:
    """
    Size of a captured step.

    Args:
        rows (`int`): number of rows.
        blocks (`int`): blocks per block table; the last is `ZERO_BLOCK` in every row.
        depth (`int`): levels of the tree.
        lag (`int`): most unread tokens per row, root included, that the draft reads in the step.
        axes (`int`, *optional*, defaults to 0): axes of positions, where some rows have a shift of their own on each;
            0: all rows have the positions of texts.
    """

    rows: int
    blocks: int
    depth: int
    lag: int
    axes: int = 0

    @classmethod
    def of(
        cls, requests: list[Request], depth: int, lag: int, fewest_blocks: int = FEWEST_BLOCKS, fewest_rows: int = 1
    ) -> StepSize:
        """The smallest size with room for these requests, and for so many blocks and rows at least."""
        blocks = max(len(request.table.blocks) for request in requests) + 1
        rows = next_size(max(fewest_rows, len(requests)))
        axes = max(0 if request.position_shift is None else len(request.position_shift) for request in requests)
        return cls(rows, max(fewest_blocks, next_power_of_two(blocks)), depth, lag, axes)


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
    def of_nobody(cls) -> RowValues:
        """The values of no request: all rows of the step rest."""
        return cls([], [], [], [], [], [], [], [])


class InFlightRows:
    """
    The rows of a captured step. Rows after those of requests are padding rows: they rest and have no blocks, so that
    they write to `WASTE_BLOCK`.

    The host loads all rows before a step (`load`). At its end the step moves its rows on (`advance`), so that it can
    run again for the same requests before the host knows their new tokens.

    Args:
        size (`StepSize`): the step's size.
        device (`torch.device`): device of the step.
        trash_slot (`int`): the slot in `PendingFeatures` to which rows without a place write.
        adapters (`dict`): the number of each adapter; see `RequestAdapters.index`.
        processing (`Collection[str]`): what steps do for rows; see `Warpers.kinds`.
        text_length (`int`): tokens of a row's text for which there is room, if the step looks at them; else 0.
    """

    def __init__(
        self,
        size: StepSize,
        device: torch.device,
        trash_slot: int,
        adapters: Mapping[Choice, int] | None = None,
        processing: Collection[str] = (),
        text_length: int = 0,
    ):
        self.size, self.device, self._trash_slot = size, device, trash_slot
        self._adapter_index = {} if adapters is None else adapters
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
        self._host, on_device = self._buffer.host, self._buffer.device
        self._loaded: list[tuple[BlockTable, int]] = []
        """Block table of each row as last loaded, with its `num_changes` at that time."""
        self.lengths: torch.Tensor = on_device["lengths"]
        """Tokens of every row, root included, `[rows]` int64."""
        self.room: torch.Tensor = on_device["room"]
        """Levels of draft tokens that each row can use, `[rows]` int64."""
        self.kinds: torch.Tensor = on_device["kinds"]
        """The `Verifier` of each row, `[rows]` int64."""
        self.counts: torch.Tensor = on_device["counts"]
        """Tokens of each row that the draft has not read, root included, or in a prefill chunk; `[rows]` int64."""
        self.places: torch.Tensor = on_device["places"]
        """Place of each row's features in `PendingFeatures`, `[rows]` int64."""
        self.slots: torch.Tensor = on_device["slots"]
        """First slot for new features of each row in `PendingFeatures`, counted through all places, `[rows]` int64."""
        self.state_slots: torch.Tensor = on_device["state_slots"]
        """Slot of each row's states in the target's cache, `[rows]` int64; -1 for none."""
        self.draft_slots: torch.Tensor = on_device["draft_slots"]
        """Slot of each row's states in the draft's cache, `[rows]` int64; -1 for none, and in rows not drafted for."""
        self.slot_steps: torch.Tensor = on_device["slot_steps"]
        """
        Slots by which a new token moves `slots` on, `[rows]` int64: 1 in rows whose features wait, 0 in rows whose
        features an EAGLE head reads in every step, and in rows without a place.
        """
        self.tail: torch.Tensor = on_device["tail"]
        """The unread tokens of each row, padded with the last token of its text, `[rows, lag]` int64."""
        self.texts: torch.Tensor = on_device["texts"]
        """The tokens of each row, `[rows, text_length]` int64; any from `lengths` on."""
        self._texts: list[tuple[BlockTable, int]] = []
        """Block table of each row, and how much of its text has been staged."""
        self.temperature: torch.Tensor = on_device["temperature"]
        """Sampling temperature of each row, `[rows]` float32; 1 for none."""
        self.warpers: dict[str, torch.Tensor] = {name: on_device[name] for name in NONE}
        """Values of each row's warpers by name, `[rows]` float32 (`top_k`: int64); those of `NONE` for none."""
        self.biases = RowBiases.for_kinds(rows, processing, device)
        """The biases of each row."""
        self.draft_temperature: torch.Tensor = on_device["draft_temperature"]
        """Draft temperature of each row, `[rows]` float32; see `Drawing`."""
        self.noise_keys: torch.Tensor = on_device["noise_keys"]
        """`PositionNoise.key` of each row, `[rows]` int64; 0 in rows that do not draw by position."""
        self.adapters: torch.Tensor = on_device["adapters"]
        """Number of each row's adapter, `[rows]` int64; see `RequestAdapters.index`."""
        self.forced: torch.Tensor = on_device["forced"]
        """Tokens that the grammar of each row asks for after its root, padded with -1, `[rows, depth + 1]` int64."""
        self.has_grammars = False
        """Whether rows may have a grammar."""
        self._position_shifts: torch.Tensor = on_device["position_shifts"]
        self._numbers, self._numbers_from = on_device["numbers"], on_device["numbers_from"]
        self._depths = torch.arange(new, device=device)
        self.tables: torch.Tensor = on_device["tables"]
        """Block table of each row, `[rows, blocks]` int64."""
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
        if self.texts.shape[1] > 0:
            self._load_texts(requests)
        if self.has_grammars:
            self._load_forced(requests)
        host["numbers"][:number] = -1.0
        self._load_numbers(requests)
        host["numbers_from"][:number] = host["lengths"][:number]
        self._load_tables(requests)
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
        another run of the step: block tables, draft temperatures, and the random numbers of seeds.
        """
        self._buffer.wait()
        before = self._host["draft_temperature"][: len(requests)]
        have_changed = [not np.array_equal(before, np.asarray(draft_temperature, dtype=before.dtype))]
        have_changed += [self._load_tables(requests), self._load_numbers(requests)]
        if any(have_changed):
            before[:] = draft_temperature
            self._buffer.copy(moving=False)

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

    def advance(
        self,
        accepted: torch.Tensor,
        new: torch.Tensor,
        compiled: Callable[[Callable], Callable] = lambda function: function,
    ) -> None:
        """
        Moves the rows on by the tokens of a step, so that it can run again: all values but those that the host alone
        knows (block tables, draft temperatures, random numbers of seeds). Rows that rest or could not be drawn stay
        where they are.

        Args:
            accepted (`torch.Tensor` of shape `[rows]`, int64): number of accepted nodes; negative for rows without a
                result.
            new (`torch.Tensor` of shape `[rows, depth + 1]`, int64): the new tokens of every row, as many as accepted
                and one, padded with -1.
            compiled (`Callable`): compiles the function of tensors that computes the new values, or leaves it.
        """
        if self.texts.shape[1] > 0:  # behind a text that does not grow, too
            self.texts.scatter_(1, self.lengths[:, None] + self._depths, new)
        moving = self.lengths, self.slots, self.room, self.counts, self.tail
        for value, moved in zip(moving, compiled(_moved)(*moving, self.slot_steps, accepted, new), strict=True):
            value.copy_(moved)

    def keep_nothing(self) -> None:
        """Lets no row have a slot for states, or a place or slot for features, until rows are loaded again."""
        self.places.fill_(PendingFeatures.DUMMY)
        self.slots.fill_(self._trash_slot)
        self.state_slots.fill_(-1)
        self.draft_slots.fill_(-1)

    @property
    def position_shift(self) -> torch.Tensor | None:
        """Position of a token minus its slot, `[axes, rows]` int64; None if all rows have the positions of texts."""
        return self._position_shifts.T if self.size.axes else None

    @property
    def uniforms(self) -> torch.Tensor:
        """Random numbers of a row with a seed, by depth, `[rows, depth + 1]` float64; negative without a seed."""
        # Rows without a seed may be anywhere.
        offsets = (self.lengths - self._numbers_from).clamp(max=self.size.depth + 1)
        return self._numbers.gather(1, offsets[:, None] + self._depths)

    def limits(self, token_ids: torch.Tensor | None = None, vocab_size: int = 0) -> ForcedLimits | None:
        """
        What hides other tokens from a draft's logits where one is asked for; None where no row has a grammar.

        Args:
            token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token of each of the
                draft's, of a vocabulary of `vocab_size`.
        """
        if not self.has_grammars:
            return None
        from hf_specdec_kernels import draft_columns

        return ForcedLimits(self.forced, None if token_ids is None else draft_columns(token_ids, vocab_size))

    @property
    def roots(self) -> torch.Tensor:
        """The root of every row, `[rows, 1]` int64: the last token of its tail."""
        return self.tail[:, -1:]


def warpers_of(request: Request) -> Warpers:
    """What steps do for a request."""
    return request.options.device_warpers or Warpers({})


def _moved(
    lengths: torch.Tensor,
    slots: torch.Tensor,
    room: torch.Tensor,
    counts: torch.Tensor,
    tail: torch.Tensor,
    slot_steps: torch.Tensor,
    accepted: torch.Tensor,
    new: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The first five after a step; see `InFlightRows.advance`."""
    moves, lag = accepted >= 0, tail.shape[1]
    steps = torch.where(moves, accepted + 1, 0)
    tokens = new.clamp(min=0)  # a row with NaN may have no token
    last = tokens.gather(1, accepted.clamp(min=0)[:, None])
    if lag > new.shape[1]:
        tokens = torch.nn.functional.pad(tokens, (0, lag - new.shape[1]))
    tokens = torch.where(torch.arange(lag, device=tail.device) < steps[:, None], tokens, last)
    return (
        lengths + steps,
        slots + steps * slot_steps,
        (room - steps).clamp(min=0),
        torch.where(moves, steps, counts),
        torch.where(moves[:, None], tokens, tail),
    )
