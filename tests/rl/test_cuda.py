"""Rollouts on a GPU, where whole steps are CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts
from support.heads import tiny_head
from support.models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

import hf_specdec
from hf_specdec import OnlineHead
from hf_specdec.engine.captured.running import Repeats


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TREE = "[(0,), (1,), (0, 0)]"
PROMPTS = ragged_prompts((9, 14, 5, 14))
GREEDY = GenerationConfig(max_new_tokens=24, do_sample=False)
SAMPLED = GenerationConfig(max_new_tokens=24, do_sample=True, top_k=0)


def asked(model: PreTrainedModel, config: GenerationConfig = GREEDY) -> list[list[int]]:
    outputs = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=limits(block_size=16))
    return [output.generated_tokens for output in outputs.values()]


def alone(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        found.append(text[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("learns", [False, True])
def test_texts_of_a_policy_that_is_trained(learns: bool) -> None:
    """In float32; written in place, and moved. The head's weights are where they were, and are others."""
    model = tiny_model().float().cuda()
    head: Any = tiny_head(model).cuda()
    if learns:
        head = OnlineHead(head, lr=1e-2, budget=None, most_steps=1, unroll_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with hf_specdec.rollouts(model, head, tree=TREE) as rollouts:
        for _ in range(4):
            assert asked(model) == alone(model)
            model(torch.tensor(PROMPTS[:1], device="cuda")).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for weight in model.parameters():
            weight.data = -weight.data  # what runs over the old memory writes other texts
        assert asked(model) == alone(model)
    assert all(metrics.num_drafts for metrics in rollouts.metrics)
    assert not learns or head.num_steps == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_in_mixed_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured in the dtype of the weights; beside half precision the head learns in it."""
    accelerate = pytest.importorskip("accelerate")
    launches: list[int] = []
    launch = Repeats.launch
    monkeypatch.setattr(Repeats, "launch", lambda self: (launches.append(1), launch(self))[1])
    model = accelerate.Accelerator(mixed_precision="bf16").prepare_model(tiny_model().float().cuda())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model.train().to(dtype)
    head = OnlineHead(tiny_head(model).cuda(), budget=None, most_steps=1)
    with hf_specdec.rollouts(model, head, tree=TREE):
        for _ in range(4):
            assert all(asked(model, SAMPLED))
    assert head.num_steps == 4 and all(map(torch.isfinite, map(torch.tensor, head.losses)))
    assert launches and head.head.dtype == torch.float32
