"""Checks of a request's arguments, by which it is refused before it enters the queue."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..generation.inherited import OF_OTHER_MODES, remedy, set_aside_idle_options


_OBJECTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "tokenizer",
    "grammar",
    "grammar_after",
)
_OUTPUTS = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
_NEUTRAL = dict.fromkeys(_OUTPUTS, False) | {"num_return_sequences": 1} | OF_OTHER_MODES
"""Options that requests do not have, each with the value that asks for nothing."""
_NOT_GIVEN_IF_NONE = (*_OBJECTS, "max_new_tokens", "eos_token_id")
"""Options of which None is the default, as in transformers' manager: the request's config says what they are."""
_KNOWN_OPTIONS = frozenset(vars(GenerationConfig())) - {"tree", "speculative_config"} | frozenset(_OBJECTS)


@dataclass(frozen=True, eq=False)
class BaseConfig:
    """
    The config to which the options of a request are added.

    Args:
        config (`GenerationConfig`, *optional*): options from which `generate` prepares a plain call: without
            speculation, and without an `eos_token_id` of -1.
        ends (`bool`): whether end tokens end the texts: not with `eos_token_id=-1`, as with transformers' manager.
        overrides (`dict`): options beside the config, which override it and the model's own even where they are None.
    """

    config: GenerationConfig | None
    ends: bool
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, generation_config: GenerationConfig | BaseConfig | None) -> BaseConfig:
        """
        Takes a copy of a user's config. A `BaseConfig` is returned unchanged.

        Raises:
            TypeError: if it is not a `GenerationConfig`.
        """
        if isinstance(generation_config, BaseConfig):
            return generation_config
        if generation_config is None:
            return cls(None, True)
        if not isinstance(generation_config, GenerationConfig):
            raise TypeError(
                f"`generation_config` must be a GenerationConfig, but is {type(generation_config).__name__}. Give its "
                "options by name, or `GenerationConfig(**options)`."
            )
        plain = copy.deepcopy(generation_config)
        plain.tree = plain.speculative_config = None
        ends = plain.eos_token_id != -1
        if not ends:
            plain.eos_token_id = None
        return cls(plain, ends)


def check_kinds(request_id: Any, speculate: Any, seed: Any, priority: Any = 0) -> None:
    """Raises a `TypeError` for arguments of a request, other than prompt and options, of the wrong type."""
    if not isinstance(request_id, str):
        raise TypeError(f"`request_id` must be a string, but is {type(request_id).__name__}: {request_id!r}.")
    if not isinstance(speculate, bool):
        raise TypeError(f"`speculate` must be True or False, but is {type(speculate).__name__}: {speculate!r}.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"`seed` must be an integer, but is {type(seed).__name__}: {seed!r}.")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(
            f"`priority` must be an integer, lower for what is more urgent, but is {type(priority).__name__}: "
            f"{priority!r}."
        )


def checked_prompt(input_ids: Iterable[int], num_tokens: int) -> list[int]:
    """
    The tokens of a prompt, as integers.

    Raises:
        ValueError, TypeError: if there is none, or one is not an integer below `num_tokens`, the number that the model
            knows.
    """
    if isinstance(input_ids, (str, bytes)) or not isinstance(input_ids, Iterable):
        raise TypeError(
            f"`input_ids` must be a list of tokens, but is {type(input_ids).__name__}: {input_ids!r}. For "
            "`generate_batch`, give a list of such lists."
        )
    given = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else list(input_ids)
    try:
        prompt = list(map(operator.index, given))
    except TypeError:
        prompt = []
    if not prompt:
        raise ValueError(
            f"`input_ids` must be a list of one token or more, which are integers, but is {_shorten(given)}."
        )
    if min(prompt) < 0 or max(prompt) >= num_tokens:
        raise ValueError(
            f"`input_ids` must be tokens from 0 to {num_tokens - 1}, which the model knows, but is {_shorten(prompt)}."
        )
    return prompt


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """
    The options that were given: as to `generate`, None is a value that overrides the model's own, but for
    `_NOT_GIVEN_IF_NONE`.

    Raises:
        ValueError, TypeError: for an unknown option, or a value of the wrong type.
    """
    unknown = sorted(set(options) - _KNOWN_OPTIONS)
    if unknown:
        given = repr(options[unknown[0]])
        raise ValueError(
            f"`{unknown[0]}={given if len(given) <= 80 else type(options[unknown[0]]).__name__}` is not known "
            f"here. A request takes the options of a `GenerationConfig`, "
            f"{', '.join(f'`{name}`' for name in _OBJECTS)}."
        )
    _check_lengths(options)
    ends = options.get("eos_token_id")
    if isinstance(ends, str):
        raise TypeError(f"`eos_token_id` must be a token, or a list of tokens, but is {ends!r}.")
    for name in ("logits_processor", "stopping_criteria"):
        if options.get(name) is not None and not isinstance(options[name], (list, tuple)):
            raise TypeError(f"`{name}` must be a list, but is {type(options[name]).__name__}. Put it into one.")
    return {
        name: _NEUTRAL.get(name) if value is None else value  # of some, None makes `generate` fail
        for name, value in options.items()
        if value is not None or name not in _NOT_GIVEN_IF_NONE
    }


def of_each(adapter: Any, number: int) -> list[Any]:
    """
    The adapter of each of so many requests, from a list of them or one for all.

    Raises:
        ValueError: for a list of another length.
    """
    if not isinstance(adapter, (list, tuple)):
        return [adapter] * number
    if len(adapter) != number:
        raise ValueError(
            f"`adapter` has {len(adapter)} entries for {number} requests. Give one for each, or one for all."
        )
    return list(adapter)


def overrides_in(options: dict[str, Any]) -> dict[str, Any]:
    """
    The options of a call that ask for nothing where requests have nothing. A manager all of whose requests are of this
    call has them by default: else it would refuse what they override.
    """
    return {name: neutral for name, neutral in _NEUTRAL.items() if options.get(name, ...) in (None, neutral)}


def check_config(model: PreTrainedModel, config: GenerationConfig) -> None:
    """
    Raises a `ValueError` or `TypeError` for a prepared config that asks for what `generate` has, but not requests.
    Options of the model's own `generation_config` that change no text are set aside.
    """
    set_aside_idle_options(model, config)
    _check_lengths(vars(config))
    for name in _OUTPUTS:
        if getattr(config, name, None):
            do = remedy(model, config, name, _NEUTRAL[name], "Use `generate`, or leave it out.")
            raise ValueError(f"`{name}=True`: requests return tokens alone. {do}")
    if (config.num_return_sequences or 1) > 1:
        do = remedy(model, config, "num_return_sequences", 1, "Add as many requests, each with a `seed` of its own.")
        raise ValueError(f"`num_return_sequences={config.num_return_sequences}`: a request has one text. {do}")


def _check_lengths(options: dict[str, Any]) -> None:
    for name in ("max_new_tokens", "max_length"):
        value = options.get(name)
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"`{name}` must be an integer, but is {value!r}.")


def _shorten(tokens: list[Any]) -> str:
    return repr(tokens) if len(tokens) <= 8 else f"{tokens[:4]!r}"[:-1] + ", …, " + f"{tokens[-3:]!r}"[1:]
