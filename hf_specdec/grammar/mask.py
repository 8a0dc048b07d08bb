"""`GrammarMask`: the logits processor that lets only the tokens of a grammar through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from .beginnings import LateText
from .compiled import CompiledGrammar
from .texts import GrammarText


class GrammarMask(LogitsProcessor):
    """
    Sets the scores of all tokens to -inf that the grammar does not allow after the tokens so far. The first call is
    for the first new token: what stands there is the prompt, which the grammar does not see.

    Args:
        grammar (`CompiledGrammar`): the grammar.
    """

    def __init__(self, grammar: CompiledGrammar):
        self._grammar = grammar
        self._texts: list[GrammarText | LateText] = []
        self.start: int | None = None
        """Number of tokens before the first new one; None before the first call."""

    def for_row(self) -> GrammarMask:
        """A mask for another text with the same grammar."""
        return GrammarMask(self._grammar)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarMask:
        return self.for_row()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        tokens = input_ids[:, self.start :].tolist()
        bits = [self._at(row, text).allowed() for row, text in enumerate(tokens)]
        allowed = torch.cat([as_bools(one, scores.shape[1], scores.device) for one in bits])
        return scores.masked_fill(~allowed, -torch.inf)

    def forced(self, tokens: list[int], path: list[int], most: int) -> list[int]:
        """
        Up to `most` tokens that the grammar asks for after the first row's new `tokens` and a path in its tree; none
        after a text that it does not let through, as that of a row that has failed.
        """
        try:
            return self._at(0, tokens + path).forced(most) if most > 0 else []
        except ValueError:
            return []

    def allowed_after(self, tokens: Sequence[int]) -> np.ndarray | None:
        """What may come after the first row's new `tokens`, see `GrammarText.allowed`; None after no such text."""
        try:
            text = self._at(0, tokens)
            return None if text.has_ended else text.allowed()
        except ValueError:
            return None

    def num_allowed(self, tokens: Sequence[int], further: Sequence[int]) -> int:
        """
        How many `further` tokens the grammar allows after the first row's new `tokens`, one after the other.

        Raises:
            ValueError: if the grammar does not let the new tokens through.
        """
        return self._at(0, tokens).num_allowed(further)

    def _at(self, row: int, tokens: Sequence[int]) -> GrammarText | LateText:
        while row >= len(self._texts):
            self._texts.append(self._grammar.text())
        text = self._texts[row]
        text.follow(tokens)
        return text


def as_bools(bits: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Bits of tokens, `[bytes]` uint8, as `[1, vocab]` bool; False beyond the last bit."""
    if device.type == "cpu":
        allowed = torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).view(torch.bool)
        return allowed[None]
    packed = torch.from_numpy(bits.copy()).to(device)  # a copy: the bytes of llguidance are read-only
    allowed = ((packed[:, None] >> torch.arange(8, device=device, dtype=torch.uint8)) & 1).flatten().bool()
    missing = vocab_size - len(allowed)
    return torch.nn.functional.pad(allowed, (0, missing))[None]  # cuts it, if negative


def grammar_in(processors: Iterable[Any]) -> GrammarMask | None:
    """The mask among the processors of a row; None if there is none."""
    return next((one for one in processors if isinstance(one, GrammarMask)), None)
