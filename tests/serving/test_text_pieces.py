"""Pieces of text: whatever tokens come, they join to the text that all of them are decoded to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from hf_specdec.serving.text_pieces import CONTEXT, TextPieces


SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [*"aés'字🌳�\n", "▁", "▁▁", "▁the", "▁漢", "▁.", "▁'", "<0x", "▁n", "ve", "ver", "▁'s"]


def byte_level() -> Tokenizer:
    """A token for every byte, and some of several, of which some begin or end within a character (GPT-2, Llama-3)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["Ġt", "he", "Ã©", "ðŁ", "ĮĲ", "çŃ", "¼a", "ĠðŁĮ"]
    vocab = {piece: token for token, piece in enumerate([*SPECIAL, *letters, *merged])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback(*more: Any) -> Tokenizer:
    """Words, and bytes for what is no word (Gemma)."""
    vocab = {piece: token for token, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's own (T5, XLM-RoBERTa)."""
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in [*SPECIAL, *WORDS]], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def of_words(model: type, decoder: Any = None) -> Tokenizer:
    pieces = [*SPECIAL, "the", "tree", ".", "'", "s", "##s", "##ing", "n't", "&", "foo</w>", "bar</w>", "do", "n", "�"]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(model(vocab=vocab, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


class Backwards:
    """A decoder of which nobody can know the text before its end."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens[::-1]


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback, Llama": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
    "unigram": unigram,
    "unigram, cleaned": unigram,
    "word-piece": lambda: of_words(WordPiece, decoders.WordPiece()),
    "word-piece, cleaned": lambda: of_words(WordPiece, decoders.WordPiece(cleanup=False)),
    "words that end": lambda: of_words(WordLevel, decoders.BPEDecoder()),
    "words": lambda: of_words(WordLevel),
    "no repetitions": lambda: of_words(WordLevel, decoders.CTC("&", "the")),
    "whole: replaced": lambda: byte_fallback(decoders.Replace(Regex(r"\s+"), " ")),
    "whole: own": lambda: of_words(WordLevel),
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = BACKENDS[kind]()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>"), AddedToken("größer")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=kind.endswith("cleaned"),
    )
    if kind == "whole: own":  # a tokenizer with a decoder in Python cannot be copied, so that it comes later
        tokenizer.backend_tokenizer.decoder = decoders.Decoder.custom(Backwards())
    return tokenizer


def assert_pieces_join(tokenizer: Any, tokens: list[int], skips: bool) -> None:
    """After every token, as if all before were decoded anew."""
    pieces, told = TextPieces(tokenizer, skips), ""
    for count, token in enumerate(tokens, start=1):
        told += pieces.add(token)
        assert told + pieces.rest() == tokenizer.decode(tokens[:count], skip_special_tokens=skips)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=40)
@given(data=st.data(), skips=st.booleans())
def test_pieces_join_to_the_text(kind: str, data: st.DataObject, skips: bool) -> None:
    """Of any tokens: broken characters, special tokens within them, and ids that name nothing."""
    tokenizer = tokenizer_of(kind)
    some = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), min_size=1, max_size=6))
    any_of = st.one_of(st.sampled_from(some), st.integers(0, len(tokenizer) + 2))
    assert_pieces_join(tokenizer, data.draw(st.lists(any_of, max_size=12 * CONTEXT)), skips)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "byte-fallback, Llama"])
@settings(max_examples=40)
@given(data=st.data())
def test_bytes_join_to_the_text(kind: str, data: st.DataObject) -> None:
    """Of characters as bytes, some of which are missing or stray."""
    tokenizer = tokenizer_of(kind)
    written = data.draw(st.text(st.sampled_from("aé漢🌳 \n�"), max_size=8 * CONTEXT)).encode()
    stray = data.draw(st.sets(st.integers(0, max(len(written) - 1, 0)), max_size=6))
    found = [byte if place not in stray else data.draw(st.integers(128, 255)) for place, byte in enumerate(written)]
    found = found[: data.draw(st.integers(0, len(found)))]
    names = BYTES if kind != "byte-level" else _byte_level_names()
    tokens = [tokenizer.convert_tokens_to_ids(names[byte]) for byte in found]
    assert_pieces_join(tokenizer, tokens, False)


@cache
def _byte_level_names() -> list[str]:
    """The letter for each byte, as in GPT-2: the printable ones stand for themselves, others come after Latin-1."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)]


@pytest.mark.parametrize(
    "kind, names, text",
    [
        ("byte-fallback", ["<0xC3>", "<0xBC>", "<0x9B>", "a"], "���a"),
        ("byte-fallback", ["a", "<0xF0>", "<0x9F>"], "a��"),
        ("byte-level", ["a", "ðŁ"], "a�"),
    ],
)
def test_what_ended_streams(kind: str, names: list[str], text: str) -> None:
    """A stray byte after a character, and a text cut within one."""
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.convert_tokens_to_ids(names)
    assert_pieces_join(tokenizer, tokens, True)
    assert tokenizer.decode(tokens) == text


def test_pieces_come_at_once() -> None:
    """Of words and whole characters; runs of bytes when they end; what may yet change, later."""
    for kind, names, expected in (
        ("byte-fallback, Llama", ["▁the", "▁漢", "<0xC3>", "<0xBC>", "a", "▁"], ["the", " 漢", "", "", "üa", " "]),
        ("byte-level", ["Ġt", "he", "ðŁ", "ĮĲ", "a", "Ã©"], [" t", "he", "", "🌐", "a", "é"]),
        ("unigram", ["▁the", "▁漢", "字"], ["the", " 漢", "字"]),
        ("word-piece, cleaned", ["the", "tree", "."], ["the", " tree", "."]),
        ("whole: own", ["the", "tree"], ["", ""]),
    ):
        tokenizer = tokenizer_of(kind)
        pieces = TextPieces(tokenizer)
        assert [pieces.add(token) for token in tokenizer.convert_tokens_to_ids(names)] == expected, kind


@pytest.mark.parametrize(
    "kind, names",
    [
        ("byte-level", ["Ġt", "he", "ðŁ", "ĮĲ"]),
        ("byte-level", list("ðŁĮĲ")),
        ("byte-fallback, Llama", ["▁the", "<0xC3>", "<0xBC>", "a"]),
        ("unigram, cleaned", ["▁the", "a", "▁", "▁'"]),
    ],
    ids=["byte-level", "bytes", "byte-fallback", "unigram"],
)
def test_long_texts_cost_little(kind: str, names: list[str]) -> None:
    """A token costs the same at any place, even if there are as many as bytes."""
    tokenizer = tokenizer_of(kind)
    pieces, told, counts = TextPieces(tokenizer), "", []
    tokens = tokenizer.convert_tokens_to_ids(names) * 500
    decode = pieces._decode

    def counted(ids: list[int], skips: bool) -> str:
        counts.append(len(ids))
        return decode(ids, skips)

    pieces._decode = counted
    told = "".join([pieces.add(token) for token in tokens]) + pieces.rest()
    assert told == tokenizer.decode(tokens)
    assert max(counts) < 16 * CONTEXT and sum(counts) < 30 * len(tokens)
