"""When a text ends: its length, its end tokens, and criteria that are told tokens on the host."""

from __future__ import annotations

import math

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


def max_length_of(criteria: StoppingCriteriaList, prompt_length: int) -> int | None:
    """Most tokens of a text, its prompt included: as in plain `generate`, at least one is new. None: no limit."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    shortest = min(lengths, default=math.inf)
    return max(math.ceil(shortest), prompt_length + 1) if shortest < math.inf else None  # it may be a float


def end_tokens_of(criteria: StoppingCriteriaList) -> list[int]:
    """Tokens that end a text."""
    return [
        token
        for criterion in criteria
        if type(criterion) is EosTokenCriteria
        for token in torch.as_tensor(criterion.eos_token_id, device="cpu").flatten().tolist()
    ]


class TokenCriterion(StoppingCriteria):
    """A stopping criterion of one request in a manager, which is told its tokens on the host: no tensor is made."""

    def ends_with(self, token: int) -> bool:
        """Whether the text ends with this token. Asked once for every generated token, in order."""
        raise NotImplementedError
