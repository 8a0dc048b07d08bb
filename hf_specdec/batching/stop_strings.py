"""Stop strings of requests: a stopping criterion in their place, cached for each tokenizer."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria


def with_stop_strings(
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
