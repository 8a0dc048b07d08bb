"""The options of decoding that all bodies have: OpenAI's, and those that vLLM and llama.cpp have beside them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from .kinds import (
    MOST_TOKENS,
    Boolean,
    Closed,
    Count,
    ListOf,
    Positive,
    Probability,
    Seed,
    Temperature,
    TokenId,
)
from .options import LARGEST_VOCABULARY, Tree


TopK = Annotated[int, Strict(), Field(ge=-1, le=MOST_TOKENS)]
"""-1 and 0: all tokens."""
Penalty = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-2, le=2)]
Priority = Annotated[int, Strict(), Field(ge=-(2**31), le=2**31 - 1)]
StopTokens = Annotated[ListOf[TokenId], Field(max_length=LARGEST_VOCABULARY)]


class Decoding(Closed):
    """How the tokens of an answer are chosen, and when it ends."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    min_tokens: Count | None = None
    ignore_eos: Boolean | None = None
    stop_token_ids: StopTokens | None = None
    priority: Priority | None = None
    tree: Tree = None
