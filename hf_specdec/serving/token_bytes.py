"""The bytes that each token of a vocabulary stands for, which need not be whole characters."""

from __future__ import annotations

import json
import re
import weakref
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte that each character stands for in the names of byte-level tokens."""


class TokenBytes:
    """
    The bytes of tokens, kept for later ones. Those of a text's tokens, joined, are what the text is decoded from.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer: Any = tokenizer
        steps = _steps_of_decoder(tokenizer)
        self._is_byte_level, self._has_bytes = "ByteLevel" in steps, "ByteFallback" in steps
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes of a token in the midst of a text; none for one that the tokenizer does not know."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._found(token)
        return found

    def of_first(self, token: int) -> bytes:
        """The bytes of a token with which a text begins: a decoder may leave out the space before it."""
        found = self.of(token)
        is_cut = found.startswith(b" ") and not self._is_byte_level
        return self._decoded([token]).encode() if is_cut else found

    def _found(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._is_byte_level:
            is_known = all(character in _BYTE_OF for character in name)
            return bytes(_BYTE_OF[character] for character in name) if is_known else str(name).encode()
        byte = _BYTE.fullmatch(name) if self._has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        alone, twice = self._decoded([token]), self._decoded([token, token])
        return (twice.removeprefix(alone) if twice.startswith(alone) else alone).encode()

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


_known: weakref.WeakKeyDictionary[Any, TokenBytes] = weakref.WeakKeyDictionary()


def token_bytes_of(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """The bytes of a tokenizer's tokens, made once for each tokenizer."""
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = TokenBytes(tokenizer)
    return found


def _steps_of_decoder(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The kinds of steps of a tokenizer's decoder; none of one in Python."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return set()
    decoder = tokenizer.backend_tokenizer.decoder
    try:
        state = {} if decoder is None else json.loads(decoder.__getstate__())
    except Exception:  # a decoder in Python, which cannot be written down
        return set()
    return {step["type"] for step in state.get("decoders", [state] if state else [])}
