"""`OnlineHead`: a head that learns from a policy's texts, between calls alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import device_steps
from support.batches import limits
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.heads import tiny_head
from support.models import tiny_model
from support.sampling import LENGTH, TREE, a_head, small_model

import hf_specdec
from hf_specdec import EagleHead, OnlineHead
from hf_specdec.drafters.heads import in_dtype_of
from hf_specdec.engine.prefixes import PrefixCache
from hf_specdec.training.data import Text
from hf_specdec.training.packing import Collator, make_row
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.ttt import TttObjective


HEAD = TINY_TARGET.parent / "safeailab_eagle3"
FEW = {"budget": None, "most_steps": 1, "texts_per_step": 4, "max_length": 64, "unroll_steps": 2}


def texts_of(number: int, length: int = 32) -> list[tuple[list[int], list[int]]]:
    golden = trained_prompts()
    return [(golden["prompts"][row], golden["greedy_64"][row][:length]) for row in range(number)]


def weights_of(head: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in head.parameters()]


def test_a_step_is_that_of_training() -> None:
    """By AdamW, with the loss of `hf-specdec train` over what the policy wrote, which gets no gradients of it."""
    target, given = copy.deepcopy(trained_target()), EagleHead.from_pretrained(HEAD)
    before = weights_of(given)
    head = OnlineHead(given, lr=1e-3, follow_vocabulary=False, **(FEW | {"max_length": 512}))
    texts = texts_of(4)
    assert head.learn(target, texts) == head.num_steps == 1
    assert all(weight.grad is None and weight.requires_grad for weight in target.parameters())
    assert all(map(torch.equal, before, weights_of(given)))  # the user's own

    trained = list(given.parameters())
    rows = [make_row([Text([*a, *b], [(len(a), len(a) + len(b))])]) for a, b in texts]
    batch = Collator(0)([rows[index] for index in torch.randperm(4, generator=torch.Generator().manual_seed(0))])
    boundaries = given.config.aux_boundaries(target.config.num_hidden_layers)
    outputs = TargetReader(target, boundaries, given.target_ids)(batch["input_ids"])
    loss = TttObjective(given, 2)(outputs, **batch)["loss"]
    loss.backward(inputs=trained)
    torch.nn.utils.clip_grad_norm_(trained, 0.5)
    torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    assert head.losses == pytest.approx([loss.item()], rel=1e-5)
    for own, expected in zip(weights_of(head.head), given.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_learns_what_it_is_shown() -> None:
    """A head that knew nothing drafts for the policy at last."""
    policy, prompts = trained_target(), trained_prompts()["prompts"][:8]
    new = tiny_head(policy, sharpness=1.0, layers={"num_attention_heads": 4})
    head = OnlineHead(new, lr=3e-3, **(FEW | {"most_steps": 8, "texts_per_step": 8}))
    call: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "continuous_batching_config": limits()}
    with hf_specdec.rollouts(policy, head, tree="chain:2") as rollouts:
        for _ in range(3):
            outputs = policy.generate_batch(prompts, **call)
    assert [one.generated_tokens for one in outputs.values()] == [
        text[:24] for text in trained_prompts()["greedy_64"][:8]
    ]
    lengths = [metrics.mean_acceptance_length for metrics in rollouts.metrics]
    assert lengths[-1] > lengths[0] + 0.3, lengths
    assert head.losses[-1] < head.losses[0]


def fits_of_two_policies(monkeypatch: pytest.MonkeyPatch) -> list[Fit]:
    """
    How well texts fit the enumeration of two policies, whose weights one model has in turn, written in place. The head
    changes after every call: in place, too, where captured steps read it. 480 texts of each policy.
    """
    steps = device_steps.install(monkeypatch, with_kernel=True)
    policies, policy = [small_model(seed).float() for seed in (0, 50)], small_model(0).float()
    head = OnlineHead(a_head(6), lr=0.05, **(FEW | {"texts_per_step": 16}))
    prompt, places = [5, 5, 3, 7, 1, 6, 2, 4, 3], set()  # two blocks that texts share
    rows: tuple[list[list[int]], ...] = ([], [])
    torch.manual_seed(0)
    big = limits(3000, max_requests_per_batch=120, max_batch_tokens=1200)
    with hf_specdec.rollouts(policy, head, tree=TREE, continuous_batching_config=big) as rollouts:
        for call in range(8):
            with torch.no_grad():
                for own, value in zip(policy.parameters(), policies[call % 2].parameters(), strict=True):
                    own.copy_(value)
            outputs = policy.generate_batch(
                [prompt] * 120, max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=-1
            )
            rows[call % 2].extend(output.generated_tokens for output in outputs.values())
            drafting = in_dtype_of(head.head, policy)
            assert torch.equal(drafting.fc.weight, head.head.fc.weight.to(policy.dtype))
            places.add(tuple(weight.data_ptr() for weight in drafting.parameters()))
    assert head.num_steps == 8 and len(places) == 1 and steps.replays > 8
    assert any(metrics.num_accepted_tokens for metrics in rollouts.metrics)
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    expected = [enumerate_tokens(one, inputs, LENGTH) for one in policies]
    return [fit(torch.tensor(texts), joint) for texts, joint in zip(rows, expected, strict=True)]


@pytest.mark.slow
def test_texts_are_distributed_as_those_of_the_policy_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(one.p_value for one in fits_of_two_policies(monkeypatch)) > SIGNIFICANCE


@pytest.mark.slow
def test_blocks_of_an_earlier_policy_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "renew", lambda *_: None)
    assert min(one.p_value for one in fits_of_two_policies(monkeypatch)) < SIGNIFICANCE


@pytest.mark.parametrize("way", ["state_dict", "save_pretrained"])
def test_resuming(way: str, tmp_path: Path) -> None:
    """As if there had been no end."""
    target, texts = trained_target(), texts_of(8)
    whole, first = (OnlineHead(EagleHead.from_pretrained(HEAD), lr=1e-3, **FEW) for _ in range(2))
    for head in (whole, first):
        head.learn(target, texts[:4])
    if way == "state_dict":
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = OnlineHead(EagleHead.from_pretrained(HEAD), **FEW)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        first.save_pretrained(tmp_path)
        second = OnlineHead.from_pretrained(tmp_path, **FEW)
        assert EagleHead.from_pretrained(tmp_path).config.draft_vocab_size == first.head.config.draft_vocab_size
    for head in (whole, second):
        for _ in range(2):
            head.learn(target, texts[4:])
    assert second.num_steps == whole.num_steps == 3 and second.losses == whole.losses[1:]
    assert all(map(torch.equal, weights_of(whole.head), weights_of(second.head)))


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five per cent of all else, but for the first step, which loads kernels."""
    now = [0.0]
    monkeypatch.setattr("hf_specdec.rl.online_head.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(self: OnlineHead, target: Any) -> float:
        now[0] += 1.0
        return 0.0

    monkeypatch.setattr(OnlineHead, "_step", slow)
    head = OnlineHead(EagleHead.from_pretrained(HEAD), **(FEW | {"budget": 0.05, "most_steps": 3}))
    head.for_call(trained_target())
    taken = []
    for _ in range(12):
        now[0] += 10.0
        taken.append(head.learn(trained_target(), texts_of(1)))
    assert taken[:2] == [1, 1] and sum(taken) == 1 + 6 == head.num_steps
    assert head.seconds_learning <= 0.05 * head.seconds_between == pytest.approx(6.0)


def test_a_step_that_is_not_finite_is_left_out() -> None:
    target = copy.deepcopy(trained_target())
    with torch.no_grad():
        target.lm_head.weight[:, 0] = torch.nan
    head = OnlineHead(EagleHead.from_pretrained(HEAD), **FEW)
    before = weights_of(head.head)
    head.learn(target, texts_of(2))
    assert head.num_exchanged == 0
    assert all(map(torch.equal, before, weights_of(head.head)))


def test_refusals() -> None:
    head = EagleHead.from_pretrained(HEAD)
    with pytest.raises(TypeError, match="must be an EagleHead, but is str"):
        OnlineHead("head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version 1"):
        OnlineHead(tiny_head(tiny_model(), eagle_version=1))
    for name, value in {"lr": 0, "budget": -1, "texts_per_step": 0, "max_length": 1.5, "unroll_steps": True}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            OnlineHead(head, **{name: value})
    with pytest.raises(ValueError, match="vocabulary of 512 tokens"):
        OnlineHead(head).learn(tiny_model(), [([3, 4], [5, 6])])
    state = OnlineHead(head).state_dict()
    state["head"]["fc.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"`fc.weight` has the shape \(2, 2\)"):
        OnlineHead(head).load_state_dict(state)
