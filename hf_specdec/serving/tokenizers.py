"""Tokenizers of which some methods do something else, as transformers' handlers are given them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


class LikeTokenizer:
    """
    Has everything that a tokenizer has. Subclasses replace some of it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._own = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._own, name)
