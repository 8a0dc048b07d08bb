"""p at the nodes of a step: the target's next-token distribution, after every processor of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from .choosing import NOTHING_TO_CHOOSE, choose, draw_with, uniform
from .position_noise import draw_by_position
from .walk import Walk


class TextRow(Protocol):
    """A row as p is computed for it: a row of a call (`CallRow`), or a request in flight (`Request`)."""

    options: Any
    """`RequestOptions`: processors, whether tokens are drawn, and a seed."""
    noise: Any
    """`PositionNoise` from which tokens are drawn; None if they are drawn otherwise."""

    @property
    def length(self) -> int:
        """Number of tokens when a step begins, root included."""

    @property
    def is_over(self) -> bool:
        """Whether the row has finished or failed."""

    def history(self, length: int, new: list[int]) -> torch.Tensor:
        """The first `length` tokens, `[1, length]` int64, the last of which are `new`, accepted in this step."""

    def append(self, token: int) -> bool:
        """Appends an accepted token, and returns whether the text ends with it."""

    def fail(self, error: str | Exception, by_its_options: bool = False) -> None:
        """Ends the row with an error, or raises it."""


class TargetDistribution:
    """
    p at the nodes where walks stand. Processors run only there, in order, with the row's own history. Rows with equal
    processors that read only the scores share a call; any other list of processors is called for its row alone. A row
    fails, without the others, if its processors raise, or if its scores have no softmax to draw from.

    Args:
        rows (`Sequence[TextRow]`): the rows.
        logits (`torch.Tensor` of shape `[batch, nodes + 1, vocab]`): logits of the step's forward.
        agree (`Callable`, *optional*): makes a tensor of drawn tokens equal on all ranks; see `Ranks.agree`.
        record (`Callable[[int, torch.Tensor, torch.Tensor], None]`, *optional*): gets row, logits and processed scores
            (`[1, vocab]` each) of every token chosen.
        is_call (`bool`): whether these are the rows of a `generate` call: all nodes may be read at once, and greedy
            tokens are the argmax of any scores, as in plain `generate`.
        device (`torch.device`, *optional*): where scores are processed; by default where the logits are.
    """

    def __init__(
        self,
        rows: Sequence[TextRow],
        logits: torch.Tensor,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
        record: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
        is_call: bool = False,
        device: torch.device | None = None,
    ):
        self._device = logits.device if device is None else device
        self._rows, self._logits, self.agree, self._record, self._is_call = rows, logits, agree, record, is_call
        self.batch_size = len(rows)
        self.lengths = [row.length for row in rows]
        """Length of every row, in tokens, when the step began."""

    @property
    def reads_ahead(self) -> bool:
        """Whether `all_scores` may be used, and is cheaper than `scores` at every node of a walk."""
        return self._logits.device.type != "cpu" and self.can_read_ahead

    @property
    def can_read_ahead(self) -> bool:
        """Whether the scores of all nodes can be had at once: they are read alone, and alike in all rows."""
        if not self._is_call or self._record is not None:
            return False
        return self._rows[0].options.reads_scores_only and self._rows[0].noise is None

    @property
    def is_bare(self) -> bool:
        """Whether the scores of greedy rows are the unprocessed logits, and are not recorded."""
        own = [row.options for row in self._rows]
        return self._record is None and not any(one.processors for one in own if not one.do_sample)

    def all_scores(self) -> torch.Tensor:
        """Scores of all nodes, `[batch, nodes + 1, vocab]`; only if `reads_ahead` or `is_bare`."""
        processors = self._rows[0].options.processors if self.can_read_ahead else ()
        if not processors:
            return self._logits
        return processors(None, self._logits.flatten(0, 1).float()).view(self._logits.shape)

    def scores(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Processed scores at the nodes where the walks of `rows` stand, `[rows, vocab]` float32."""
        scores, hopeless = self._drawable(rows, self._processed(rows, walk))
        if hopeless is not None:
            self._fail(rows, hopeless.tolist())
        return scores

    def _processed(self, rows: list[int], walk: Walk) -> torch.Tensor:
        logits = self._at_nodes(rows, walk)
        sharing: dict[Hashable, list[int]] = {}
        for place, row in enumerate(rows):
            if self._rows[row].options.processors:
                sharing.setdefault(self._rows[row].options.processors_key, []).append(place)
        done: list[tuple[list[int], torch.Tensor]] = []
        for places in sharing.values():
            options = self._rows[rows[places[0]]].options
            if options.reads_scores_only:
                try:
                    done.append((places, options.processors(None, _of(logits, places))))
                    continue
                except Exception:  # because of scores of one of them: each alone, so that the others do not fail
                    logits = self._at_nodes(rows, walk)  # processors may have begun in place
            done += [([place], self._process_alone(rows[place], walk, _of(logits, [place]))) for place in places]
        if [places for places, _ in done] == [list(range(len(rows)))]:
            scores = done[0][1]
        else:
            # Some processors compute in the model's own dtype: guidance by a second context is one.
            scores = logits.to(functools.reduce(torch.promote_types, [own.dtype for _, own in done], logits.dtype))
            if done:
                scores = scores.clone()
            for places, processed in done:
                scores[places] = processed.to(scores.dtype)
        if self._record is not None:
            for place, row in enumerate(rows):
                self._record(row, logits[place : place + 1], scores[place : place + 1])
        return scores

    def _at_nodes(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Logits where the walks of `rows` stand, `[rows, vocab]` float32: a copy, as processors may write into it."""
        if len(rows) == 1:
            return self._logits[rows[0], walk.node(rows[0])][None].to(self._device, torch.float32, copy=True)
        index = torch.tensor([rows, [walk.node(row) for row in rows]], device=self._logits.device)
        return self._logits[index[0], index[1]].to(self._device, torch.float32)

    def _process_alone(self, row: int, walk: Walk, logits: torch.Tensor) -> torch.Tensor:
        """Processes the logits (`[1, vocab]`) of a row whose processors look at its history."""
        own = self._rows[row]
        if own.is_over:
            return logits
        try:
            new = walk.tokens[row]
            return own.options.processors(own.history(self.lengths[row] + len(new), new), logits)
        except Exception as error:  # an error of a user's processor fails only its row
            own.fail(error, by_its_options=True)
            return logits

    def _drawable(self, rows: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Replaces scores without a softmax by zeros in rows that draw, because a draw from them would fail for all rows;
        and processed scores that are NaN or all -inf in greedy requests. Returns the scores `[rows, vocab]` and which
        rows were replaced, `[rows]` bool, or None if none can be.
        """
        own = [self._rows[row].options for row in rows]
        draws = [options.do_sample for options in own]
        if self._is_call and self._rows[0].noise is None:
            return scores, None  # `torch.multinomial` raises, as in plain `generate`
        if not any(draws) and not any(options.processors for options in own):
            return scores, None
        highest = scores.amax(dim=-1)
        hopeless = ~highest.isfinite()
        if not all(draws):
            hopeless &= torch.tensor(draws, device=scores.device) | ~(highest > -torch.inf)
        return scores.masked_fill(hopeless[:, None], 0.0), hopeless

    def _fail(self, rows: list[int], hopeless: list[bool]) -> None:
        for row, is_hopeless in zip(rows, hopeless, strict=True):
            if is_hopeless and not self._rows[row].is_over:
                self._rows[row].fail(NOTHING_TO_CHOOSE)

    def choose(self, rows: list[int], walk: Walk, do_sample: bool) -> list[int]:
        """
        The next token of every row where its walk stands: the argmax, or drawn from p (by `uniform` for a row with a
        seed, by its noise for one that has noise).
        """
        scores, hopeless = self._drawable(rows, self._processed(rows, walk))
        seeded, noises = {}, {}
        for place, row in enumerate(rows if do_sample else ()):
            own, position = self._rows[row], self.lengths[row] + len(walk.tokens[row])
            if own.options.seed is not None:
                seeded[place] = uniform(own.options.seed, position)
            if own.noise is not None:
                noises[place] = own.noise.take(position, scores.shape[-1])
        others = [place for place in range(len(rows)) if place not in seeded and place not in noises]
        if len(others) == len(rows):
            tokens = choose(scores, do_sample)
        else:
            tokens = torch.empty(len(rows), dtype=torch.long, device=scores.device)
            if others:
                tokens[others] = choose(scores[others], do_sample)
        if seeded:
            numbers = torch.tensor(list(seeded.values()), dtype=torch.float64, device=scores.device)
            tokens[list(seeded)] = draw_with(scores[list(seeded)], numbers)
        if noises:
            tokens[list(noises)] = draw_by_position(scores[list(noises)], list(noises.values()))
        if hopeless is None:
            return self.agree(tokens).tolist()
        tokens, hopeless = self.agree(torch.stack([tokens, hopeless.long()])).tolist()  # one wait for the device
        self._fail(rows, hopeless)
        return tokens

    def ends(self, row: int, token: int) -> bool:
        """Appends an accepted token to a row, and returns whether its text ends with it."""
        own = self._rows[row]
        if own.is_over:
            return True
        try:
            return own.append(token)
        except Exception as error:  # an error of a user's criterion fails only its row
            own.fail(error, by_its_options=True)
            return True


def _of(scores: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The scores of some rows, `[places, vocab]`: a view of all of them, or of one."""
    if len(places) == len(scores):
        return scores
    return scores[places[0] : places[0] + 1] if len(places) == 1 else scores[places]
