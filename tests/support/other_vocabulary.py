"""Tokenizers of other vocabularies, and tiny drafts that read them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specdec.drafters import reading
from hf_specdec.drafters.other_vocabulary import Translation
from hf_specdec.drafters.other_vocabulary.texts import DraftText

from .models import tiny_model
from .sampling import small_model, the_target


TARGET = ["a", "<bos>", "<eos>", "b", "c", "ab", "d", "da"]
"""Of the target with 8 tokens."""
MANY_SHARED = ("b", "<s>", "</s>", "c", "a", "bc", "e", "cc", "ab", "ca", "aa")
"""Of the target's texts the draft has a, b, c and ab; in texts that are encoded anew it has others, too."""
FEW_SHARED = ("b", "<s>", "</s>", "cc", "ca", "dc", "bd", "c", "aa")
"""Of the target's six texts the draft has two."""


def byte_level(pieces: Sequence[str], bos: str, eos: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of some pieces, with a merge for each of two letters."""
    merges = [(piece[0], piece[1]) for piece in pieces if len(piece) == 2 and {*piece} <= {*pieces}]
    tokenizer = Tokenizer(BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


@cache
def target_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(TARGET, "<bos>", "<eos>")


@cache
def draft_of(pieces: tuple[str, ...]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random draft of some pieces, and its tokenizer."""
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return small_model(seed=50, vocab_size=len(pieces), **ids), byte_level(pieces, "<s>", "</s>")


@cache
def pieces_with_spaces() -> PreTrainedTokenizerFast:
    """A tokenizer as of Llama 2: `▁` for a space, one of which begins every text, and a token for each byte."""
    special = ["<unk>", "<s>", "</s>"]
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    letters = list(string.ascii_lowercase)
    pairs = [space + letter for letter in letters] + [space + 2 * letter for letter in letters[:20]]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), space, *letters, *pairs, "ba"]
    merges = [(space, letter) for letter in letters] + [(space + letter, letter) for letter in letters[:20]]
    model = BPE({piece: token for token, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def draft_with_spaces() -> PreTrainedModel:
    """A tiny draft for `pieces_with_spaces`."""
    return tiny_model(vocab_size=len(pieces_with_spaces()), seed=3, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def call_of(pieces: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that name a draft and the tokenizers."""
    draft, tokenizer = draft_of(pieces)
    return {"assistant_model": draft, "tokenizer": target_tokenizer(), "assistant_tokenizer": tokenizer}


def drafter_of(pieces: tuple[str, ...]) -> Any:
    call = call_of(pieces)
    return reading(call["assistant_model"], the_target(), call["tokenizer"], call["assistant_tokenizer"])


def translation_of(pieces: tuple[str, ...]) -> Translation:
    return drafter_of(pieces).translation


def context_of(translation: Translation, tokens: list[int]) -> list[int]:
    text = DraftText(translation)
    text.read(tokens)
    return text.tokens
