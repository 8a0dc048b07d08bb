"""Sampled texts of a target with states fit their enumerated distribution; with states that keep all nodes, not."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support.device_steps import install
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.hybrids import hybrid
from support.sampling import LENGTH, PROMPT, ROWS, TREE, VOCAB, a_draft, sampled_tokens
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig, last_metrics
from hf_specdec.cache.state_layers import StateLayer
from hf_specdec.states import Path, PendingPaths


@cache
def the_target() -> PreTrainedModel:
    """Of 8 tokens, in one Mamba-2 and one attention layer."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "mamba_d_head": 8, "mamba_d_state": 4}
    layers = {"num_hidden_layers": 2, "attn_layer_indices": (1,), "num_attention_heads": 2, "num_key_value_heads": 1}
    return hybrid("bamba", **sizes, **layers)


@cache
def expected() -> torch.Tensor:
    """The distribution of the next tokens, `[VOCAB] * LENGTH`."""
    return enumerate_tokens(the_target(), PROMPT, LENGTH)


def fit_samples() -> Fit:
    """How well speculative samples fit the enumeration."""
    draft, config = NgramDraft(max_ngram=2, min_ngram=1), SpeculativeConfig(tree=TREE)
    tokens = sample_tokens(the_target(), PROMPT, ROWS, LENGTH, assistant_model=draft, speculative_config=config)
    assert last_metrics().num_accepted_tokens > 0
    return fit(tokens[0], expected())


def test_samples() -> None:
    found = fit_samples()
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.2


def test_states_that_keep_all_nodes_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StateLayer.settle

    def settle(layer: Any, path: Path) -> None:
        number = next(iter(layer.pending.values())).conv_inputs.shape[2]
        every = torch.arange(number).repeat(len(path.nodes), 1)
        right(layer, Path(every, path.is_on.any(dim=1, keepdim=True).expand(-1, number)))

    monkeypatch.setattr(StateLayer, "settle", settle)
    assert fit_samples().p_value < 1e-6


def test_samples_of_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rejection of drawn children; not if a step commits a node more than was accepted."""
    steps, draft, rows = install(monkeypatch, with_kernel=True), copy.deepcopy(a_draft("other")).float(), 600

    def found() -> Fit:
        tokens = sampled_tokens(the_target(), draft, SpeculativeConfig(tree=TREE, cuda_graphs=True), rows)
        return fit(tokens, expected())

    right = found()
    assert steps.replays > 1 and right.p_value > SIGNIFICANCE, right
    assert right.detectable < 0.35
    keep = PendingPaths.keep

    def keep_more(paths: Any, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
        keep(paths, slots, path, torch.where(counts > 0, path.shape[1], 0))

    monkeypatch.setattr(PendingPaths, "keep", keep_more)
    assert found().p_value < 1e-6
