"""
The accelerator's way to verify, on the CPU: the target's tokens of all nodes are chosen at once, before the walk.
"""

from __future__ import annotations

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_model

import hf_specdec
from hf_specdec.verification import TargetDistribution


TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]"


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetDistribution, "reads_ahead", TargetDistribution.can_read_ahead)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5, "do_sample": False}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_equals_plain_generate(batch_size: int, options: dict) -> None:
    target = tiny_model()
    draft = noisy_copy(target, 0.1)
    inputs = prompts(batch_size, 9, padding=True)
    plain = target.generate(**inputs, **({"do_sample": False} | options), max_new_tokens=40)
    output = target.generate(
        **inputs, **({"do_sample": False} | options), max_new_tokens=40, assistant_model=draft, tree=TREE
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert torch.equal(plain, output)


def test_sampled_tokens_have_the_targets_distribution() -> None:
    """
    The second new token over 6,000 rows, given the first, against the target's probabilities at temperature 0.8 and
    top-k 6. The bound is three times the total variation that chance makes, at most 0.15; drawing without the warpers
    would differ by 0.34 and more.
    """
    target = tiny_model(vocab_size=12)
    draft = noisy_copy(target, 0.3)
    ids = torch.tensor([[3, 5, 7, 4]]).expand(6_000, -1)
    config = hf_specdec.SpeculativeConfig(tree=TREE, draft_sampling="greedy")
    warped = {"do_sample": True, "temperature": 0.8, "top_k": 6}
    output = target.generate(
        ids, max_new_tokens=3, **warped, assistant_model=draft, speculative_config=config, pad_token_id=0
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    compared = 0
    for first in output[:, 4].unique().tolist():
        chosen = output[output[:, 4] == first]
        if len(chosen) < 800:
            continue
        compared += 1
        with torch.no_grad():
            logits = target(chosen[:1, :5]).logits[0, -1].float() / 0.8
        expected = logits.masked_fill(logits < logits.topk(6).values[-1], -torch.inf).softmax(-1)
        counts = torch.bincount(chosen[:, 5], minlength=12) / len(chosen)
        assert (counts - expected).abs().sum() / 2 < 3 * (12 / (6.28 * len(chosen))) ** 0.5
    assert compared > 0
