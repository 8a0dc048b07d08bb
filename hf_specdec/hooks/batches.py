"""Wrapped methods of `generate_batch` and of managers."""

from __future__ import annotations

import functools
import sys
from typing import Any

from .calls import OPTIONS, loaded


_DESTRUCTION = "destroy_cached_continuous_batching_manager"
_BATCH_METHODS = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")


def wrap_batches(mixin: Any) -> None:
    """Wraps the methods of `ContinuousMixin` by which requests are batched."""
    for name in _BATCH_METHODS:
        _wrap_method(mixin, name)
    _wrap_destruction(mixin)


def _wrap_method(mixin: Any, name: str) -> None:
    original = getattr(mixin, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        config = kwargs.get("generation_config")
        position = 1 if name == "generate_batch" else 0
        if config is None and len(args) > position:
            config = args[position]
        is_ours = any(kwargs.get(option) is not None for option in OPTIONS)
        defaults = (config, getattr(self, "generation_config", None))
        is_ours |= any(getattr(one, option, None) is not None for one in defaults for option in OPTIONS)
        given = {option: value for option, value in kwargs.items() if value is not None or option not in OPTIONS}
        if not is_ours:
            rollouts = _rollouts_of(self) if name == "generate_batch" else None
            if rollouts is not None:
                return rollouts.generate_batch(*args, **given)
            _destroy_ours(self)
            return original(self, *args, **given)
        from ..batching.methods import METHODS

        if "assistant_model" in given:
            given["assistant_model"] = loaded(self, given["assistant_model"])
        return METHODS[name](self, *args, **given)

    setattr(mixin, name, method)


def _wrap_destruction(mixin: Any) -> None:
    original = getattr(mixin, _DESTRUCTION)

    @functools.wraps(original)
    def method(self):
        original(self)
        _destroy_ours(self)

    setattr(mixin, _DESTRUCTION, method)


def _rollouts_of(model: Any) -> Any:
    """The `rollouts` in whose context a model is, if any."""
    if "hf_specdec.rl" not in sys.modules:
        return None
    from ..rl.rollouts import open_rollouts

    return open_rollouts(model)


def _destroy_ours(model: Any) -> None:
    """Destroys the speculative batching manager that a model keeps, so that its memory is free for another."""
    if "hf_specdec.batching.methods" in sys.modules:  # else there is none
        from ..batching.methods import METHODS

        METHODS[_DESTRUCTION](model)
