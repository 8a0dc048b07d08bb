"""Sampled texts of targets with states fit their enumerated distribution; with states that keep all nodes, not."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support.device_steps import install
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.hybrids import hybrid, is_known
from support.sampling import LENGTH, PROMPT, TREE, VOCAB, a_draft, sampled_tokens
from support.wrong_states import settle_all, settle_none
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig, last_metrics
from hf_specdec.cache.state_layers import StateLayer
from hf_specdec.states import PendingPaths


ROWS = 600
"""Any bias with a total variation of 0.25 is found."""
TINY = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 8, "mamba_d_state": 4, "attn_layer_indices": (1,)},
    "qwen3_5_text": {
        "layer_types": ("linear_attention", "full_attention"),
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
    },
    "kimi_linear": {
        "layer_types": ("linear_attention", "full_attention"),
        "linear_num_heads": 2,
        "num_key_value_heads": 2,
    },
    "lfm2": {"layer_types": ("conv", "full_attention")},
    "jamba": {},
    "zaya": {"layer_types": ("hybrid", "hybrid")},
    "inkling_text": {"layer_types": ("hybrid_sliding", "hybrid"), "mlp_layer_types": ("dense", "dense")},
    "zamba": {
        "layers_block_type": ("linear_attention", "hybrid"),
        "num_key_value_heads": 2,
        "attention_hidden_size": 32,
    },
}
"""Targets of 8 tokens and two layers: their values beside `TINY`."""
OF_BAMBA = TINY | FAMILIES["bamba"]
EACH_KIND = ("bamba", "qwen3_5_text", "lfm2", "jamba", "zaya")
"""A family for most kinds of layers; others are slow tests."""
MANY_ROWS = {"zaya": 1400}
"""Samples where states reach back two tokens alone, and change little."""


@cache
def the_target(family: str = "bamba") -> PreTrainedModel:
    return hybrid(family, **(TINY | FAMILIES[family]))


@cache
def expected(family: str = "bamba") -> torch.Tensor:
    """The distribution of the next tokens, `[VOCAB] * LENGTH`."""
    return enumerate_tokens(the_target(family), PROMPT, LENGTH)


def fit_samples(family: str) -> Fit:
    """How well speculative samples fit the enumeration."""
    draft, config = NgramDraft(max_ngram=2, min_ngram=1), SpeculativeConfig(tree=TREE)
    rows = MANY_ROWS.get(family, ROWS)
    tokens = sample_tokens(the_target(family), PROMPT, rows, LENGTH, assistant_model=draft, speculative_config=config)
    assert last_metrics().num_accepted_tokens > 0
    return fit(tokens[0], expected(family))


@pytest.mark.parametrize(
    "family", [one if one in EACH_KIND else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_samples(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit; not if a step commits all its nodes, or none where only the last two tokens count."""
    if not is_known(family):
        pytest.skip("this release does not have the family")
    found = fit_samples(family)
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.25
    monkeypatch.setattr(StateLayer, "settle", settle_none if family == "zaya" else settle_all)
    assert fit_samples(family).p_value < 1e-6


@pytest.mark.parametrize(
    "kind", ["convolutions", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("attention", "states"))]
)
def test_samples_of_captured_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rejection of drawn children; not if a step commits a node more than was accepted."""
    steps = install(monkeypatch, with_kernel=True)
    family, rows = ("lfm2", 800) if kind == "convolutions" else ("bamba", ROWS)  # the former change less
    draft = hybrid("bamba", 1, **OF_BAMBA) if kind == "states" else copy.deepcopy(a_draft("other")).float()

    def found() -> Fit:
        tokens = sampled_tokens(the_target(family), draft, SpeculativeConfig(tree=TREE, cuda_graphs=True), rows)
        return fit(tokens, expected(family))

    right = found()
    assert steps.replays > 1 and right.p_value > SIGNIFICANCE, right
    assert right.detectable < 0.35
    keep = PendingPaths.keep

    def keep_more(paths: Any, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        keep(paths, slots, path, torch.where(counts > 0, path.shape[1], 0))

    monkeypatch.setattr(PendingPaths, "keep", keep_more)
    assert found().p_value < 1e-6
