"""Models whose classes have a `generate` of their own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from .calls import OPTIONS, PASSED_BY, is_speculative, loaded
from .importing import when_imported


_WHISPER = "transformers.models.whisper.generation_whisper"
"""Module of a `generate` that prepares inputs and decodes by that of `GenerationMixin`, segment by segment."""
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
    """
    Drafts of ours pass by Whisper's own `generate`, which would set a flag on them and let the first token be one that
    `begin_suppress_tokens` forbids.
    """
    mixin = sys.modules[_WHISPER].WhisperGenerationMixin
    original = mixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        draft = loaded(self, kwargs.get("assistant_model"))
        if draft is not None and _is_ours(self, draft, *args, **kwargs):
            del kwargs["assistant_model"]
            kwargs[PASSED_BY] = draft
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _is_ours(
    model: Any, draft: Any, inputs: Any = None, generation_config: Any = None, *_: Any, **kwargs: Any
) -> bool:
    """Whether hf_specdec serves a call of Whisper's `generate` with this draft."""
    if any(kwargs.get(name) is not None for name in ("tree", "speculative_config")):
        return True
    return is_speculative(generation_config or model.generation_config, draft)
