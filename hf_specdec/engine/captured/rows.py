"""Inputs of a captured step per row, on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from ...adapters import Choice
from ...cache.pending_features import PendingFeatures
from ...verification.device_warpers import NONE
from .grammars import ForcedLimits
from .keys import StepSize
from .staged_rows import StagedRows


class InFlightRows(StagedRows):
    """
    The rows of a captured step, at fixed addresses on the device. The host loads all of them before a step (`load`).
    At its end the step moves its rows on (`advance`), so that it can run again for the same requests before the host
    knows their new tokens.

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
        super().__init__(size, device, trash_slot, {} if adapters is None else adapters, processing, text_length)
        on_device = self._buffer.device
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
        self.temperature: torch.Tensor = on_device["temperature"]
        """Sampling temperature of each row, `[rows]` float32; 1 for none."""
        self.warpers: dict[str, torch.Tensor] = {name: on_device[name] for name in NONE}
        """Values of each row's warpers by name, `[rows]` float32 (`top_k`: int64); those of `NONE` for none."""
        self.draft_temperature: torch.Tensor = on_device["draft_temperature"]
        """Draft temperature of each row, `[rows]` float32; see `Drawing`."""
        self.noise_keys: torch.Tensor = on_device["noise_keys"]
        """`PositionNoise.key` of each row, `[rows]` int64; 0 in rows that do not draw by position."""
        self.adapters: torch.Tensor = on_device["adapters"]
        """Number of each row's adapter, `[rows]` int64; see `RequestAdapters.index`."""
        self.forced: torch.Tensor = on_device["forced"]
        """Tokens that the grammar of each row asks for after its root, padded with -1, `[rows, depth + 1]` int64."""
        self._position_shifts: torch.Tensor = on_device["position_shifts"]
        self._numbers, self._numbers_from = on_device["numbers"], on_device["numbers_from"]
        self._depths = torch.arange(size.depth + 1, device=device)
        self.tables: torch.Tensor = on_device["tables"]
        """Block table of each row, `[rows, blocks]` int64."""

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
