"""
Sampled `generate` with speculation against the exactly enumerated distribution of its next four tokens: the first
comes from the prefill, three from trees. Every way of drafting with every verification, good and bad drafts, and
processors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, FrequencyPenalty, combine, enumerate_tokens, fit, fit_counts, sample_tokens
from support.models import noisy_copy
from support.sampling import (
    ALL_SETTINGS,
    BY_ROW,
    LENGTH,
    METHODS,
    PADDED,
    PROMPT,
    ROWS,
    SETTINGS,
    TREE,
    VOCAB,
    a_draft,
    a_head,
    error_of_p,
    expected_tokens,
    fit_samples,
    rows_of,
    small_model,
    the_target,
)
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec import DraftTree, NgramDraft, SpeculativeConfig, TokenTree, last_metrics


def _check(
    config: SpeculativeConfig | None,
    assistant: Any,
    setting: str,
    rows: int | None = None,
    detectable: float | None = None,
) -> None:
    found = fit_samples(config, assistant, setting, rows)
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < (detectable or (0.2 if rows_of(setting) == ROWS else 0.26))
    assert last_metrics().num_accepted_tokens > 0


# --------------------------------------------------------------------------------------------------------- the harness


@pytest.mark.parametrize("setting", ["plain", "repetition", "custom", "all at once"])
def test_plain_generate_fits_the_enumeration(setting: str):
    tokens = sample_tokens(the_target(), PROMPT, 4 * ROWS, LENGTH, **ALL_SETTINGS[setting])
    assert fit(tokens[0], expected_tokens(setting)).p_value > SIGNIFICANCE


def test_a_slightly_wrong_distribution_does_not_fit():
    tokens = sample_tokens(the_target(), PROMPT, ROWS, LENGTH, temperature=0.8)
    found = fit(tokens[0], expected_tokens("plain"))
    truth = (
        expected_tokens("plain") - enumerate_tokens(the_target(), PROMPT, LENGTH, temperature=0.8)
    ).abs().sum() / 2
    assert found.p_value < 1e-6
    assert truth < 0.2


@torch.no_grad()
def test_enumeration_by_processors_applied_by_hand():
    """
    Another way to the same numbers: each prefix alone through the model, then through the processors, one by one.
    """
    lists = {
        "temperature": [TemperatureLogitsWarper(0.7)],
        "top-k": [TopKLogitsWarper(5)],
        "top-p": [TopPLogitsWarper(0.8)],
        "repetition": [RepetitionPenaltyLogitsProcessor(1.3)],
        "min-p": [MinPLogitsWarper(0.1)],
        "no repeated pair": [NoRepeatNGramLogitsProcessor(2)],
        "custom": [FrequencyPenalty(1.5)],
    }
    for setting, processors in lists.items():
        expected = expected_tokens(setting)
        for text in ([], [5], [3, 5], [2, 6, 2]):
            ids = torch.cat([PROMPT["input_ids"], torch.tensor([text], dtype=torch.long)], dim=1)
            scores = the_target()(ids).logits[:, -1].float()
            for processor in processors:
                scores = processor(ids, scores)
            given = expected[tuple(text)]
            if given.sum() > 0:
                conditional = given.reshape(VOCAB, -1).sum(dim=1) / given.sum()
                torch.testing.assert_close(conditional, scores[0].double().softmax(-1), atol=1e-5, rtol=1e-4)


# -------------------------------------------------------------------------------------------- every method and setting


@pytest.mark.parametrize(
    "method, draft, setting",
    [
        *((method, "noisy", setting) for method in METHODS for setting in ("plain", "custom")),
        ("target, best tokens", "noisy", "temperature"),
        ("target, re-ranked", "noisy", "top-k"),
        ("target, drawn", "noisy", "repetition"),
        ("target, drawn", "other", "top-p"),
        ("rejection, chain", "noisy", "top-p"),
        ("rejection, irregular", "noisy", "repetition"),
        ("rejection, irregular", "other", "top-k"),
        ("rejection, budgets", "noisy", "temperature"),
    ],
)
def test_draft_models(method: str, draft: str, setting: str):
    """
    Every method without processors and with one that is called row by row; every setting with both verifications.
    `test_draft_models_strongly` takes all pairs, and so does `error_of_p` below, without sampling.
    """
    _check(METHODS[method], a_draft(draft), setting)


@pytest.mark.parametrize(
    "method, setting",
    [
        ("target, best tokens", "min-p"),
        ("rejection, irregular", "low temperature"),
        ("rejection, irregular", "no repeated pair"),
        ("target, best tokens", "strong repetition"),
        ("rejection, irregular", "all at once"),
    ],
)
def test_more_settings(method: str, setting: str):
    _check(METHODS[method], a_draft("noisy"), setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_ngrams(setting: str):
    _check(SpeculativeConfig(tree=NgramDraft.default_tree), NgramDraft(max_ngram=2, min_ngram=1), setting)


@pytest.mark.smoke
@pytest.mark.parametrize("setting", ["plain", "custom"])
def test_ngrams_in_a_static_tree(setting: str):
    _check(SpeculativeConfig(tree=TREE), NgramDraft(max_ngram=2, min_ngram=1), setting)


@pytest.mark.parametrize(
    "method, draft_vocab_size, setting",
    [
        *((method, None, "plain") for method in METHODS),
        *((method, 5, "top-k") for method in METHODS),
        ("target, best tokens", None, "custom"),
        ("rejection, irregular", 5, "custom"),
        ("rejection, budgets", 5, "custom"),
    ],
)
def test_heads(method: str, draft_vocab_size: int | None, setting: str):
    _check(METHODS[method], a_head(draft_vocab_size), setting)


@pytest.mark.parametrize(
    "method, assistant, draft_temperature",
    [
        ("rejection, irregular", "noisy", 0.3),
        ("rejection, irregular", "head", 2.0),
        ("rejection, budgets", "noisy", 2.0),
        ("rejection, budgets", "head", 0.3),
        ("target, drawn", "noisy", 0.3),
        ("target, drawn", "head", 2.0),
    ],
)
def test_any_draft_temperature_is_exact(method: str, assistant: str, draft_temperature: float):
    config = replace(METHODS[method], draft_temperature=draft_temperature)
    _check(config, a_head(5) if assistant == "head" else a_draft(assistant), "top-k")


def test_a_draft_vocabulary_that_is_forgotten_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    """q is over the draft vocabulary; to take its columns for the target's tokens biases the output."""

    def in_vocabulary(draft: DraftTree, vocabulary: torch.Tensor, vocab_size: int) -> DraftTree:
        scores = torch.nn.functional.pad(draft.scores, (0, vocab_size - len(vocabulary)), value=-torch.inf)
        return replace(draft, tokens=vocabulary[draft.tokens], scores=scores)

    monkeypatch.setattr(DraftTree, "in_vocabulary", in_vocabulary)
    assert fit_samples(METHODS["rejection, irregular"], a_head(5), "plain").p_value < 1e-6


def strongly(setting: str) -> dict[str, Any]:
    """Many rows; fewer where processors are called row by row, which took a minute and more for each method."""
    return {"rows": 4_000, "detectable": 0.15} if setting in BY_ROW else {"rows": 10_000, "detectable": 0.09}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", ["noisy", "other"])
@pytest.mark.parametrize("method", METHODS)
def test_draft_models_strongly(method: str, draft: str, setting: str):
    _check(METHODS[method], a_draft(draft), setting, **strongly(setting))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("tree", [NgramDraft.default_tree, TREE], ids=["default tree", "static tree"])
def test_ngrams_strongly(tree: TokenTree | None, setting: str):
    _check(SpeculativeConfig(tree=tree), NgramDraft(max_ngram=2, min_ngram=1), setting, **strongly(setting))


# ---------------------------------------------------------------------------- p itself, to the last digit but rounding


@pytest.mark.parametrize(
    "method, setting, padded",
    [
        pytest.param(method, setting, padded, id=f"{method}-{setting}-{'left padding' if padded else 'one prompt'}")
        for place, method in enumerate(METHODS)
        for number, setting in enumerate(ALL_SETTINGS)
        for padded in [(place + number) % 2 == 1]  # in turn, for each method and for each setting
    ],
)
def test_every_token_is_drawn_from_p_after_its_own_history(method: str, setting: str, padded: bool):
    assert error_of_p(METHODS[method], a_draft("noisy"), setting, padded) < 1e-5


# ------------------------------------------------------------------------------------------------ batches with padding


@pytest.mark.parametrize(
    "method, setting",
    list(zip(METHODS, ["repetition", "custom"] * 3, strict=True)),
)
def test_left_padding(method: str, setting: str):
    tokens = sample_tokens(
        the_target(),
        PADDED,
        rows=160,
        length=LENGTH,
        assistant_model=a_draft("noisy"),
        speculative_config=METHODS[method],
        **SETTINGS[setting],
    )
    found = combine(fit(texts, expected_tokens(setting, prompt)) for prompt, texts in enumerate(tokens))
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.34


# ---------------------------------------------------------------------------------------------------------- batch of 1


class _NotTheLast(LogitsProcessor):
    """Lowers the score of the last token: with a Markov target the text is still a Markov chain."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.scatter_add(1, input_ids[:, -1:], torch.full_like(scores[:, :1], -3.0))


@cache
def _markov_target() -> PreTrainedModel:
    """A model that forgets everything but the last token, so that one long text holds many samples."""
    model = small_model(seed=0, max_position_embeddings=65_536)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    return model


def _check_long_text(method: str, processors: list[LogitsProcessor], length: int, detectable: float) -> None:
    target = _markov_target()
    torch.manual_seed(0)
    text = target.generate(
        torch.tensor([[5, 3]]),
        attention_mask=torch.ones(1, 2, dtype=torch.long),
        logits_processor=LogitsProcessorList(processors),
        assistant_model=noisy_copy(target, noise=0.4),
        speculative_config=METHODS[method],
        do_sample=True,
        top_k=0,
        max_new_tokens=length,
    )[0, 1:]
    fits = []
    for token in range(VOCAB):
        last = torch.tensor([[token]])
        with torch.no_grad():
            scores = LogitsProcessorList(processors)(last, target(last).logits[:, -1].float())
        followers = torch.bincount(text[1:][text[:-1] == token], minlength=VOCAB)
        if followers.sum() >= 20:
            fits.append(fit_counts(followers.numpy(), scores[0].double().softmax(-1).numpy()))
    found = combine(fits)
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < detectable
    assert last_metrics().num_accepted_tokens > length / 20


@pytest.mark.parametrize(
    "method, processors",
    [
        pytest.param("target, best tokens", [], id="target, best tokens-plain"),
        pytest.param("rejection, irregular", [_NotTheLast()], id="rejection, irregular-custom"),
        pytest.param("rejection, budgets", [], id="rejection, budgets-plain"),
    ],
)
def test_one_long_text(method: str, processors: list[LogitsProcessor]):
    _check_long_text(method, processors, length=600, detectable=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("processors", [[], [_NotTheLast()]], ids=["plain", "custom"])
@pytest.mark.parametrize("method", METHODS)
def test_one_very_long_text(method: str, processors: list[LogitsProcessor]):
    _check_long_text(method, processors, length=5_000, detectable=0.071)


# ----------------------------------------------------------------------------------------------------- ends and limits


@pytest.mark.parametrize("method", ["target, best tokens", "rejection, irregular", "rejection, budgets"])
def test_texts_that_end(method: str):
    """An end token on an accepted path ends the text there, and what follows is padding."""
    end = 5
    expected = torch.zeros_like(expected_tokens("plain"))
    for text in torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH).tolist():
        cut = text[: text.index(end) + 1] if end in text else text
        expected[tuple(cut + [0] * (LENGTH - len(cut)))] += expected_tokens("plain")[tuple(text)]
    tokens = sample_tokens(
        the_target(),
        PROMPT,
        ROWS,
        LENGTH,
        assistant_model=a_draft("noisy"),
        speculative_config=METHODS[method],
        eos_token_id=end,
        pad_token_id=0,
    )
    assert fit(tokens[0], expected).p_value > SIGNIFICANCE


@pytest.mark.parametrize("setting", ["plain", "temperature", "top-k", "top-p", "min-p", "low temperature"])
@pytest.mark.parametrize("tree", [TokenTree.chain(1), TREE], ids=["chain of one", "tree"])
def test_a_draft_that_is_the_target_is_always_accepted(tree: TokenTree, setting: str):
    """p is q: the first child of every node passes, so a step gets as deep as it may."""
    torch.manual_seed(0)
    the_target().generate(
        **{name: values.expand(200, -1) for name, values in PROMPT.items()},
        **({"top_k": 0} | ALL_SETTINGS[setting]),
        assistant_model=a_draft("itself"),
        tree=tree,
        do_sample=True,
        max_new_tokens=2 + tree.depth,
    )
    assert last_metrics().accepted_per_step == [[tree.depth]] * 200


@pytest.mark.parametrize("setting", ["top-p", "repetition", "custom"])
def test_a_chain_of_one_equals_plain_sampling(setting: str):
    _check(SpeculativeConfig(tree=TokenTree.chain(1)), a_draft("itself"), setting)


def test_a_sampled_run_accepts_more_with_the_better_draft_and_with_rejection():
    accepted = {}
    for draft in ("noisy", "other"):
        for method in ("target, best tokens", "rejection, irregular"):
            sample_tokens(
                the_target(), PROMPT, 1000, LENGTH, assistant_model=a_draft(draft), speculative_config=METHODS[method]
            )
            accepted[draft, method] = last_metrics().num_accepted_tokens
    assert accepted["noisy", "rejection, irregular"] > accepted["other", "rejection, irregular"]
    assert accepted["noisy", "rejection, irregular"] > accepted["noisy", "target, best tokens"]
