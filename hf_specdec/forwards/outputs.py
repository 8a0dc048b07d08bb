"""Models whose configs ask for tuples (`return_dict=False`), which their own inner modules do not expect."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from ..attention import supports_switching, switched_to_tree_attention
from ..fusing import modules_kept
from ..states import layer_kinds_of, states_over_trees
from .relative import biased_along_paths
from .selecting import selecting_along_paths


_lock = threading.Lock()
_changed: dict[int, list[Any]] = {}
"""Changed configs by `id(config)`: the config, which keeps the id valid, and how many calls need the change."""


@contextmanager
def returning_named_outputs(model: PreTrainedModel) -> Iterator[None]:
    """
    Sets `return_dict` in the configs of a model inside the context, if it is False: `return_dict=True` as an argument
    reaches the outermost forward alone. Calls of several threads on one model are counted: the first one sets it, the
    last one restores it.
    """
    own = {id(config): config for config in (model.config, model.config.get_text_config(decoder=True))}
    with _lock:
        ours = [key for key, config in own.items() if key in _changed or getattr(config, "return_dict", True) is False]
        for key in ours:
            _changed.setdefault(key, [own[key], 0])[1] += 1
            own[key].return_dict = True
    try:
        yield
    finally:
        with _lock:
            for key in ours:
                _changed[key][1] -= 1
                if _changed[key][1] == 0:
                    own[key].return_dict = False
                    del _changed[key]


@contextmanager
def over_trees(*models: PreTrainedModel) -> Iterator[None]:
    """
    A context for forwards over trees, during which nobody changes the models: they return named outputs, and attend as
    `TreeForward` wants them to.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(modules_kept(model))
            stack.enter_context(returning_named_outputs(model))
            if supports_switching(model):
                stack.enter_context(switched_to_tree_attention(model))
                stack.enter_context(selecting_along_paths(model))
                stack.enter_context(biased_along_paths(model))
            if layer_kinds_of(model) is not None:
                stack.enter_context(states_over_trees(model))
        yield
