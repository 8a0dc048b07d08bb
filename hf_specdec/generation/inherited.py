"""Options that a call has from the model's own `generation_config`, and was not given itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging


OF_ASSISTED_GENERATION = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "target_lookbehind",
    "speculation_type",
    "max_matching_ngram_size",
)
"""Options that tune transformers' own assisted generation."""
OTHER_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options that ask transformers for other drafts."""
OF_OTHER_MODES = {
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}
"""Options that ask for a mode other than greedy decoding and sampling, each with the value that does not."""
_OF_CACHES = ("cache_implementation", "cache_config", "use_cache")
_WITHOUT = {"use_cache": True, "use_mtp": False}
"""Values that ask for nothing, where it is not None."""

logger = logging.get_logger(__name__)


@lru_cache
def default_of(name: str) -> tuple[Any, Any]:
    """The values of an option of transformers' assisted generation that ask for nothing."""
    return getattr(GenerationConfig(), name, None), GenerationConfig._get_default_generation_params().get(name)


def idle_options_of(model: PreTrainedModel) -> dict[str, Any]:
    """
    Options in the model's own `generation_config` that change no text, since they only tune transformers' assisted
    generation or choose its cache: each with the value that sets it aside.
    """
    own, found = model.generation_config, {}
    for name in (*OF_ASSISTED_GENERATION, *OTHER_DRAFTS, *_OF_CACHES):
        value, idle = getattr(own, name, None), _WITHOUT.get(name)
        if value not in (None, "dynamic", idle, *default_of(name)):
            found[name] = idle
    return found


def set_aside_idle_options(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """
    Sets aside, in the prepared config of a call, what `idle_options_of` finds in the model's, and says so once.
    """
    options = {
        name: idle
        for name, idle in idle_options_of(model).items()
        if getattr(generation_config, name, None) == getattr(model.generation_config, name)
    }
    for name, idle in options.items():
        setattr(generation_config, name, idle)
    log_set_aside(options)


def log_set_aside(options: dict[str, Any]) -> None:
    """Says once, as information, which options of the model's own are set aside."""
    if options:
        logger.info_once(
            f"{', '.join(f'`{name}`' for name in options)} of the model's `generation_config` "
            f"{'is' if len(options) == 1 else 'are'} set aside: a tree has a cache of its own, and `tree=` says how "
            "much is drafted."
        )


def is_inherited(model: PreTrainedModel, generation_config: GenerationConfig, name: str, neutral: Any) -> bool:
    """Whether the value of an option, which is not `neutral`, comes from the model's own `generation_config`."""
    own = getattr(model.generation_config, name, None)
    return own is not None and own != neutral and own == getattr(generation_config, name, None)


def remedy(model: PreTrainedModel, generation_config: GenerationConfig, name: str, neutral: Any, else_do: str) -> str:
    """
    What to do about an option that cannot be served: to override it in the call with `neutral`, or there, if it comes
    from the model's own `generation_config`; `else_do`, if the call names it.
    """
    if not is_inherited(model, generation_config, name, neutral):
        return else_do
    own = f"`{name}={neutral!r}`"
    return f"It comes from the model's `generation_config`: pass {own} in the call to override it, or set it there."
