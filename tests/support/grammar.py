"""Small grammars, and the naive form of a grammar's mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LogitsProcessor, PreTrainedTokenizerFast


PIECES = ["<eos>", "a", "b", "c", "ab", "bc", "ca", "aa"]
"""The tokens of the models of `support.sampling`."""


JSON_PIECES = [
    "<pad>",
    "<eos>",
    *'{}[]",:-.\\ abcdefgnrtuls0123456789E',
    '":',
    '",',
    '{"',
    '"a',
    "tr",
    "ue",
    "null",
    "12",
    "\u010a",
]


def _tokenizer_of(pieces: list[str], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that encodes letter by letter, since there are no merges."""
    vocab = {piece.replace(" ", "\u0120"): token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **special)


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `PIECES`."""
    return _tokenizer_of(PIECES, pad_token="<eos>")


@cache
def json_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that can write JSON of few letters."""
    return _tokenizer_of(JSON_PIECES, pad_token="<pad>")


def chain(length: int, end: Any = None, **more: Any) -> dict[str, Any]:
    """A schema whose definitions refer to the next one each: two levels for each."""
    inner = {f"d{number}": {"type": "array", "items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(length)}
    return {"$defs": inner | {f"d{length}": end or {"type": "string"}}, "$ref": "#/$defs/d0"} | more


def rules(number: int, end: str = '"a"', form: str = "{}") -> str:
    """A Lark grammar whose rules name the next one each, in a form."""
    names = ["x" + "".join(chr(ord(digit) + 49) for digit in str(one)) for one in range(number)]
    return "start: " + "".join(f"{form.format(name)}\n{name}: " for name in names) + f"{end}\n"


class NaiveMask(LogitsProcessor):
    """The mask of a grammar, each time by a matcher that reads the whole text: a copy of one that has read nothing."""

    def __init__(self, grammar: str, tokenizer: Any, start: int, ends: list[int], vocab_size: int):
        self.matcher = LLMatcher(from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends), grammar, log_level=0)
        self.start, self.ends = start, ends

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        masked = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(input_ids[:, self.start :].tolist()):
            matcher = self.matcher.deep_copy()
            if any(end in text for end in self.ends) or not matcher.consume_tokens(text):
                masked[row] = scores[row]  # padding after the end, or a text of probability 0
                continue
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            assert not matcher.is_error()
            allowed = np.flatnonzero(bits)
            allowed = torch.from_numpy(allowed[allowed < scores.shape[1]])
            masked[row, allowed] = scores[row, allowed]
        return masked
