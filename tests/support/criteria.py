"""Stopping criteria of a user's own for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


class Custom(StoppingCriteria):
    """A criterion made of a function of (`input_ids`, `scores`, number of the call) to bools: `[batch]`, or one."""

    def __init__(self, function: Callable[..., Any], *more: Any):
        self.function, self.more = function, more
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.as_tensor(self.function(input_ids, scores, self.calls, *self.more)).expand(len(input_ids))


def in_text(input_ids: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Which rows have one of these tokens, `[batch]`."""
    return torch.isin(input_ids, torch.tensor(tokens)).any(dim=1)
