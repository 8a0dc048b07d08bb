"""Preparing the options of a request: `generate` itself does it, once for all requests with the same options."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..compat import cache_name_of
from ..engine.prompt_inputs import is_by_token
from ..generation.inherited import idle_options_of, tell_set_aside
from ..models.structure import execution_device
from ..plan import SpeculationPlan
from ..verification.processor_kinds import READS_SCORES_ONLY
from .image_parts import parts_of_inputs


_OF_THE_MANAGER = ("tree", "speculative_config")
"""Options that `generate` does not prepare for a request."""


@dataclass
class Found:
    """
    What follows from options that are kept.

    Args:
        plan (`SpeculationPlan`, *optional*): plan of the requests without a tree or seed of their own; None if there
            has been none.
    """

    plan: SpeculationPlan | None = None


class Prepared(NamedTuple):
    """
    What `generate` hands to a decoding method.

    Args:
        config (`GenerationConfig`), processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`): config,
            logits processors and stopping criteria for one prompt.
        clock (`MaxTimeCriteria`, *optional*): the criterion of the option `max_time`.
        found (`Found`, *optional*): what follows from these options, for later requests to find; None for options that
            are not kept.
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    clock: MaxTimeCriteria | None = None
    found: Found | None = None

    @property
    def serves_all_prompts(self) -> bool:
        """Whether other prompts differ in `max_length` alone, and nothing here remembers what it has seen."""
        return (
            isinstance(self.config.max_new_tokens, int)
            and not (self.config.min_new_tokens or self.config.min_length)
            and all(type(processor) in READS_SCORES_ONLY for processor in self.processors)
            and all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in self.criteria)
        )

    def to_keep(self) -> Prepared:
        """
        Returns the same for later prompts. End tokens lie on the host, where requests look for them: to read them from
        the device would take as long as the work that is queued there.
        """
        criteria = StoppingCriteriaList(
            EosTokenCriteria(criterion.eos_token_id.cpu()) if type(criterion) is EosTokenCriteria else criterion
            for criterion in self.criteria
        )
        return Prepared(copy.copy(self.config), self.processors, criteria, found=Found())

    def for_length(self, prompt_length: int) -> Prepared:
        """Returns the same for a prompt of this many tokens; see `serves_all_prompts`."""
        config = copy.copy(self.config)
        config.max_length = prompt_length + config.max_new_tokens
        criteria = StoppingCriteriaList(
            MaxLengthCriteria(config.max_length, criterion.max_position_embeddings)
            if type(criterion) is MaxLengthCriteria
            else criterion
            for criterion in self.criteria
        )
        # A list of its own: rows are processed together by their values, or else by their lists; see `sharing_key`.
        return Prepared(config, LogitsProcessorList(self.processors), criteria, found=self.found)


class Preparations:
    """
    Prepares options, and keeps what requests with the same options share: `generate` needs 1 to 3 ms of the host, and
    work on the device, in which it waits for the steps of running requests.

    Args:
        model (`PreTrainedModel`): the target.
    """

    MOST = 64
    """Most sets of options that are kept."""

    def __init__(self, model: Any):
        self._model = model
        self._run: Hashable | None = None
        self._known: OrderedDict[str, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self,
        prompt: list[int],
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        run: Hashable | None = None,
    ) -> Prepared:
        """
        Returns config, processors and criteria for a prompt.

        Args:
            prompt (`list[int]`): the prompt's tokens.
            generation_config (`GenerationConfig`, *optional*), options (`dict`): as `generate` takes them.
            run (*optional*): what was prepared in the same run is used again, because the model stays as it is. None:
                nothing is kept.

        Raises:
            ValueError: for options that `generate` refuses.
        """
        key = None if run is None else _key(generation_config, self._model.generation_config, options)
        if key is None:
            return prepare_options(self._model, prompt, generation_config, options)
        with self._lock:
            if run != self._run:
                self._run, self._known = run, OrderedDict()
            known, prepared = self._known, self._known.get(key)
            if prepared is not None:
                known.move_to_end(key)
                return prepared.for_length(len(prompt))
        prepared = prepare_options(self._model, prompt, generation_config, options)
        if prepared.serves_all_prompts:
            kept = prepared.to_keep()
            prepared = prepared._replace(found=kept.found)
            with self._lock:
                known[key] = kept
                while len(known) > self.MOST:
                    known.popitem(last=False)
        return prepared


def _key(
    generation_config: GenerationConfig | None, defaults: GenerationConfig | None, options: dict[str, Any]
) -> str | None:
    """Key of options, equal only for those that mean the same; None if there is none, as with a user's processors."""
    if not {type(generation_config), type(defaults)} <= {GenerationConfig, type(None)}:
        return None  # a subclass may do anything
    parts = [
        {} if config is None else {name: value for name, value in vars(config).items() if name not in _OF_THE_MANAGER}
        for config in (generation_config, defaults)
    ]
    if not all(_is_plain(value) for part in (*parts, options) for value in part.values()):
        return None
    return repr((generation_config is None, *(sorted(part.items()) for part in (*parts, options))))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None or a short list of these: two with equal `repr` are equal."""
    if type(value) in (list, tuple):
        return len(value) <= 16 and all(type(one) in (bool, int, float, str) for one in value)
    return value is None or type(value) in (bool, int, float, str)


def prepare_options(
    model: Any, prompt: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
) -> Prepared:
    """
    Config, logits processors and stopping criteria that `generate` hands to a decoding method for this prompt.
    `generate` itself prepares them, so that defaults, checks and errors are its own.

    Raises:
        ValueError: for options that `generate` refuses.
    """
    generation_config, options = _with_stop_strings(model, generation_config, dict(options))
    for name in _OF_THE_MANAGER:
        if getattr(model.generation_config, name) is not None:
            options[name] = None  # overrides the model's own
    given = {} if generation_config is None else vars(generation_config)
    idle = {  # set aside before `generate` makes a cache by them
        name: value
        for name, value in idle_options_of(model).items()
        if name not in options and given.get(name) is None
    }
    tell_set_aside(idle)
    options |= idle
    if generation_config is not None:  # what is set goes into the config: beside it, transformers warns of both
        own = {
            name: options.pop(name)
            for name in set(options) & set(vars(generation_config))
            if options[name] is not None
        }
        generation_config = copy.copy(generation_config)
        for name, value in own.items():  # `generate` checks them, with the model's defaults
            setattr(generation_config, name, value)
    prepared = _captured(model, prompt, generation_config, options)
    config, processors = prepared["generation_config"], prepared["logits_processor"]
    criteria, of_caller = prepared["stopping_criteria"], options.get("stopping_criteria") or ()
    clocks = [one for one in criteria if type(one) is MaxTimeCriteria and one not in of_caller]
    return Prepared(config, processors, criteria, clocks[0] if clocks else None)


def prepare_inputs(
    model: Any, prompt: list[int], values: dict[str, Any], num_tokens: int | None = None
) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    Generation config and keyword arguments that `generate` hands to a decoding method for a prompt with inputs beside
    its tokens, `values`, or for its first `num_tokens` tokens: it may encode images already.

    Raises:
        ValueError: for inputs that `generate` refuses.
    """
    if num_tokens is not None:
        values = {
            name: value[..., :num_tokens] if is_by_token(value, len(prompt)) else value
            for name, value in values.items()
        }
        prompt = prompt[:num_tokens]
    device, own = execution_device(model), model.generation_config
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1}
    options |= idle_options_of(model)
    for name in (*_OF_THE_MANAGER, "stop_strings", "prefill_chunk_size"):
        if getattr(own, name, None) is not None:
            options[name] = None  # overrides the model's own
    options |= {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    prepared = _captured(model, prompt, None, options)
    config = prepared["generation_config"]
    not_passed = ("generation_config", "logits_processor", "stopping_criteria", cache_name_of(model))
    return config, {name: value for name, value in prepared.items() if name not in not_passed}


def prepare_start_of(model: Any, prompt: list[int], length: int) -> tuple[GenerationConfig, dict[str, Any]]:
    """What `prepare_inputs` returns for the first `length` tokens of a prompt, as a text."""
    return prepare_inputs(model, prompt[:length], {})


def prepare_more_inputs(
    model: Any,
    prompt: list[int],
    count: int,
    values: dict[str, Any],
    number: int,
    first: int,
    end: int,
    last: int | None = None,
) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    `prepare_inputs` of a prompt with `count` images, of which the first `number` and the first tokens have been read,
    up to token `end`: the others alone are encoded, or those before image `last`, at the positions that they have in
    the prompt.
    """
    by_token = {name: value for name, value in values.items() if is_by_token(value, len(prompt))}
    others = {name: value for name, value in values.items() if name not in by_token}
    parts = parts_of_inputs(count, others)[number:last]
    rest = {
        name: torch.cat([part[name] for part in parts]) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in parts[0].items()
    }
    no_images = {name: value for name, value in values.items() if not _is_floating(value)}
    config, of_all = prepare_inputs(model, prompt, no_images, end)
    of_tokens = {name: value[..., first:end] for name, value in by_token.items()}
    _, own = prepare_inputs(model, prompt[first:end], rest | of_tokens)
    images = {name: value for name, value in own.items() if name in rest or name == "mm_encoder_outputs"}
    return config, of_all | images


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _captured(
    model: Any, prompt: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments that `generate` hands to a decoding method."""

    def capture(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return prepared

    ids = torch.tensor([prompt], device=execution_device(model))
    # With an explicit mask of ones, padding tokens in the prompt count as tokens.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model.generate(**inputs, generation_config=generation_config, custom_generate=capture, **options)


def _with_stop_strings(
    model: Any, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Replaces stop strings by a stopping criterion, because a custom decoding method does not get the tokenizer."""
    tokenizer = options.pop("tokenizer", None)
    configs = (generation_config, model.generation_config)
    of_configs = [one.stop_strings for one in configs if one is not None and one.stop_strings is not None]
    stop_strings = options.get("stop_strings", next(iter(of_configs), None))
    is_said = "stop_strings" in options or stop_strings is not None
    if not is_said or (stop_strings and tokenizer is None):
        return generation_config, options
    options.pop("stop_strings", None)
    if generation_config is not None:
        generation_config = copy.copy(generation_config)
        generation_config.stop_strings = None
    if model.generation_config.stop_strings is not None:
        options["stop_strings"] = None  # overrides the model's own
    if stop_strings:
        criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or ())
        criteria.append(_stop_string_criterion(tokenizer, stop_strings))
        options["stopping_criteria"] = criteria
    return generation_config, options


_stop_string_criteria: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, StopStringCriteria]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()
MOST_STOP_STRINGS = 16
"""Most sets of stop strings whose criteria are cached per tokenizer."""
LONGEST_STOP_STRINGS = 64
"""Most characters of a cached set of stop strings: its table grows with them, in every row of the vocabulary."""


def _stop_string_criterion(tokenizer: Any, stop_strings: str | list[str]) -> StopStringCriteria:
    """A stop-string criterion, copied from the cache if known: a new one reads the vocabulary, for 0.1 to 1 second."""
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError(f"`stop_strings` must be strings, but are {stop_strings!r}.")
    if sum(map(len, strings)) > LONGEST_STOP_STRINGS:
        return StopStringCriteria(tokenizer, list(strings))
    known, key = _stop_string_criteria.setdefault(tokenizer, OrderedDict()), (strings, len(tokenizer))
    criterion = known.get(key)
    if criterion is None:
        criterion = StopStringCriteria(tokenizer, list(strings))
    with _lock:
        known[key] = criterion
        known.move_to_end(key)
        while len(known) > MOST_STOP_STRINGS:
            known.popitem(last=False)
    return copy.copy(criterion)  # a copy, because it moves its table to its request's device
