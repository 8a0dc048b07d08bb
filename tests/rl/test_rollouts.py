"""`rollouts`: calls of `generate_batch` that know of no draft speculate, beside a policy that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.graphs import install_stand_in, kernels
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from transformers import GenerationConfig, PreTrainedModel

import hf_specdec
from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.rl import Rollouts
from hf_specdec.rl.rollouts import open_rollouts


TREE = "[(0,), (1,), (0, 0)]"
PROMPTS = ragged_prompts((9, 14, 5, 14))
CONFIG = GenerationConfig(max_new_tokens=12, do_sample=False)


def asked(model: PreTrainedModel, config: GenerationConfig = CONFIG) -> list[list[int]]:
    """What a trainer gets, by the call that it makes."""
    with torch.no_grad():
        outputs = model.generate_batch(
            PROMPTS, generation_config=config, continuous_batching_config=limits(), progress_bar=False
        )
    return [output.generated_tokens for output in outputs.values()]


def alone(model: PreTrainedModel) -> list[list[int]]:
    return [text_alone(model, prompt, anew=True, max_new_tokens=12) for prompt in PROMPTS]


def a_step(model: PreTrainedModel) -> None:
    """What an optimizer does: writes in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor(PROMPTS[:1])).logits.square().mean().backward()
    optimizer.step()


def moved(model: PreTrainedModel) -> None:
    """Other memory: what was captured over the old one must not run."""
    for weight in model.parameters():
        weight.data = -weight.data


@pytest.mark.parametrize("change", [a_step, moved])
@pytest.mark.some_cases(1)
def test_texts_are_those_of_the_policy_as_it_is_now(
    change: Callable[[PreTrainedModel], None], made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one manager. What was captured runs on, if no weight has moved."""
    stand_in = install_stand_in(monkeypatch, with_kernel=True)
    model = tiny_model()
    with hf_specdec.rollouts(model, tiny_head(model), tree=TREE) as rollouts:
        for _ in range(3):  # sizes are captured when they come for the second time
            before = alone(model)
            assert asked(model) == before
            model._kept_speculative_manager.manager.reset_prefix_cache()
        captures = stand_in.captures
        change(model)
        after = alone(model)
        assert asked(model) == after != before
        assert captures > 0 and (stand_in.captures > captures) == (change is moved)
    assert len(made) == 1 and len(rollouts.metrics) == 4
    assert all(metrics.num_drafts > 0 for metrics in rollouts.metrics)


def test_a_warm_up(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first texts of a manager, and not again."""
    calls: list[int] = []
    monkeypatch.setattr("hf_specdec.batching.warming_up.WarmUp.run", lambda self: calls.append(len(calls)))
    model = tiny_model()
    with hf_specdec.rollouts(model, NgramDraft(), tree=TREE, warmup=True):
        assert asked(model) == asked(model) == alone(model)
        model.to(torch.float32)
        assert asked(model) == alone(model)
    assert len(calls) == len(made) == 2


def test_a_cast_policy(made: list[Any]) -> None:
    """As at the first call of a trainer in half precision, and never again."""
    model = tiny_model()
    with hf_specdec.rollouts(model, NgramDraft(), tree=TREE):
        for dtype in (torch.float64, torch.float32, torch.float32):
            model.to(dtype)
            assert asked(model) == alone(model)
    assert len(made) == 2


def test_the_policy_writes_in_evaluation_mode_and_trains_on() -> None:
    model = tiny_model(attention_dropout=0.9)
    expected = alone(model)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    with hf_specdec.rollouts(model, NgramDraft()):
        assert asked(model) == expected
    assert [module.training for module in model.modules()] == modes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_in_mixed_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate puts autocast around its forward: steps are captured as without, and training has it again."""
    accelerate = pytest.importorskip("accelerate")
    stand_in = install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setitem(kernels.DEVICES, "cpu", (dtype,))
    texts = []
    for is_prepared in (False, True):
        model = tiny_model().float()
        if is_prepared:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # that of another test
            model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        forward = model.to(dtype).forward
        with hf_specdec.rollouts(model, tiny_head(model), tree=TREE):
            texts.append([asked(model) for _ in range(2)])
        assert model.forward == forward
    assert texts[0] == texts[1] and stand_in.replays > 0


def test_only_calls_inside_and_only_plain_ones(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    calls: list[Any] = []
    monkeypatch.setattr(Rollouts, "generate_batch", lambda self, *args, **options: calls.append(self) or {})
    with hf_specdec.rollouts(model, NgramDraft()) as rollouts:
        asked(model)
        assert open_rollouts(copy.deepcopy(model)) is None  # as a trainer makes a reference model
        own = {"assistant_model": NgramDraft(), "tree": TREE, "continuous_batching_config": limits()}
        model.generate_batch(PROMPTS, max_new_tokens=2, **own)
        with hf_specdec.rollouts(other, NgramDraft()) as others:
            asked(other)
    assert calls == [rollouts, others]
    assert [open_rollouts(one) for one in (model, other)] == [None, None]


def test_an_adapted_policy() -> None:
    """The trainer adapts the model itself, before the context or inside it."""
    peft = pytest.importorskip("peft")
    model = tiny_model()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    with hf_specdec.rollouts(model, NgramDraft(), tree=TREE):
        before = asked(model)
        adapted = peft.get_peft_model(model, config)
        assert asked(adapted) == alone(model) != before
    with hf_specdec.rollouts(adapted, noisy_copy(tiny_model()), tree=TREE):
        assert asked(adapted) == alone(model)


def test_refusals() -> None:
    model = tiny_model()
    with pytest.raises(TypeError, match="`model` must be a model of transformers, but is Linear"):
        hf_specdec.rollouts(torch.nn.Linear(2, 2), NgramDraft())
    with pytest.raises(TypeError, match="assistant_model"):
        hf_specdec.rollouts(model, 3)
    with pytest.raises(ValueError, match="vocabulary of 61 tokens"):
        hf_specdec.rollouts(tiny_model(vocab_size=80), tiny_head(model))
    with pytest.raises(ValueError, match="give one of them"):
        hf_specdec.rollouts(model, NgramDraft(), TREE, speculative_config=SpeculativeConfig(tree=TREE))
    with hf_specdec.rollouts(model, NgramDraft()) as rollouts:
        with pytest.raises(ValueError, match="already"):
            rollouts.__enter__()
    with pytest.raises(ValueError, match="train inside the context"):
        rollouts([[3]], None)


def narrower(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp
    layer.up_proj.weight.data = layer.up_proj.weight.data[:40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.resize_token_embeddings(70), "vocabulary had 61 tokens .* has 70 now"),
        (narrower, r"`model.layers.1.mlp.up_proj.weight` had the shape \(48, 32\) .* has \(40, 32\) now"),
    ],
)
def test_a_policy_of_other_shapes(change: Callable[[PreTrainedModel], None], message: str) -> None:
    model = tiny_model()
    with hf_specdec.rollouts(model, NgramDraft()):
        asked(model)
        change(model)
        with pytest.raises(ValueError, match=message):
            asked(model)


def test_a_text_that_fails_ends_the_call() -> None:
    """No trainer learns from half of it."""
    model = tiny_model()
    with hf_specdec.rollouts(model, NgramDraft()):
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="the text after prompt 0 has failed"):
            asked(model, GenerationConfig(max_new_tokens=4, do_sample=True))
