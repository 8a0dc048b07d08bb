"""What a captured step knows of the rows of a call, at fixed places on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, eq=False)
class Rows:
    """
    Args:
        text (`torch.Tensor` of shape `[batch, capacity]`, int64): prompts and what was generated.
        lengths (`torch.Tensor` of shape `[batch]`, int64): tokens of every row, the root included.
        limits (`torch.Tensor` of shape `[batch]`, int64): tokens that a row may have.
        active (`torch.Tensor` of shape `[batch]`, bool): rows that have not ended.
        end_tokens (`torch.Tensor` of shape `[ends]`, int64): what ends a row.
        report (`torch.Tensor` of shape `[batch, 2 + depth + 1 + …]`, int64): what the last step did: accepted nodes
            (-1 for a row that rested, or `NOTHING_TO_DRAW`), draft tokens that counted, and the new tokens, with -1
            behind them; where children were drawn, also `Drawing.reported_overlaps`.
    """

    text: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    active: torch.Tensor
    end_tokens: torch.Tensor
    report: torch.Tensor

    def load(self, ids: torch.Tensor, lengths: torch.Tensor, max_length: int, active: torch.Tensor) -> None:
        """
        Takes the rows of a call.

        Args:
            ids (`torch.Tensor` of shape `[batch, tokens]`, int64): their tokens so far.
        """
        self.text[:, : ids.shape[1]] = ids
        self.lengths.copy_(lengths)
        self.limits.fill_(max_length)
        self.active.copy_(active)

    def roots(self) -> torch.Tensor:
        """The last token of every row, `[batch, 1]`."""
        return self.text.gather(1, self.lengths[:, None] - 1)

    def room(self) -> torch.Tensor:
        """How many draft tokens each row can use, `[batch]`: the step's own token takes the last place."""
        return self.limits - self.lengths - 1

    def behind(self, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """
        The `count` tokens behind the first `lengths` (`[batch]`) of every row; where there are fewer, the last one
        again.
        """
        places = lengths[:, None] + torch.arange(count, device=lengths.device)
        return self.text.gather(1, torch.minimum(places, self.lengths[:, None] - 1))

    def commit(self, path_tokens: torch.Tensor, accepted: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """
        Appends what a walk came to, and ends rows.

        Args:
            path_tokens (`torch.Tensor` of shape `[batch, depth + 1]`, int64): the tokens at the nodes of the path, the
                root's first.
            accepted (`torch.Tensor` of shape `[batch]`, int64): accepted nodes; -1 for rows that rest.
            next_tokens (`torch.Tensor` of shape `[batch]`, int64): the token behind them; -1 if there is none.

        Returns:
            `torch.Tensor`: the new tokens, `[batch, depth + 1]` int64, with -1 behind them.
        """
        places = torch.arange(path_tokens.shape[1], device=path_tokens.device)
        new = torch.nn.functional.pad(path_tokens[:, 1:], (0, 1), value=-1)
        new = torch.where(places < accepted[:, None], new, -1)
        new = torch.where(places == accepted[:, None], next_tokens[:, None], new)
        slots = (self.lengths[:, None] + places).clamp(max=self.text.shape[1] - 1)
        self.text.scatter_(1, slots, torch.where(new >= 0, new, self.text.gather(1, slots)))
        self.lengths.add_((new >= 0).sum(dim=1))
        ended = (new[:, :, None] == self.end_tokens).flatten(1).any(dim=1)
        self.active.logical_and_(~ended & (self.lengths < self.limits))
        return new

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [getattr(self, one.name) for one in fields(self)]

    @classmethod
    def of(cls, batch_size: int, capacity: int, end_tokens: list[int], width: int, device: torch.device) -> Rows:
        """Room for the rows of any call of this size, with `width` columns in the report."""

        def empty(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            text=empty(batch_size, capacity),
            lengths=empty(batch_size),
            limits=empty(batch_size),
            active=empty(batch_size, dtype=torch.bool),
            # A negative one, of which transformers only warns, is no token: here it would be the filling of reports.
            end_tokens=torch.tensor([one for one in end_tokens if one >= 0], dtype=torch.long, device=device),
            report=empty(batch_size, width),
        )
