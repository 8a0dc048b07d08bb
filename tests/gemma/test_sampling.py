"""Sampled calls with an assistant of Gemma 4 against the enumerated distribution."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.device_steps import install
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.gemma import make_target, write_assistant
from support.sampling import LENGTH, METHODS, PROMPT, ROWS, VOCAB, draw_from_flatter_scores, sampled_tokens
from transformers import PreTrainedModel

from hf_specdec import GemmaAssistant, SpeculativeConfig, last_metrics


BEST, DRAWN, BUDGETS = "target, best tokens", "rejection, irregular", "rejection, budgets"


@cache
def the_pair() -> tuple[PreTrainedModel, GemmaAssistant]:
    """Of eight tokens in four centroids, two of which count."""
    few = {"num_centroids": 4, "centroid_intermediate_top_k": 2, "text": {"vocab_size": VOCAB}}
    with TemporaryDirectory() as folder:
        assistant = GemmaAssistant.from_pretrained(write_assistant(Path(folder), **few))
    return make_target(sharpness=2.0, vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB), assistant.eval()


def fit_samples(config: SpeculativeConfig) -> Fit:
    target, assistant = the_pair()
    tokens = sample_tokens(target, PROMPT, ROWS, LENGTH, assistant_model=assistant, speculative_config=config)
    assert last_metrics().num_accepted_tokens > 0
    return fit(tokens[0], enumerate_tokens(target, PROMPT, LENGTH))


@pytest.mark.parametrize("method", [BEST, DRAWN, BUDGETS])
@pytest.mark.some_cases(1)
def test_calls(method: str) -> None:
    found = fit_samples(METHODS[method])
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.2


@pytest.mark.slow
def test_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    steps, method = install(monkeypatch, with_kernel=True), METHODS[DRAWN]
    config = SpeculativeConfig(tree=method.tree, draft_sampling=method.draft_sampling, cuda_graphs=True)
    target, assistant = the_pair()
    found = fit(sampled_tokens(target, assistant, config, 700), enumerate_tokens(target, PROMPT, LENGTH))
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.slow
def test_children_of_another_distribution_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_from_flatter_scores(monkeypatch)
    assert fit_samples(METHODS[DRAWN]).p_value < 1e-6
