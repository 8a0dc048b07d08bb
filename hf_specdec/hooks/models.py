"""Models whose classes have a `generate` of their own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from .calls import OPTIONS, is_own, loaded
from .importing import when_imported


_WHISPER = "transformers.models.whisper.generation_whisper"
"""Module of a `generate` that sets a flag on its assistant before it calls that of `GenerationMixin`."""
_OWN_LOOPS = {
    "diffusion_gemma.generation_diffusion_gemma": (
        "DiffusionGemmaGenerationMixin",
        "writes blocks of tokens by diffusion, and checks no drafts",
    ),
    "dia.generation_dia": ("DiaGenerationMixin", "writes several codebooks at once, and checks no drafts"),
}
"""Modules of a `generate` that calls none of the wrapped methods, its class, and what it does."""


def wrap_when_imported() -> None:
    """Wraps the `generate` of these models once their modules are imported."""
    for module in _OWN_LOOPS:
        when_imported(f"transformers.models.{module}", functools.partial(_wrap_own_loop, module))
    when_imported(_WHISPER, _wrap_whisper)


def _wrap_own_loop(module: str) -> None:
    name_of_mixin, does = _OWN_LOOPS[module]
    mixin = getattr(sys.modules[f"transformers.models.{module}"], name_of_mixin)
    original = mixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        for name in OPTIONS:
            if kwargs.get(name) is not None:
                from ..models.reasons import Reason

                raise ValueError(
                    f"`{name}`: the target {type(self).__name__} {Reason.LOOP}: it {does}. Call `generate` without "
                    "`assistant_model`, `tree` and `speculative_config`."
                )
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _wrap_whisper() -> None:
    mixin = sys.modules[_WHISPER].WhisperGenerationMixin
    original = mixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if kwargs.get("assistant_model") is not None:
            kwargs["assistant_model"] = _with_flags(loaded(self, kwargs["assistant_model"]))
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _with_flags(assistant_model: Any) -> Any:
    """An assistant on which flags can be set: the drafter of a head, which has no generation config."""
    if not is_own(assistant_model) or hasattr(assistant_model, "generation_config"):
        return assistant_model
    from ..drafters import as_drafter

    return as_drafter(assistant_model)
