"""`logit_bias`, as an option of `generate`."""

from __future__ import annotations

import re
from typing import Any

from ..characters import shortened
from .kinds import LARGEST


MOST_DIGITS = 20


def sequence_bias(logit_bias: Any, vocab_size: int | None = None) -> dict[tuple[int], float] | None:
    """
    The `sequence_bias` of a generation config for a `logit_bias`; None without a bias.

    Raises:
        TypeError, ValueError: if it is no bias of tokens that the model knows.
    """
    if logit_bias is None or logit_bias == {}:
        return None
    if not isinstance(logit_bias, dict):
        raise TypeError(f"`logit_bias` must be an object of token ids and biases, but is {shortened(logit_bias)}.")
    biases = {_token(name, logit_bias): _bias(name, value) for name, value in logit_bias.items()}
    unknown = [token for token in biases if token < 0 or vocab_size is not None and token >= vocab_size]
    if unknown:
        raise ValueError(
            f"`logit_bias` names tokens beyond the {vocab_size} that the model knows: {shortened(unknown)}. "
            "Leave them out."
        )
    return {(token,): bias for token, bias in biases.items()}


def _token(name: str, given: Any) -> int:
    if not re.fullmatch(r"-?[0-9]{1,20}", name):
        raise ValueError(
            f'`logit_bias` must be an object of token ids and biases, such as {{"42": -100}}, but is '
            f"{shortened(given)}."
        )
    return int(name)


def _bias(token: str, value: Any) -> float:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40})?", value):
        value = float(value)  # as some clients write it
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`logit_bias` has token ids and biases, but that of {token} is {shortened(value)}.")
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"`logit_bias` must be finite, but that of {token} is {shortened(value)}.")
    return float(value)
