"""Requests: their text, their status, and their results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import torch
from transformers import StoppingCriteriaList
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..adapters import Choice
from ..cache.blocks import BlockTable
from ..metrics import SpeculationMetrics
from ..sequences import Sequences
from ..verification import DraftBackoff, PositionNoise
from ..verification.log_probabilities import TokenLogprob
from .prompt_inputs import PromptInputs
from .prompt_memory import lacks_memory
from .request_options import RequestOptions
from .stopping import TokenCriterion, end_tokens_of, max_length_of


FinishReason = Literal["stop", "length"]
PRIORITY = attrgetter("priority")
"""The priority of a request, by which lists of them are sorted."""


@dataclass
class SpeculativeGenerationOutput(GenerationOutput):
    """
    transformers' `GenerationOutput` with speculation metrics and the reason why the text ends.

    Args:
        speculation (`SpeculationMetrics`): speculation counts of this request so far.
        finish_reason (`str`, *optional*): `"stop"` for a text that ends with an end token, a stop string or another
            criterion, `"length"` for one that is as long as it may be; None for one that has not ended.
        fails_by_its_options (`bool`): whether one of the request's processors or criteria has raised the `error`.
        top_logprobs (`list[list[tuple[int, float]]]`): for every generated token the best tokens in its place with
            their log-probabilities, the best first; empty unless asked for. (`logprobs` are those of the tokens.)
        num_cached_tokens (`int`): tokens of the prompt that were not read, since their K/V were in the prefix cache.
    """

    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    finish_reason: FinishReason | None = None
    fails_by_its_options: bool = False
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_cached_tokens: int = 0


class Request:
    """
    A request in flight: prompt and generated tokens, options, block table and status. Before a decoding step, all of
    its tokens but the last, the root, are in the cache.

    Args:
        request_id (`str`): the request's name.
        prompt (`list[int]`): the prompt's tokens.
        options (`RequestOptions`): decoding options.
        device (`torch.device`): device on which processors and criteria get the tokens.
        streaming (`bool`): whether there is a result at every step.
        record_timestamps (`bool`): whether the time of every token is recorded.
        inputs (`PromptInputs`, *optional*): what the target reads beside the prompt's tokens.
        adapter (`str`, *optional*): the target's adapter with which the request runs: its name, None for the target
            without adapters, `...` (the default) for those that are active.
        priority (`int`): requests with a lower one are admitted first, and preempted last.
        max_positions (`int`, *optional*): positions that the target knows. A text that wants more tokens fails once it
            is one token longer, as in plain `generate`, where the forward of that token fails.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        options: RequestOptions,
        device: torch.device,
        streaming: bool = False,
        record_timestamps: bool = False,
        max_positions: int | None = None,
        inputs: PromptInputs | None = None,
        adapter: Choice = ...,
        priority: int = 0,
    ):
        self.inputs, self.adapter, self.priority = inputs, adapter, priority
        self.position_shift: torch.Tensor | None = None
        """
        Position of a token of the text after the prompt minus its slot, `[…, 1]` int64 on the host; with leading
        dimensions where positions have several. None before the prompt is read, and if the shift is that of texts.
        """
        self.shifts_between: list[torch.Tensor | None] = []
        """Position shifts behind each image but the last, where there are several; empty if not known."""
        self.request_id, self.prompt, self.options = request_id, list(prompt), options
        self.streaming = streaming
        self.tokens = list(prompt)
        self.logprobs: list[TokenLogprob] = []
        """The log-probabilities of every generated token, if they are asked for."""
        self._prompt_in_results = list(prompt)
        """A copy, because users get it, shared by all results of the request."""
        wanted = max_length_of(options.criteria, len(prompt)) or sys.maxsize
        self.max_length = wanted if max_positions is None else min(wanted, max_positions + 1)
        self._fails_at_its_end = self.max_length < wanted
        self.table = BlockTable()
        self.num_cached = 0
        """Tokens of the prompt that the prefix cache had."""
        self.block_keys: tuple[list[bytes], tuple[bool, ...]] = [], ()
        """Keys of the text's full blocks so far, and what they depend on; see `keys_of`."""
        self.error: str | None = None
        self.finish_reason: FinishReason | None = None
        self.fails_by_its_options = False
        self.metrics = SpeculationMetrics(accepted_per_step=[[]])
        self.draft_backoff = DraftBackoff()
        self.noise: PositionNoise | None = None
        """Random numbers by position from which tokens are drawn; None: they are drawn by `seed` or the generator."""
        self._device = device
        self._status = RequestStatus.PENDING
        self._created, self._started, self._ended = time.perf_counter(), -1.0, -1.0
        self._timestamps: list[float] | None = [] if record_timestamps else None
        self._end_tokens = frozenset(end_tokens_of(options.criteria))
        # Token criteria and the two usual ones are checked without a tensor.
        self._token_criteria = [one for one in options.criteria if isinstance(one, TokenCriterion)]
        self._criteria = StoppingCriteriaList(
            criterion
            for criterion in options.criteria
            if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) and criterion not in self._token_criteria
        )
        self._history: Sequences | None = None

    # -------------------------------------------------------------------------------------------------------- the text

    @property
    def length(self) -> int:
        """Number of tokens so far, prompt and root included."""
        return len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_read_whole(self) -> int:
        """Tokens at the start of the prompt that are read with the whole of it, or taken over from others together."""
        if self.inputs is None:
            return 0
        return len(self.prompt) if self.inputs.content is None else self.inputs.content.end

    @property
    def num_lead(self) -> int:
        """How many of them are text that may be read before the rest."""
        return 0 if self.inputs is None else self.inputs.num_lead

    @property
    def needs_noise(self) -> bool:
        """Whether the request draws by position and has no `noise` yet."""
        return self.noise is None and self.options.draws_by_position

    @property
    def room(self) -> int:
        """Most draft tokens that a step can use: the step's bonus token takes the last place."""
        return self.max_length - len(self.tokens) - 1

    def append(self, token: int) -> bool:
        """Appends a token and returns whether the text ends with it. Stopping criteria see every token in order."""
        self.tokens.append(token)
        if self._timestamps is not None:
            self._timestamps.append(time.perf_counter())
        stops = token in self._end_tokens
        for criterion in self._token_criteria:
            stops |= criterion.ends_with(token)
        if self._criteria:
            stops |= bool(torch.as_tensor(self._criteria(self.history(self.length), None), device="cpu").all())
        is_full = len(self.tokens) >= self.max_length
        if is_full and self._fails_at_its_end and not stops:
            self.fail(IndexError(f"the target knows {self.max_length - 1} positions, and the text goes on"))
        elif stops or is_full:
            self.finish_reason = "stop" if stops else "length"
            self.status = RequestStatus.FINISHED
        return self.is_over

    def history(self, length: int, new: Sequence[int] = ()) -> torch.Tensor:
        """The first `length` tokens, `[1, length]` int64 on the device; a view. They include `new` already."""
        if self._history is None:
            self._history = Sequences(torch.tensor([self.tokens], device=self._device), max_length=None)
            self._seen = self.length
        if self._seen < length:
            self._history.write(0, self._seen, self.tokens[self._seen :])
            self._seen = self.length
        return self._history.row(0, length)

    # ------------------------------------------------------------------------------------------- what becomes of it

    @property
    def status(self) -> RequestStatus:
        """The request's status: waiting, being prefilled, running, finished or failed."""
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        if self._started < 0 and status != RequestStatus.PENDING:
            self._started = time.perf_counter()
            if self.options.clock is not None:
                self.options.clock.initial_timestamp = time.time()
        if status >= RequestStatus.FINISHED:
            self._ended = time.perf_counter()
        self._status = status

    @property
    def is_over(self) -> bool:
        """Whether the request has finished or failed."""
        return self._status >= RequestStatus.FINISHED

    def fail(self, error: str | BaseException, by_its_options: bool = False) -> None:
        """
        Ends the request with an error. `by_its_options`: whether one of its own processors or criteria has raised it;
        lack of memory is not their fault.
        """
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        is_for_memory = isinstance(error, BaseException) and lacks_memory(error)
        self.fails_by_its_options = by_its_options and not is_for_memory
        self.status = RequestStatus.FAILED

    def to_generation_output(self, status: RequestStatus | None = None) -> SpeculativeGenerationOutput:
        """A result with the request's tokens so far, and its status now or the `status` given."""
        return SpeculativeGenerationOutput(
            request_id=self.request_id,
            prompt_ids=self._prompt_in_results,
            generated_tokens=self.new_tokens,
            logprobs=[one.value for one in self.logprobs],
            error=self.error,
            status=self.status if status is None else status,
            created_time=self._created,
            lifespan=(self._started, self._ended),
            timestamps=None if self._timestamps is None else list(self._timestamps),
            speculation=self.metrics.copy(),
            finish_reason=self.finish_reason,
            fails_by_its_options=self.fails_by_its_options,
            top_logprobs=[one.best for one in self.logprobs]
            if self.options.logprobs and self.options.logprobs.best
            else [],
            num_cached_tokens=self.num_cached,
        )
