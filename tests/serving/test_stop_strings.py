"""Stop strings of the server: found in what is generated, as soon as it is there, by little work."""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
from support.tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_specdec.serving.stop_strings import (
    LONGEST_STOP_STRING,
    MOST_STOP_STRINGS,
    StopStringCriterion,
    StopStringSearch,
    check_number_and_length,
    checked_stop_strings,
)
from hf_specdec.smollm2 import smollm2_folder


TEXT = "One two, three.\n\n  The cat's naïve 漢字テスト 🎉👩‍👩‍👧 end: größer größer ### done. "


def llama_like_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and pieces that begin with a space, which the first of a text loses; others are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *map(chr, range(33, 127)), *(f"▁{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def tokenizer_of(kind: str) -> Any:
    if kind == "smollm2":
        return AutoTokenizer.from_pretrained(smollm2_folder())
    return llama_like_tokenizer() if kind == "llama" else tiny_tokenizer()


def tokens_of(kind: str, seed: int) -> list[int]:
    """Of a text, or at random."""
    tokenizer, draws = tokenizer_of(kind), random.Random(seed)
    if kind == "tiny" or seed % 3 == 2:
        return [draws.randrange(3, len(tokenizer)) for _ in range(60)]
    words = TEXT.split(" ")
    text = " ".join(draws.choice(words) for _ in range(24))
    if kind == "smollm2":
        return tokenizer(text)["input_ids"]
    known = tokenizer.get_vocab()
    found = [known.get(letter.replace(" ", "▁")) for letter in text]
    bytes_of = [[known[f"<0x{byte:02X}>"] for byte in letter.encode()] for letter in text]
    return [token for one, many in zip(found, bytes_of, strict=True) for token in ([one] if one else many)]


def end_of(tokenizer: Any, tokens: list[int], stop: list[str]) -> int | None:
    """After how many tokens the text has one of the strings in it."""
    texts = (tokenizer.decode(tokens[: count + 1]).rstrip("\ufffd") for count in range(len(tokens)))
    return next((count for count, text in enumerate(texts, start=1) if any(one in text for one in stop)), None)


@pytest.mark.parametrize("kind", ["smollm2", "llama", "tiny"])
@pytest.mark.parametrize("seed", range(9))
def test_texts_end_where_the_string_does(kind: str, seed: int) -> None:
    """Decoded piece by piece as if all of it were decoded anew for every token."""
    tokenizer, tokens, draws = tokenizer_of(kind), tokens_of(kind, seed), random.Random(seed)
    whole, ends = tokenizer.decode(tokens), set()
    for _ in range(30):
        at = draws.randrange(len(whole))
        stop = [whole[at : at + draws.randrange(1, 12)], "nowhere"][:: draws.choice([1, -1])]
        if "\ufffd" in stop[0] + stop[1]:
            continue  # bytes that are no text
        criterion = StopStringCriterion(tokenizer, stop)
        found = next((count for count, token in enumerate(tokens, start=1) if criterion.ends_with(token)), None)
        assert found == end_of(tokenizer, tokens, stop), (stop, whole)
        ends.add(found)
    assert len(ends) > 1


def test_special_tokens_are_text() -> None:
    tokenizer = tokenizer_of("smollm2")
    tokens = tokenizer("one<|im_end|>\nuser")["input_ids"]
    criterion = StopStringCriterion(tokenizer, "<|im_end|>")
    assert [criterion.ends_with(token) for token in tokens][:2] == [False, True]


@pytest.mark.parametrize("stop", [["x" * 1024] * 4, ["x" * 512 + "y" + "x" * 511, "y" * 1000], ["xy", "yx"]])
def test_long_ones_cost_little(stop: list[str]) -> None:
    """Texts that nearly match, too: not the square of a length."""
    search, text = StopStringSearch(stop), "x" * 30_000
    before = time.perf_counter()
    told = "".join(search.feed(text[at : at + 3]) for at in range(0, len(text), 3))
    assert time.perf_counter() - before < 2.0
    assert search.has_ended == (stop[0] == "x" * 1024) and text.startswith(told)


@pytest.mark.parametrize("wrong", [5, {"a": 1}, ["a", 5], [None]])
def test_others_than_strings(wrong: Any) -> None:
    with pytest.raises(TypeError, match="`stop`.*list of strings"):
        checked_stop_strings(wrong)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["a"] * (MOST_STOP_STRINGS + 1), "4 strings, but has 5"),
        (["a", "b" * (LONGEST_STOP_STRING + 1)], "1024 characters, but .* has 1025"),
        (["a", ""], "empty"),
    ],
)
def test_too_many_or_too_long(wrong: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_number_and_length(checked_stop_strings(wrong))
