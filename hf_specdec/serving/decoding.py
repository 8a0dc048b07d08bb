"""The options of a request as `generate` takes them, and what the engine has beside these."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from ..adapters import Choice
from ..grammar import FreeBeginning
from .calls import Demanded
from .requests import LENGTHS


_ALIKE = ("top_k", "min_p", "repetition_penalty", "tree")
"""Options that `generate` has, too."""
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Options that ask for sampling, unless the temperature is 0."""


@dataclass(frozen=True)
class Beside:
    """
    What a request has beside the options of `generate`. Lies in its `GenerationConfig`, as `beside`, until the engine
    gets it.

    Args:
        seed (`int`, *optional*), priority (`int`), adapter (`str`, *optional*): see
            `SpeculativeBatchingManager.add_request`.
        presence_penalty (`float`), frequency_penalty (`float`): see `OccurrencePenalty`.
        left_out (`frozenset[int]`): tokens that end the text and are no part of it.
        grammar_after (`FreeBeginning`, *optional*): what comes before the text of the request's grammar.
        demanded (`Demanded`, *optional*): that the grammar is of calls.
        may_reason (`bool`): whether reasoning may come before the text of the grammar.
        tools (`list[dict]`): those that the model is shown.
        is_one_call (`bool`): whether no call comes after another one.
        length_field (`str`, *optional*): the field of the body with the most tokens of the answer.
    """

    seed: int | None = None
    priority: int = 0
    adapter: Choice = ...
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    left_out: frozenset[int] = frozenset()
    grammar_after: FreeBeginning | None = None
    demanded: Demanded | None = None
    may_reason: bool = False
    tools: Sequence[dict[str, Any]] = ()
    is_one_call: bool = False
    length_field: str | None = None


def beside(config: GenerationConfig) -> Beside:
    """What a request with this config has beside it."""
    return getattr(config, "beside", None) or Beside()


def for_choice(config: GenerationConfig, number: int) -> GenerationConfig:
    """The config of one of several answers to a prompt, from 0: its seed is the request's plus that number."""
    config, own = copy.copy(config), beside(config)
    if own.seed is not None:
        config.beside = replace(own, seed=(own.seed + number + 2**63) % 2**64 - 2**63)
    return config


def decode_by(
    config: GenerationConfig, body: dict[str, Any], of_model: GenerationConfig, adapter: Choice = ...
) -> None:
    """
    Sets the options of a checked body in a config.

    Args:
        config (`GenerationConfig`): with the options that transformers' handlers set.
        body (`dict`): the body.
        of_model (`GenerationConfig`): the model's own.
        adapter (`str`, *optional*): the request's adapter.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in _ALIKE:
        if name in given and (name, given[name]) != ("tree", "default"):
            setattr(config, name, given[name])
    config.top_k = 0 if config.top_k == -1 else config.top_k
    if given.get("temperature") or any(name in given for name in _OF_SAMPLING[1:]):
        config.do_sample = given.get("temperature") != 0
    stops = list(dict.fromkeys(given.get("stop_token_ids", ())))
    if stops or given.get("ignore_eos"):
        own = config.eos_token_id if config.eos_token_id is not None else of_model.eos_token_id
        ends = [] if given.get("ignore_eos") or own in (None, -1) else [own] if isinstance(own, int) else list(own)
        config.eos_token_id = list(dict.fromkeys(ends + stops)) or -1
    if given.get("min_tokens") and config.eos_token_id != -1:
        config.min_new_tokens = given["min_tokens"]
    config.beside = Beside(
        seed=given.get("seed"),
        priority=given.get("priority", 0),
        adapter=adapter,
        presence_penalty=float(given.get("presence_penalty", 0)),
        frequency_penalty=float(given.get("frequency_penalty", 0)),
        left_out=frozenset(stops),
        length_field=next((name for name in LENGTHS if name in given), None),
    )
