"""State of the rows of a call, at fixed addresses on the device, which captured steps read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..verification import new_tokens


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """
    State of the rows of a call, on the device.

    Args:
        text (`torch.Tensor` of shape `[batch, capacity]`, int64): prompt and generated tokens.
        lengths (`torch.Tensor` of shape `[batch]`, int64): tokens of every row, the root included.
        limits (`torch.Tensor` of shape `[batch]`, int64): most tokens of every row, the prompt included.
        active (`torch.Tensor` of shape `[batch]`, bool): rows that have not ended.
        end_tokens (`torch.Tensor` of shape `[ends]`, int64): tokens that end a row.
        report (`torch.Tensor` of shape `[batch, 2 + depth + 1 + …]`, int64): result of the last step: number of
            accepted nodes (-1 for a row that rested, `NOTHING_TO_DRAW`, or `SPOILED`), number of valid draft tokens,
            and the new tokens, followed by -1; where children were drawn, also `Drawing.reported_overlaps`.
    """

    text: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    active: torch.Tensor
    end_tokens: torch.Tensor
    report: torch.Tensor

    def load(self, ids: torch.Tensor, lengths: torch.Tensor, max_length: int, active: torch.Tensor) -> None:
        """
        Copies the rows of a call.

        Args:
            ids (`torch.Tensor` of shape `[batch, tokens]`, int64): tokens of the rows so far.
        """
        self.text[:, : ids.shape[1]] = ids
        self.lengths.copy_(lengths)
        self.limits.fill_(max_length)
        self.active.copy_(active)

    def roots(self) -> torch.Tensor:
        """The last token of every row, `[batch, 1]`."""
        return self.text.gather(1, self.lengths[:, None] - 1)

    def room(self) -> torch.Tensor:
        """Levels of draft tokens that each row can use, `[batch]`: the bonus or recovered token takes one place."""
        return self.limits - self.lengths - 1

    def tokens_after(self, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """
        The `count` tokens after the first `lengths` (`[batch]`) of every row, `[batch, count]`; rows with fewer repeat
        their last token.
        """
        places = lengths[:, None] + torch.arange(count, device=lengths.device)
        return self.text.gather(1, torch.minimum(places, self.lengths[:, None] - 1))

    def commit(self, path_tokens: torch.Tensor, accepted: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """
        Appends the tokens of a walk to the rows, and marks rows that end.

        Args:
            path_tokens, accepted, next_tokens: see `new_tokens`, whose result is returned.
        """
        new = new_tokens(path_tokens, accepted, next_tokens)
        places = torch.arange(new.shape[1], device=new.device)
        slots = (self.lengths[:, None] + places).clamp(max=self.text.shape[1] - 1)
        self.text.scatter_(1, slots, torch.where(new >= 0, new, self.text.gather(1, slots)))
        self.lengths.add_((new >= 0).sum(dim=1))
        ended = (new[:, :, None] == self.end_tokens).flatten(1).any(dim=1)
        self.active.logical_and_(~ended & (self.lengths < self.limits))
        return new

    @classmethod
    def of(cls, batch_size: int, capacity: int, end_tokens: list[int], width: int, device: torch.device) -> DeviceRows:
        """Zeroed state for the rows of any call of this size, with `width` columns in the report."""

        def empty(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            text=empty(batch_size, capacity),
            lengths=empty(batch_size),
            limits=empty(batch_size),
            active=empty(batch_size, dtype=torch.bool),
            # Negative end tokens, of which transformers only warns, would match the -1 that fills reports.
            end_tokens=torch.tensor([one for one in end_tokens if one >= 0], dtype=torch.long, device=device),
            report=empty(batch_size, width),
        )
