"""One request: its text, its options as `generate` prepares them, and what becomes of it."""

from __future__ import annotations

import copy
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ..config import SpeculationPlan
from ..device_steps.verdicts import Warpers
from ..forward import execution_device
from ..metrics import SpeculationMetrics
from ..sequences import Sequences
from ..stopping import end_tokens_of, max_length_of
from ..verification import warpers_of
from . import sharing
from .blocks import BlockTable


@dataclass
class SpeculativeGenerationOutput(GenerationOutput):
    """
    transformers' `GenerationOutput`, and what speculation did.

    Args:
        speculation (`SpeculationMetrics`): the counts of this request.
    """

    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)


@dataclass(frozen=True, eq=False)
class RequestOptions:
    """
    What decides a request's text, as `generate` hands it to a decoding method.

    Args:
        processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`): those of `generate` for this prompt.
        do_sample (`bool`): whether tokens are drawn.
        plan (`SpeculationPlan`, *optional*): how the request speculates; None if it does not.
        seed (`int`, *optional*): makes its draws the same whatever else runs.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    plan: SpeculationPlan | None
    seed: int | None = None

    @cached_property
    def processors_key(self) -> Hashable:
        """See `sharing_key`."""
        return sharing.sharing_key(self.processors)

    @cached_property
    def device_warpers(self) -> Warpers | None:
        """The processors, if steps that run on the device as a whole can do them; None if not."""
        warpers = Warpers.of(self.processors)
        return None if warpers is None or (warpers.values and not self.do_sample) else warpers

    @cached_property
    def warpers(self) -> LogitsProcessorList:
        """Those processors that read the scores alone: a draft that draws applies them, too."""
        return warpers_of(self.processors)

    @cached_property
    def warpers_key(self) -> Hashable:
        """See `sharing_key`."""
        return sharing.sharing_key(self.warpers)


class Request:
    """
    A text that grows. All of it but the last token, the root, is to be in the cache before a step.

    Args:
        request_id (`str`): its name.
        prompt (`list[int]`): the tokens that it starts with.
        options (`RequestOptions`): how it goes on.
        device (`torch.device`): where processors and criteria want its tokens.
        streaming (`bool`), record_timestamps (`bool`): as in transformers' manager.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        options: RequestOptions,
        device: torch.device,
        streaming: bool = False,
        record_timestamps: bool = False,
    ):
        self.request_id, self.prompt, self.options = request_id, list(prompt), options
        self.streaming = streaming
        self.tokens = list(prompt)
        self._prompt_told = list(prompt)
        """What results have in common: a copy, since it is handed out, and one, since there may be many."""
        self.max_length = max_length_of(options.criteria, len(prompt)) or sys.maxsize
        self.table = BlockTable()
        self.error: str | None = None
        self.metrics = SpeculationMetrics(accepted_per_step=[[]])
        self._device = device
        self._status = RequestStatus.PENDING
        self._created, self._started, self._ended = time.perf_counter(), -1.0, -1.0
        self._timestamps: list[float] | None = [] if record_timestamps else None
        self._end_tokens = frozenset(end_tokens_of(options.criteria))
        # The usual two are looked at without a tensor.
        self._criteria = StoppingCriteriaList(
            criterion for criterion in options.criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        self._history: Sequences | None = None

    # -------------------------------------------------------------------------------------------------------- the text

    @property
    def length(self) -> int:
        """Tokens so far, prompt and root included."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def room(self) -> int:
        """How many draft tokens a step can use: the step's own token takes the last place."""
        return self.max_length - len(self.tokens) - 1

    def accept(self, token: int) -> bool:
        """Appends a token and says whether the text ends with it; criteria see every token in order."""
        self.tokens.append(token)
        if self._timestamps is not None:
            self._timestamps.append(time.perf_counter())
        ends = token in self._end_tokens or len(self.tokens) >= self.max_length
        if self._criteria:
            ends |= bool(torch.as_tensor(self._criteria(self.history(self.length), None)).all())
        if ends:
            self.status = RequestStatus.FINISHED
        return ends

    def history(self, length: int) -> torch.Tensor:
        """The first `length` tokens, `[1, length]` int64 on the device; a view."""
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
        """Waiting, being prefilled, running, finished or failed."""
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        if self._started < 0 and status != RequestStatus.PENDING:
            self._started = time.perf_counter()
        if status >= RequestStatus.FINISHED:
            self._ended = time.perf_counter()
        self._status = status

    @property
    def is_over(self) -> bool:
        """Whether it has finished or failed."""
        return self._status >= RequestStatus.FINISHED

    def fail(self, error: str | BaseException) -> None:
        """Ends the request with an error."""
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.status = RequestStatus.FAILED

    def to_generation_output(self, status: RequestStatus | None = None) -> SpeculativeGenerationOutput:
        """The request as it stands, for whoever waits for it; with a `status` that it had just before."""
        return SpeculativeGenerationOutput(
            request_id=self.request_id,
            prompt_ids=self._prompt_told,
            generated_tokens=self.tokens[len(self.prompt) :],
            error=self.error,
            status=self.status if status is None else status,
            created_time=self._created,
            lifespan=(self._started, self._ended),
            timestamps=None if self._timestamps is None else list(self._timestamps),
            speculation=self.metrics,
        )


def prepare_options(
    model: Any, prompt: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, LogitsProcessorList, StoppingCriteriaList]:
    """
    What `generate` would hand to a decoding method for this prompt: config, processors and criteria. `generate` itself
    prepares it, so that defaults, checks and refusals are the same.

    Raises:
        ValueError: for whatever `generate` refuses.
    """

    def capture(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return prepared

    generation_config, options = _with_stop_strings(generation_config, dict(options))
    ids = torch.tensor([prompt], device=execution_device(model))
    # Its mask says that all of the prompt counts: else tokens that are the padding token would not.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prepared = model.generate(**inputs, generation_config=generation_config, custom_generate=capture, **options)
    return prepared["generation_config"], prepared["logits_processor"], prepared["stopping_criteria"]


def _with_stop_strings(
    generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The same, with stop strings as a criterion: a custom decoding method does not get the tokenizer."""
    tokenizer = options.pop("tokenizer", None)
    stop_strings = options.get("stop_strings") or getattr(generation_config, "stop_strings", None)
    if tokenizer is None or not stop_strings:
        return generation_config, options
    options.pop("stop_strings", None)
    if generation_config is not None:
        generation_config = copy.copy(generation_config)
        generation_config.stop_strings = None
    criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or ())
    criteria.append(_stop_string_criterion(tokenizer, stop_strings))
    return generation_config, options | {"stopping_criteria": criteria}


_stop_string_criteria: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, StopStringCriteria]] = (
    weakref.WeakKeyDictionary()
)
MOST_STOP_STRINGS = 16
"""Sets of stop strings that are remembered of a tokenizer …"""
LONGEST_STOP_STRINGS = 64
"""… unless they have more characters in all: a table grows with them, of as many rows as the vocabulary."""


def _stop_string_criterion(tokenizer: Any, stop_strings: str | list[str]) -> StopStringCriteria:
    """One for this request. To make it from nothing is to read the vocabulary, for a tenth of a second or a whole."""
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError(f"`stop_strings` must be strings, but are {stop_strings!r}.")
    if sum(map(len, strings)) > LONGEST_STOP_STRINGS:
        return StopStringCriteria(tokenizer, list(strings))
    known, key = _stop_string_criteria.setdefault(tokenizer, OrderedDict()), (strings, len(tokenizer))
    if key not in known:
        known[key] = StopStringCriteria(tokenizer, list(strings))
    known.move_to_end(key)
    while len(known) > MOST_STOP_STRINGS:
        known.popitem(last=False)
    return copy.copy(known[key])  # which takes its table to the device of its request
