"""Sampled texts of models with states that only the sweep builds fit their enumerated distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.sampling import LENGTH, PROMPT, TREE, VOCAB
from support.wrong_states import settle_all, settle_none

from hf_specdec import NgramDraft, SpeculativeConfig, last_metrics
from hf_specdec.cache.state_layers import StateLayer

from .building import tiny_model
from .registry import all_pairs
from .test_indexers import skip_if_refused


ROWS = 600
"""Any bias with a total variation of 0.25 is found."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm5_next", "qwen4_exp_text", "lara_mini"])
def test_samples(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit; not if a step commits all its nodes, or none. Flat logits, as of a random head, would hide both."""
    pair = next((pair for pair in all_pairs() if pair.model_type == family), None)
    if pair is None:
        pytest.skip("this release does not have the family")
    if family != "lara_mini":
        skip_if_refused(family)
    name = "text_config.vocab_size" if family == "glm5_next" else "vocab_size"
    model: Any = tiny_model(pair, dtype=torch.float32, **{name: VOCAB})
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10.0)
    expected = enumerate_tokens(model, PROMPT, LENGTH)

    def found() -> Fit:
        draft, config = NgramDraft(max_ngram=2, min_ngram=1), SpeculativeConfig(tree=TREE)
        tokens = sample_tokens(model, PROMPT, ROWS, LENGTH, assistant_model=draft, speculative_config=config)
        assert last_metrics().num_accepted_tokens > 0
        return fit(tokens[0], expected)

    right = found()
    assert right.p_value > SIGNIFICANCE and right.detectable < 0.25, right
    for wrong in (settle_all, settle_none):
        monkeypatch.setattr(StateLayer, "settle", wrong)
        assert found().p_value < 1e-6
