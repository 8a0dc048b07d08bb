"""The target's distributions in a step: each request has its own processors, criteria and random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable

import torch
from transformers import LogitsProcessorList

from ..verification import Walk, choose, draw_by_position
from .request import Request


NAN_LOGITS = "The model's logits are not numbers (NaN)."
NOTHING_TO_CHOOSE = (
    "There is nothing to choose from: the processed scores are NaN, infinite or all -inf. The logits, a logits "
    "processor or too small a `temperature` makes them so."
)


class RowDistributions:
    """
    The target's distribution p at the nodes of a step, as verifiers read it (see `Distribution`). Processors run
    only at the nodes where walks stand, with each request's own history; requests with equal processors that read only
    the scores share a call. An accepted token is appended to its request at once, so that criteria and processors are
    called in turn, as in plain `generate`. A request fails, without the others, if its processors or criteria raise,
    or if its scores have no softmax to draw from.

    Args:
        requests (`list[Request]`): the rows.
        logits (`torch.Tensor` of shape `[batch, nodes + 1, vocab]`): logits of the step's forward.
        agree (`Callable`, *optional*): returns rank 0's tensor on all ranks, for drawn tokens; see `Ranks.agree`.
    """

    reads_ahead = False

    def __init__(
        self,
        requests: list[Request],
        logits: torch.Tensor,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
    ):
        self.requests, self._logits, self.agree = requests, logits, agree
        self.batch_size = len(requests)
        self._groups = [request.options.processors_key for request in requests]
        self._seeded = [request.options.seed is not None and request.options.do_sample for request in requests]

    # --------------------------------------------------------------------------------------- what the verifiers ask

    @property
    def is_bare(self) -> bool:
        """Whether no greedy request has a processor, so that the scores of greedy requests are the logits."""
        return not any(r.options.processors for r in self.requests if not r.options.do_sample)

    def all_scores(self) -> torch.Tensor:
        """The logits of all nodes, `[batch, nodes + 1, vocab]`; only if `is_bare`."""
        return self._logits

    def scores(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Processed scores at the nodes where the walks of `rows` stand, `[rows, vocab]` float32."""
        scores, hopeless = self._drawable(rows, self._processed(rows, walk))
        if hopeless is not None:
            self._fail(rows, hopeless.tolist())
        return scores

    def _processed(self, rows: list[int], walk: Walk) -> torch.Tensor:
        index = torch.tensor([rows, [walk.node(row) for row in rows]], device=self._logits.device)
        scores = self._raw(index)
        places: dict[Hashable, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(self._groups[row], []).append(place)
        for group, members in places.items():
            processors = self.requests[rows[members[0]]].options.processors
            if not processors:
                continue
            if isinstance(group, tuple):
                try:
                    if len(members) == len(rows):
                        return processors(None, scores)
                    scores[members] = processors(None, scores[members])
                    continue
                except Exception:  # because of scores of one of them: each alone, so that the others do not fail
                    if len(members) == len(rows):
                        scores = self._raw(index)  # processors may have begun in place
            for place in members:
                self._process_alone(rows[place], processors, scores[place : place + 1])
        return scores

    def _raw(self, index: torch.Tensor) -> torch.Tensor:
        """Logits at pairs of row and node (`[2, rows]`), `[rows, vocab]` float32, which may be overwritten."""
        return self._logits[index[0], index[1]].to(torch.float32, copy=True)

    def _process_alone(self, row: int, processors: LogitsProcessorList, scores: torch.Tensor) -> None:
        """Processes the scores (`[1, vocab]`, in place) of a request whose processors look at its history."""
        request = self.requests[row]
        if request.is_over:
            return
        try:
            scores.copy_(processors(request.history(request.length), scores.clone()))
        except Exception as error:  # an error of a user's processor fails only its request
            request.fail(error, by_its_options=True)

    def _drawable(self, rows: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Replaces scores without a softmax by zeros in rows that draw, because a draw from them would fail for all rows;
        and processed scores that are NaN or all -inf in greedy rows. Returns the scores `[rows, vocab]` and which rows
        were replaced, `[rows]` bool, or None if none can be.
        """
        own = [self.requests[row].options for row in rows]
        draws = [options.do_sample for options in own]
        if not any(draws) and not any(options.processors for options in own):
            return scores, None
        highest = scores.amax(dim=-1)
        hopeless = ~highest.isfinite()
        if not all(draws):
            hopeless &= torch.tensor(draws, device=scores.device) | ~(highest > -torch.inf)
        return scores.masked_fill(hopeless[:, None], 0.0), hopeless

    def _fail(self, rows: list[int], hopeless: list[bool]) -> None:
        for row, is_hopeless in zip(rows, hopeless, strict=True):
            if is_hopeless and not self.requests[row].is_over:
                self.requests[row].fail(NOTHING_TO_CHOOSE)

    def choose(self, rows: list[int], walk: Walk, do_sample: bool) -> list[int]:
        """
        The next token of every row: the argmax, or drawn from p (by `uniform` for a request with a seed, by its noise
        for one that has noise).
        """
        scores, hopeless = self._drawable(rows, self._processed(rows, walk))
        requests = [self.requests[row] for row in rows]
        seeded = [place for place, row in enumerate(rows) if do_sample and self._seeded[row]]
        noises = {
            place: request.noise.take(request.length, scores.shape[-1])
            for place, request in enumerate(requests)
            if do_sample and request.noise is not None
        }
        others = [place for place in range(len(rows)) if place not in {*seeded, *noises}]
        if len(others) == len(rows):
            tokens = choose(scores, do_sample)
        else:
            tokens = torch.empty(len(rows), dtype=torch.long, device=scores.device)
            if others:
                tokens[others] = choose(scores[others], do_sample)
        if seeded:
            numbers = [uniform(requests[place].options.seed, requests[place].length) for place in seeded]
            drawn_with = torch.tensor(numbers, dtype=torch.float64, device=scores.device)
            tokens[seeded] = draw_with(scores[seeded], drawn_with)
        if noises:
            tokens[list(noises)] = draw_by_position(scores[list(noises)], list(noises.values()))
        if hopeless is None:
            return self.agree(tokens).tolist()
        tokens, hopeless = self.agree(torch.stack([tokens, hopeless.long()])).tolist()  # one wait for the device
        self._fail(rows, hopeless)
        return tokens

    def ends(self, row: int, token: int) -> bool:
        """Appends an accepted token to its request and returns whether the request ends with it."""
        request = self.requests[row]
        if request.is_over:
            return True
        try:
            return request.append(token)
        except Exception as error:  # an error of a user's criterion fails only its request
            request.fail(error, by_its_options=True)
            return True


def uniform(seed: int, place: int) -> float:
    """
    The random number in (0, 1) that draws the token at position `place` of a text with this seed. It depends on
    nothing else, so that a text is the same with and without drafts and whatever else is in the batch.
    """
    digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52


def draw_with(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """
    Draws tokens `[rows]` from softmax(scores) (`[rows, vocab]`) by inversion of the cumulative distribution, with one
    uniform number per row (`[rows]`, float64).
    """
    cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
    reached = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached, right=True)[:, 0].clamp(max=scores.shape[1] - 1)
