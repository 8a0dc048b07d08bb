"""Copies of the objects among a request's options, for further requests with the same options."""

from __future__ import annotations

from typing import Any

from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..verification.processor_copies import copy_or_refuse, kept_whole
from ..verification.processor_kinds import READS_OWN_HISTORY, READS_SCORES_ONLY


_REMEMBER_NOTHING = READS_SCORES_ONLY | READS_OWN_HISTORY
_REMEMBER_NOTHING |= {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}


def with_own_objects(options: dict[str, Any]) -> dict[str, Any]:
    """
    Options with copies of their logits processors, stopping criteria and `prefix_allowed_tokens_fn`, for a further
    request with the same options. Those of transformers that remember nothing are shared.

    Raises:
        ValueError: if one of them cannot be copied.
    """
    lists = {name: list(options[name]) for name in ("logits_processor", "stopping_criteria") if options.get(name)}
    function = options.get("prefix_allowed_tokens_fn")
    memo = kept_whole([*lists.values(), function])
    own: dict[str, Any] = {name: [_own(name, part, memo) for part in parts] for name, parts in lists.items()}
    if function is not None:
        own["prefix_allowed_tokens_fn"] = _own("prefix_allowed_tokens_fn", function, memo)
    return options | own


def _own(name: str, part: Any, memo: dict[int, Any]) -> Any:
    if type(part) in _REMEMBER_NOTHING:
        return part
    remedy = "add the requests one by one, each with one of its own"
    return copy_or_refuse(part, memo, name, "each of the requests", remedy)
