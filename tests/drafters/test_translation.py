"""Draft models of another tokenizer: tokens that match, contexts, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.batches import text_alone
from support.hybrids import hybrid
from support.models import tiny_model
from support.other_vocabulary import (
    FEW_SHARED,
    MANY_SHARED,
    TARGET,
    byte_level,
    call_of,
    context_of,
    draft_of,
    draft_with_spaces,
    drafter_of,
    pieces_with_spaces,
    target_tokenizer,
    translation_of,
)
from support.sampling import PROMPT, the_target
from support.tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import NgramDraft, TokenTree
from hf_specdec.batching.keeping import keep, let_go
from hf_specdec.drafters import reading
from hf_specdec.drafters.other_vocabulary import (
    SharedTokensDrafter,
    Translation,
    WrittenTextDrafter,
    texts,
)
from hf_specdec.drafters.other_vocabulary.texts import DraftText


# ------------------------------------------------------------------------------------------------ matches and contexts


def named(translation: Translation, tokenizers: tuple[Any, Any]) -> dict[str, str]:
    """The names of shared tokens, the target's and the draft's."""
    pairs = zip(translation.target_tokens.tolist(), translation.draft_tokens.tolist(), strict=True)
    mine, its = tokenizers
    return {mine.convert_ids_to_tokens(one): its.convert_ids_to_tokens(other) for one, other in pairs}


def test_shared_tokens() -> None:
    """By their bytes, special ones by role; each with one token."""
    translation = translation_of(MANY_SHARED)
    names = named(translation, (target_tokenizer(), draft_of(MANY_SHARED)[1]))
    assert names == {"a": "a", "b": "b", "c": "c", "ab": "ab", "<bos>": "<s>", "<eos>": "</s>"}
    assert translation.share_of_vocabulary == 4 / 6


def test_the_first_call_says_how_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("hf_specdec.drafters.other_vocabulary.logger.info_once", said.append)
    drafters = [drafter_of(MANY_SHARED), drafter_of(FEW_SHARED)]
    assert [type(drafter) for drafter in drafters] == [SharedTokensDrafter, WrittenTextDrafter]
    assert (
        "drafts in the tokens that it shares with the target: it has 4 of the target's 6 tokens (67% of its vocabulary"
        in said[0]
    )
    assert "drafts in texts: it has 2 of the target's 6 tokens (33%" in said[1]


def test_tokens_are_shared_by_their_bytes() -> None:
    """Byte-level against `▁` and `<0xNN>`. Of two tokens for one byte the first is no `<0xNN>`."""
    tokenizers = tiny_tokenizer(), pieces_with_spaces()
    translation = Translation.of(tiny_model(), draft_with_spaces(), *tokenizers)
    names = named(translation, tokenizers)
    assert names["a"] == "a" and names["Ġaa"] == "▁aa" and names["Ġ"] == "▁"
    assert names["Ċ"] == "<0x0A>" and names["."] == "<0x2E>"
    assert names["<unk>"] == "<unk>" and names["<eos>"] == "</s>"
    assert "ab" not in names and "Ġzz" not in names
    assert len(names) == len(set(names.values()))


@pytest.mark.parametrize(
    "text, tokens",
    [("abc", ["a", "bc"]), ("abb", ["ab", "b"]), ("bcab", ["bc", "ab"]), ("d", []), ("", ["</s>"])],
)
def test_contexts_are_encoded_anew(text: str, tokens: list[str]) -> None:
    """Whatever the target's own tokens are."""
    translation, tokenizer = translation_of(MANY_SHARED), draft_of(MANY_SHARED)[1]
    ids = [TARGET.index(letter) for letter in text]
    before = [] if text else [2]
    found = context_of(translation, before + ids)
    assert tokenizer.convert_ids_to_tokens(found) == (tokens or ["<s>"])


@pytest.mark.parametrize("to_spaces", [True, False])
def test_contexts_are_those_of_the_text_alone(to_spaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it has grown; and pieces that end before words have the tokens of the whole text."""
    tokenizers = tiny_tokenizer(), pieces_with_spaces()
    models = tiny_model(), draft_with_spaces()
    if not to_spaces:
        tokenizers, models = tokenizers[::-1], models[::-1]
    translation = Translation.of(*models, *tokenizers)
    words = "aa bb ab\n cc éa  ba." + 9 * "é"
    tokens = tokenizers[0](words * 3, add_special_tokens=False).input_ids + [tokenizers[0].eos_token_id]
    tokens += tokenizers[0](words, add_special_tokens=False).input_ids
    whole = context_of(translation, tokens)
    monkeypatch.setattr(texts, "LEAST_PIECE", 7)
    for most in (12, 4096):
        monkeypatch.setattr(texts, "MOST_PIECE", most)
        of_pieces = context_of(translation, tokens)
        assert (of_pieces == whole) if most > 12 or not to_spaces else (of_pieces != whole)
        for seed in range(5):
            text, chooser, start = DraftText(translation), random.Random(seed), 0
            while start < len(tokens):
                end = start + chooser.randint(1, 6)
                before = text.tokens
                same = text.read(tokens[start:end])
                assert text.tokens[:same] == before[:same] and text.tokens == context_of(translation, tokens[:end])
                start = end
            assert text.tokens == of_pieces and text.num_read == len(tokens)


def test_contexts_with_spaces_and_parts_of_characters() -> None:
    """The draft's tokenizer adds its own space in front; the bytes of an unfinished character are byte tokens."""
    target, draft = byte_level(["a", "Ġ", "Ã", "©", "<e>"], "<e>", "<e>"), pieces_with_spaces()
    translation = Translation.of(tiny_model(vocab_size=5), draft_with_spaces(), target, draft)
    assert draft.convert_ids_to_tokens(context_of(translation, [0, 1, 0])) == ["▁a", "▁a"]
    assert draft.convert_ids_to_tokens(context_of(translation, [0, 2])) == ["▁a", "<0xC3>"]
    assert draft.convert_ids_to_tokens(context_of(translation, [0, 2, 3])) == ["▁a", "<0xC3>", "<0xA9>"]
    backwards = Translation.of(draft_with_spaces(), tiny_model(vocab_size=5), draft, target)
    assert target.convert_ids_to_tokens(context_of(backwards, draft("a a").input_ids)) == ["a", "Ġ", "a"]


def test_written_texts() -> None:
    translation, tokenizer = translation_of(FEW_SHARED), draft_of(FEW_SHARED)[1]

    def written(text: str, pieces: list[str]) -> list[str]:
        ids = [TARGET.index(letter) for letter in text]
        return [TARGET[token] for token in translation.written(ids, tokenizer.convert_tokens_to_ids(pieces))]

    assert written("a", ["ca", "bd"]) == ["c", "ab", "d"]
    assert written("c", ["dc", "</s>", "ca"]) == ["d", "c", "<eos>"]
    assert written("a", ["b"]) == ["b"]  # not ab, whose beginning is written


def test_one_vocabulary_needs_no_translation() -> None:
    target = the_target()
    assert reading(target, target, target_tokenizer(), byte_level(TARGET, "<bos>", "<eos>")) is target
    text = target.generate(
        **PROMPT,
        assistant_model=target,
        tokenizer=target_tokenizer(),
        assistant_tokenizer=byte_level(TARGET, "<bos>", "<eos>"),
        tree=TokenTree.chain(3),
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=None,
    )
    metrics = hf_specdec.last_metrics()
    assert text.shape[1] == 13 and metrics.num_accepted_tokens == 6 == metrics.num_draft_tokens


def test_a_kept_manager_serves_the_next_call() -> None:
    target, call = the_target(), call_of(MANY_SHARED)
    options: dict[str, Any] = {"tree": "[(0,)]", "max_new_tokens": 4, "do_sample": False, "persistent_manager": True}
    try:
        target.generate_batch([[5, 6]], **call, **options)
        keep(first := let_go(target))
        outputs = target.generate_batch([[5, 6]], **call, **options)
        assert let_go(target) is first
    finally:
        target.destroy_cached_continuous_batching_manager()
    assert next(iter(outputs.values())).generated_tokens == text_alone(target, [5, 6], max_new_tokens=4)


def test_managers_take_tokenizers() -> None:
    manager = the_target().init_continuous_batching(**call_of(MANY_SHARED), tree="[(0,)]")
    assert isinstance(manager.engine.drafting.drafter, SharedTokensDrafter)


# ----------------------------------------------------------------------------------------------------------- refusals


def word_pieces() -> PreTrainedTokenizerFast:
    vocab = {piece: token for token, piece in enumerate(["[UNK]", "a", "##a", "b", "##b", "c", "d"])}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "shares nothing": (
        {"assistant_tokenizer": byte_level(["x", "<s>", "</s>", "y"], "<s>", "</s>")},
        ("`assistant_tokenizer`", "share no text", "Use a draft model whose vocabulary"),
    ),
    "no tokenizer": ({"tokenizer": None}, ("`assistant_tokenizer` without `tokenizer`", "Pass `tokenizer=`")),
    "a drafter": ({"assistant_model": NgramDraft()}, ("`assistant_tokenizer` with NgramDraft", "Leave")),
    "words": ({"assistant_tokenizer": word_pieces()}, ("`assistant_tokenizer`", "decodes the tokens", "byte-level")),
    "slow": ({"assistant_tokenizer": object()}, ("`assistant_tokenizer`", "fast tokenizer", "object")),
    "states": (
        {"assistant_model": "mamba2"},
        ("`assistant_tokenizer`", "Mamba2ForCausalLM", "recurrent states"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changed, words = REFUSED[name]
    call = call_of(MANY_SHARED) | changed
    if isinstance(call["assistant_model"], str):
        call["assistant_model"] = hybrid(call["assistant_model"])
    target = the_target()
    for run in (
        lambda: target.generate(**PROMPT, **call, tree="[(0,)]", max_new_tokens=4),
        lambda: target.generate_batch([[5, 6]], **call, tree="[(0,)]", max_new_tokens=4),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            run()
        for part in words:
            assert part in str(caught.value)
