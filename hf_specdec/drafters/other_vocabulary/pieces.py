"""What the tokens of a tokenizer stand for: bytes of text, or a special role."""

from __future__ import annotations

import codecs
import copy
import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that stands for a space in SentencePiece vocabularies."""
NUM_TRIED = 64
"""Pairs of tokens that are decoded to see that the bytes of a text are those of its tokens."""


class TokenPieces:
    """
    The tokens of a tokenizer as bytes. Works on a copy of the tokenizer's backend, so that neither changes the other.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): one of the `tokenizers` library.
        num_tokens (`int`): size of the model's vocabulary; tokens beyond it do not count.
        argument (`str`): name of the argument that gave the tokenizer, for errors.

    Raises:
        ValueError: if its tokens are not bytes of the text that follow one another (WordPiece, words).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int, argument: str):
        self._backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._is_byte_level = "ByteLevel" in _decoder_steps(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special = {token: entry.content for token, entry in added.items() if entry.special and token < num_tokens}
        """The names of special tokens."""
        self.special |= {
            token: self._backend.id_to_token(token) or ""
            for token in tokenizer.all_special_ids
            if token is not None and token < num_tokens
        }
        self.byte_tokens: dict[bytes, int] = {}
        """Tokens that stand for one byte each (`<0x41>`)."""
        self.pieces: list[bytes] = [b""] * num_tokens
        """The bytes of every token; none for special ones and unused rows of the vocabulary."""
        for name, token in self._backend.get_vocab(with_added_tokens=True).items():
            if token < num_tokens and token not in self.special:
                self.pieces[token] = name.encode() if token in added else self._bytes_of(name, token)
        self.tokens = self._by_bytes()
        """The token of every piece; of several with the same bytes the first, if any that is no `<0x41>`."""
        self.roles = {
            role: token
            for role in ("bos", "eos")
            if (token := getattr(tokenizer, f"{role}_token_id")) is not None and token < num_tokens
        }
        """The tokens that begin and end texts."""
        self.opening = self._opening()
        """The tokens that the tokenizer puts before a text."""
        self.begins_with_space = b"".join(self.pieces[token] for token in self.encode("a")) == b" a"
        """Whether the first token of a text stands for a space that is not there."""
        self._check_composition(tokenizer, argument)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones around it."""
        return [token for token in self._encode(text, False) if token < len(self.pieces)] if text else []

    def bytes_of(self, tokens: list[int]) -> bytes:
        """The bytes of some tokens, of which special ones have none."""
        return b"".join(self.pieces[token] for token in tokens if token < len(self.pieces))

    def _encode(self, text: str, with_special: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=with_special).ids

    def _bytes_of(self, name: str, token: int) -> bytes:
        if self._is_byte_level:
            known = all(character in _BYTES for character in name)
            return bytes(_BYTES[character] for character in name) if known else name.encode()
        if found := _BYTE.fullmatch(name):
            byte = bytes([int(found[1], 16)])
            self.byte_tokens[byte] = token
            return byte
        return name.replace(_SPACE, " ").encode()

    def _by_bytes(self) -> dict[bytes, int]:
        of_bytes = set(self.byte_tokens.values())
        found = {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if token not in of_bytes}
        found.pop(b"", None)
        return self.byte_tokens | found

    def _opening(self) -> list[int]:
        bare, whole = self.encode("a"), self._encode("a", True)
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[: next(starts, 0)]

    def _check_composition(self, tokenizer: PreTrainedTokenizerBase, argument: str) -> None:
        """Raises a `ValueError` if decoded tokens are not their bytes, one after the other."""
        ordinary = sorted(token for piece, token in self.tokens.items() if piece.isascii())
        some = ordinary[:: max(1, len(ordinary) // NUM_TRIED)]
        for pair in zip(some, some[1:] + some[:1], strict=True):
            text = tokenizer.decode(list(pair), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if str(text).lstrip(" ") != self.bytes_of(list(pair)).decode().lstrip(" "):
                raise ValueError(
                    f"`{argument}`: {type(tokenizer).__name__} decodes the tokens {pair[0]} and {pair[1]} to "
                    f"{text!r}, which is not their texts one after the other: what they share with another vocabulary "
                    "cannot be told. Use a draft model whose tokenizer has pieces of text (byte-level, "
                    "SentencePiece), or the target's."
                )


def check_kind(tokenizer: Any, argument: str) -> None:
    """Raises a `TypeError` for what is no tokenizer of the `tokenizers` library; `argument` names it."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TypeError(
            f"`{argument}` must be a fast tokenizer, whose vocabulary can be read, but is {type(tokenizer).__name__}. "
            "Load it with `AutoTokenizer`."
        )


def split_text(data: bytes) -> tuple[str, bytes]:
    """The text of some bytes, and the last bytes, if they are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _decoder_steps(backend: Any) -> set[str]:
    """Names of the steps of a tokenizer's decoder."""
    if backend.decoder is None:
        return set()
    try:
        state = json.loads(backend.decoder.__getstate__())
    except Exception:  # a decoder in Python, which cannot be written down; `_check_composition` tries what it does
        return set()
    return {step["type"] for step in state.get("decoders", [state])}


def _characters_of_bytes() -> dict[str, int]:
    """The bytes for which the characters of byte-level vocabularies stand: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _characters_of_bytes()
