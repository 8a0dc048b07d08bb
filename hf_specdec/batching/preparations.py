"""Options that requests share: prepared once for all that have the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from transformers import GenerationConfig

from .preparing import OF_THE_MANAGER, Prepared, prepare_options


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
        {} if config is None else {name: value for name, value in vars(config).items() if name not in OF_THE_MANAGER}
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
