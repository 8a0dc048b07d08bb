"""Models on a device that is not the current one. Skipped, and said so, where there is but one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR

import hf_specdec


pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_whole_steps(kind: str, batch_size: int) -> None:
    target = tiny_model(dtype=torch.float32)
    draft: Any = noisy_copy(target, 0.05) if kind == "model" else tiny_head(target)
    target, draft = target.to("cuda:1"), draft.to("cuda:1")
    for length in (9, 14):
        inputs = {name: value.to("cuda:1") for name, value in prompts(batch_size, length, padding=True).items()}
        plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
        text = target.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft, tree=IRREGULAR)
        assert "steps" in hf_specdec.last_metrics().seconds
        assert torch.equal(plain, text)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_on_another_device(do_sample: bool) -> None:
    """Such a call goes step by step; its draft attends and chooses by kernels all the same."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05).to("cuda:1")
    target = target.to("cuda:0")
    inputs = {name: value.to("cuda:0") for name, value in prompts(2, 9, padding=True).items()}
    options = {"max_new_tokens": 30, "do_sample": do_sample}
    text = target.generate(**inputs, **options, assistant_model=draft, tree=IRREGULAR)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert do_sample or torch.equal(text, target.generate(**inputs, **options))
