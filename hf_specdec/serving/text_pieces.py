"""Text in pieces, as tokens come: joined, they are the text that all tokens at once are decoded to."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that bytes are decoded to which are no whole character."""
CONTEXT = 4
"""Fewest tokens decoded again before the next one: the first of a text may lose a space, or a part of a character."""
LEAST_CONTEXT = 4
"""Fewest characters of such tokens. A character has at most four bytes, so that the last one is whole."""
_OF_TOKENS = {"Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "ByteFallback"}
"""Steps of a decoder that look at one token after the other, or, for bytes, at a run of them."""
_OF_TEXT = {"Fuse", "ByteLevel"}
"""Steps that make one text of all tokens. After them only `Strip` and these can be followed."""
_MAY_BE_CLEANED = " 'nvr"
"""Last characters of all beginnings of what `clean_up_tokenization` replaces, such as "ve" after an apostrophe."""


class TextPieces:
    """
    Decodes a text token by token. After every token, the pieces so far and `rest()`, joined, equal
    `tokenizer.decode(tokens, skip_special_tokens=…)`, whatever the tokens are.

    A piece is told when no later token can change it. Of byte tokens (`<0xC3>`) a decoder makes characters only if the
    whole run of them is valid, so a run is told when it ends. Of byte-level tokens only the last character can change,
    if it is a replacement character. The texts of decoders that are not known to be of these kinds (own classes of
    tokenizers, a `Replace` over the whole text) are told at their end.

    A token costs the decoding of a few tokens before it, and of its run.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        skip_special_tokens (`bool`, *optional*, defaults to `False`): whether special tokens are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False):
        self._tokenizer, self._skips, self._is_local = tokenizer, skip_special_tokens, _is_local(tokenizer)
        self._window: list[int] = []
        """The last tokens: those that serve as context, and those that are not told."""
        self._run: list[int] = []
        """Byte tokens after them."""
        self._num_told = self._num_held = 0
        """Number of characters of the window's text that are told, and of those after them."""
        self._held = ""
        """Text that `clean_up_tokenization` may change with what follows."""
        if self._is_local:
            backend: Any = tokenizer.backend_tokenizer
            self._decode, self._name_of, self._cleans = backend.decode, backend.id_to_token, _cleans(tokenizer)
            added = backend.get_added_tokens_decoder() if skip_special_tokens else {}
            self._special = {token for token, entry in added.items() if entry.special}

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is newly known, which may be empty."""
        if not self._is_local:
            self._window.append(token)
            return ""
        piece = self._known_after(token)
        if not self._cleans:
            return piece
        text = self._held + piece
        end = len(text.rstrip(_MAY_BE_CLEANED))
        self._held = text[end:]
        return self._tokenizer.clean_up_tokenization(text[:end])

    def rest(self) -> str:
        """The text after the pieces so far, if no token follows. Changes nothing."""
        if not self._is_local:
            return str(self._tokenizer.decode(self._window, skip_special_tokens=self._skips))
        is_told = not self._run and not self._num_held
        text = "" if is_told else self._decode(self._window + self._run, self._skips)[self._num_told :]
        return self._tokenizer.clean_up_tokenization(self._held + text) if self._cleans else text

    @property
    def num_waiting(self) -> int:
        """Number of tokens, beside the last few, whose text is known only at the end."""
        return len(self._run) if self._is_local else len(self._window)

    def _known_after(self, token: int) -> str:
        name = self._name_of(token)
        if name is None or token in self._special:
            return ""  # neither a decoder sees it, nor does it end a run of bytes
        if name.startswith("<0x") and name.endswith(">"):
            self._run.append(token)
            return ""
        window, told = self._window, self._num_told
        window += self._run
        window.append(token)
        self._run.clear()
        text = self._decode(window, self._skips)
        end = self._num_told = _num_stable(text)
        self._num_held = len(text) - end
        count = CONTEXT
        while len(window) > 2 * count:
            context = self._decode(window[-count:], self._skips)
            if len(context) >= LEAST_CONTEXT:
                del window[:-count]
                self._num_told = _num_stable(context)
            count *= 4
        return text[told:end]


def _num_stable(text: str) -> int:
    """Number of a text's characters that later bytes do not change: the last one may be an unfinished one."""
    return len(text) - text.endswith(REPLACEMENT)


def _is_local(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer decodes in such steps that later tokens change nothing but the end of a text."""
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    own = ("decode", "_decode", "clean_up_tokenization")
    if not isinstance(tokenizer, fast) or any(getattr(kind, name) is not getattr(fast, name) for name in own):
        return False
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return True
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # a decoder in Python, which cannot be written down
        return False
    is_text = False
    for step in state["decoders"] if state["type"] == "Sequence" else [state]:
        kind = step["type"]
        if kind not in _OF_TEXT | _OF_TOKENS or (is_text and kind not in _OF_TEXT | {"Strip"}):
            return False
        is_text = is_text or kind in _OF_TEXT
    return True


def _cleans(tokenizer: Any) -> bool:
    """Whether `decode` removes spaces before punctuation, as transformers does if told to, but rarely for BPE."""
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe))
