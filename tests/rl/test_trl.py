"""TRL's trainer, left as it is or with `rollout_func`, and a policy that speculates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import BLOCK_SIZE
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer

import hf_specdec
from hf_specdec import EagleHead, OnlineHead
from hf_specdec.rl.policy import writing


trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HEAD = TINY_TARGET.parent / "safeailab_eagle3"
TREE = "[(0,), (1,), (0, 0)]"
NEW_TOKENS, GENERATIONS = 16, 4


def even(completions: list[str], **_: Any) -> list[float]:
    """A reward for tokens with even numbers."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in text) / NEW_TOKENS for text in numbers]


def trainer_of(policy: Any, folder: Path, rollout_func: Any = None, **options: Any) -> Any:
    prompts = [trained_tokenizer().decode(ids) for ids in trained_prompts()["prompts"][:8]]
    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=8,
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        seed=3,
        use_transformers_continuous_batching=rollout_func is None,
        transformers_continuous_batching_config={"num_blocks": 64, BLOCK_SIZE: 16},
        **({"bf16": False} | options),
    )
    return trl.GRPOTrainer(
        model=policy,
        reward_funcs=even,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=trained_tokenizer(),
        rollout_func=rollout_func,
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], list[Any]]]:
    """Prompts and results of the managers' runs."""
    calls: list[tuple[list[list[int]], list[Any]]] = []
    ours = hf_specdec.rl.Rollouts.generate_batch

    def noted(self: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        outputs = ours(self, inputs, *args, **options)
        calls.append((inputs, list(outputs.values())))
        return outputs

    monkeypatch.setattr(hf_specdec.rl.Rollouts, "generate_batch", noted)
    return calls


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"peft": True}], ids=["float32", "bfloat16", "lora"])
def test_the_trainer_as_it_is(options: dict[str, Any], seen: Any, made: list[Any], tmp_path: Path) -> None:
    """Its calls speculate by one manager, and it learns. (In half precision TRL casts the policy before it asks.)"""
    policy = copy.deepcopy(trained_target())
    before = [weight.clone() for weight in policy.parameters()]
    given: Any = policy
    if options.pop("peft", False):
        import peft

        given = peft.get_peft_model(policy, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = trainer_of(given, tmp_path, **options)
    with hf_specdec.rollouts(given, EagleHead.from_pretrained(HEAD), tree=TREE) as rollouts:
        trainer.train()
    assert len(seen) == 3 and len(made) == 1
    assert all(metrics.mean_acceptance_length > 1.1 for metrics in rollouts.metrics)
    for inputs, outputs in seen:
        assert [output.prompt_ids for output in outputs] == inputs
    if given is policy:
        assert any(not torch.equal(a.to(b.dtype), b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(torch.isfinite(weight).all() for weight in policy.parameters())


@pytest.mark.parametrize("bf16", [False, True])
def test_a_rollout_func(bf16: bool, seen: Any, made: list[Any], tmp_path: Path) -> None:
    """
    Its log-probabilities are those that the policy gives the texts, of which it was asked at temperature 0.8; the head
    that learns meanwhile leaves nothing in the policy's gradients.
    """
    policy = copy.deepcopy(trained_target())
    head = OnlineHead(EagleHead.from_pretrained(HEAD), budget=None, most_steps=1, max_length=64)
    rollouts = hf_specdec.rollouts(policy, head, tree=TREE)
    found: list[Any] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made_of = rollouts(prompts, trainer)
        ids = [[*prompt, *text] for prompt, text in zip(made_of["prompt_ids"], made_of["completion_ids"], strict=True)]
        with torch.no_grad(), writing(policy):
            for tokens, logprobs in zip(ids, made_of["logprobs"], strict=True):
                own = (trainer.model(torch.tensor([tokens])).logits[0] / 0.8).log_softmax(-1)
                start = len(tokens) - len(logprobs)
                expected = [own[place - 1, tokens[place]].item() for place in range(start, len(tokens))]
                assert logprobs == pytest.approx(expected, abs=1e-4)
        found.append(made_of)
        return made_of

    trainer = trainer_of(policy, tmp_path, rollout_func, temperature=0.8, bf16=bf16)
    with rollouts:
        trainer.train()
    assert len(found) == len(seen) == 3 and len(made) == 1 and head.num_steps == 3
    assert trainer.state.log_history[0]["completions/mean_length"] > 1
    with pytest.raises(ValueError, match="inside the context"):
        rollouts(["t5 t6"], trainer)
