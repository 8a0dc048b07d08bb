"""Sampled calls with MTP modules against the enumerated distribution, on the host and in whole steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit, sample_tokens
from support.mtp import load_target, write_checkpoint
from support.sampling import LENGTH, METHODS, PROMPT, ROWS, VOCAB, draw_from_flatter_scores, sampled_tokens
from transformers import PreTrainedModel

from hf_specdec import MtpHead, SpeculativeConfig, last_metrics


BEST, DRAWN, BUDGETS = "target, best tokens", "rejection, irregular", "rejection, budgets"


@cache
def the_pair(family: str) -> tuple[PreTrainedModel, MtpHead]:
    with TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder), vocab_size=VOCAB)
        target = load_target(Path(folder))
        with torch.no_grad():
            target.get_output_embeddings().weight.mul_(3.0)  # about four likely tokens
        return target, MtpHead.from_target(target)


@cache
def expected(family: str) -> torch.Tensor:
    return enumerate_tokens(the_pair(family)[0], PROMPT, LENGTH)


def fit_samples(family: str, config: SpeculativeConfig) -> Fit:
    target, head = the_pair(family)
    tokens = sample_tokens(target, PROMPT, ROWS, LENGTH, assistant_model=head, speculative_config=config)
    assert last_metrics().num_accepted_tokens > 0
    return fit(tokens[0], expected(family))


@pytest.mark.parametrize(
    "family, method",
    [("hy_v3", BEST), ("hy_v3", DRAWN), ("glm4_moe", DRAWN), ("glm4_moe", BUDGETS)],
)
@pytest.mark.some_cases(1)
def test_calls(family: str, method: str) -> None:
    found = fit_samples(family, METHODS[method])
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hy_v3", "glm4_moe"])
def test_whole_steps(family: str, steps: Steps) -> None:
    method = METHODS[DRAWN]
    config = SpeculativeConfig(tree=method.tree, draft_sampling=method.draft_sampling, cuda_graphs=True)
    found = fit(sampled_tokens(*the_pair(family), config, 1_000), expected(family))
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found


def test_children_of_another_distribution_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_from_flatter_scores(monkeypatch)
    assert fit_samples("glm4_moe", METHODS[DRAWN]).p_value < 1e-6
