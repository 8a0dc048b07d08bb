"""The draft vocabulary of an `OnlineHead` follows what the policy writes, and captured steps follow it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import device_steps
from support.batches import limits
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.sampling import LENGTH, TREE, a_head, small_model

import hf_specdec
from hf_specdec import EagleHead, OnlineHead
from hf_specdec.drafters.features.vocabulary import HeldVocabulary
from hf_specdec.rl.vocabulary import VocabularyInUse, give_places


HEAD = TINY_TARGET.parent / "safeailab_eagle3"
FEW: dict[str, Any] = {"budget": None, "most_steps": 1, "texts_per_step": 8, "max_length": 64, "unroll_steps": 2}


def head_without(tokens: list[int]) -> EagleHead:
    """The trained head with half of its draft vocabulary: without these tokens, and with few others."""
    given = EagleHead.from_pretrained(HEAD)
    ids = given.target_ids
    assert ids is not None and given.lm_head is not None
    keep = (~torch.isin(ids, torch.tensor(tokens))).nonzero()[:, 0][:128]
    config = copy.deepcopy(given.config)
    config.draft_vocab_size = len(keep)
    head = EagleHead(config)
    weights = given.state_dict() | {"lm_head.weight": given.lm_head.weight[keep].detach()}
    head.load_state_dict(weights | {"d2t": ids[keep] - torch.arange(len(keep))})
    return head.eval()


def texts_of(number: int) -> list[tuple[list[int], list[int]]]:
    golden = trained_prompts()
    return list(zip(golden["prompts"][:number], [text[:24] for text in golden["greedy_64"][:number]], strict=True))


def written_in(texts: list[tuple[list[int], list[int]]]) -> list[int]:
    return sorted({token for _, written in texts for token in written})


@pytest.mark.slow
@pytest.mark.parametrize("follow_vocabulary", [True, False])
def test_a_policy_that_writes_other_tokens(follow_vocabulary: bool) -> None:
    """What the head cannot propose it cannot learn; with as many steps it learns, once there are places for it."""
    policy, texts = trained_target(), texts_of(8)
    head = OnlineHead(head_without(written_in(texts)), lr=3e-3, follow_vocabulary=follow_vocabulary, **FEW)
    call: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "continuous_batching_config": limits()}
    with hf_specdec.rollouts(policy, head, tree="chain:2") as rollouts:
        for _ in range(3):
            outputs = policy.generate_batch([prompt for prompt, _ in texts], **call)
    assert [output.generated_tokens for output in outputs.values()] == [written for _, written in texts]
    lengths = [metrics.mean_acceptance_length for metrics in rollouts.metrics]
    assert lengths[0] == 1.0
    if follow_vocabulary:
        assert lengths[-1] > 1.15 and head.num_exchanged > 20, lengths
    else:
        assert lengths[-1] == 1.0 and head.num_exchanged == 0


def test_places_go_to_what_is_written() -> None:
    in_use, ids = VocabularyInUse(10), torch.tensor([1, 3, 5, 7, 9])
    in_use.count([[2, 2, 2, 4, 4, 6], [3, 3, 5, 9, 9, 9]])
    places, tokens = in_use.exchange(ids)
    assert (places.tolist(), tokens.tolist()) == ([3, 0], [2, 4])  # 7 and 1 were not written, 7 has the higher number
    places, tokens = in_use.exchange(ids, always=[1, 7])
    assert (places.tolist(), tokens.tolist()) == ([2], [2])  # twice as often as 5; 4 is not as often as 3
    in_use.count([])
    assert in_use.counts[2] == pytest.approx(2.4) and len(in_use.exchange(ids)[0]) == 1  # 4 has faded
    in_use.count([[3, 10]])  # a row of the lm_head that is no token


def test_rows_begin_as_they_are_expected() -> None:
    """By the linear map between the rows that both have: exact where there is one."""
    head, target = head_without([]), copy.deepcopy(trained_target())
    mixed, lm_head = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), target.get_output_embeddings()
    assert head.lm_head is not None and head.target_ids is not None
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(512, 64, generator=torch.Generator().manual_seed(1)))
        head.lm_head.weight.copy_(lm_head.weight[head.target_ids] @ mixed + 2.0)
    before, own = head.lm_head.weight.clone(), head.target_ids.clone()
    lacking = next(token for token in range(512) if token not in own.tolist())
    give_places(head, target, torch.tensor([7]), torch.tensor([lacking]))
    assert head.target_ids.tolist() == [*own[:7].tolist(), lacking, *own[8:].tolist()]
    expected = lm_head.weight[lacking] @ mixed + 2.0
    assert torch.cosine_similarity(head.lm_head.weight[7], expected, dim=0) > 0.97
    assert torch.equal(head.lm_head.weight[8:], before[8:]) and torch.equal(head.lm_head.weight[:7], before[:7])

    target.set_output_embeddings(torch.nn.Sequential(lm_head))  # as what quantises or splits a layer
    mean = head.lm_head.weight.mean(dim=0)
    give_places(head, target, torch.tensor([3]), own[7:8])
    torch.testing.assert_close(head.lm_head.weight[3], mean)


def test_the_optimizer_forgets_them_and_a_state_keeps_them() -> None:
    policy, texts = trained_target(), texts_of(8)
    made = head_without(written_in(texts))
    head = OnlineHead(made, lr=1e-3, **FEW)
    head.learn(policy, [(prompt, [5, 6, 7, 8] * 4) for prompt, _ in texts])
    weight: Any = head.head.lm_head.weight
    momentum, before = head.optimizer.state[weight]["exp_avg"], head.head.target_ids.clone()
    rows = momentum.any(dim=1)
    head._in_use.count([written for _, written in texts])
    head._follow_vocabulary(policy)
    changed = head.head.target_ids != before
    assert rows[changed].any() and not momentum[changed].any()
    assert torch.equal(momentum.any(dim=1)[~changed], rows[~changed])
    other = OnlineHead(made, lr=1e-3, **FEW)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    for one in (head, other):
        assert torch.equal(one.head.target_ids, head.head.target_ids)
        one.learn(policy, texts)
    assert torch.equal(other.head.target_ids, head.head.target_ids)
    assert all(map(torch.equal, other.head.parameters(), head.head.parameters()))


def test_a_copy_in_the_policys_dtype_takes_them_over() -> None:
    """At the addresses that a drafter has kept."""
    policy, texts = copy.deepcopy(trained_target()).bfloat16(), texts_of(8)
    head = OnlineHead(head_without(written_in(texts)), **FEW)
    drafter = head.for_call(policy)
    held, columns = drafter.held_vocabulary, drafter.held_vocabulary.columns(512)
    head.learn(policy, texts)
    drafter.refresh()
    assert head.num_exchanged and drafter.head is not head.head and drafter.held_vocabulary is held
    ids = head.head.target_ids
    assert torch.equal(drafter.target_ids, ids) and torch.equal(columns[ids], torch.arange(128, dtype=torch.int32))
    assert (columns >= 0).sum() == 128
    assert head.for_call(policy).held_vocabulary is held  # graphs that calls of `generate` keep go on reading it


def fit_while_the_vocabulary_changes(monkeypatch: pytest.MonkeyPatch) -> Fit:
    """
    How well texts of captured steps fit the policy's distribution, while two of six tokens change with every call. 960
    texts in all.
    """
    steps, policy = device_steps.install(monkeypatch, with_kernel=True), small_model(0).float()
    head = OnlineHead(a_head(6), lr=1e-3, **FEW)
    with torch.no_grad():
        head.head.lm_head.weight.mul_(8.0)  # else the head holds all tokens for nearly equally likely

    def exchange(self: VocabularyInUse, ids: torch.Tensor, always: Any) -> tuple[torch.Tensor, torch.Tensor]:
        missing = torch.tensor([token for token in range(8) if token not in ids.tolist()])
        return torch.tensor([head.num_steps % 6, (head.num_steps + 3) % 6]), missing

    monkeypatch.setattr(VocabularyInUse, "exchange", exchange)
    prompt, rows = [5, 5, 3, 7, 1, 6, 2, 4, 3], []
    torch.manual_seed(0)
    big = limits(3000, max_requests_per_batch=120, max_batch_tokens=1200)
    config = hf_specdec.SpeculativeConfig(tree=TREE, verification="rejection")
    options = {"speculative_config": config, "continuous_batching_config": big}
    with hf_specdec.rollouts(policy, head, **options) as rollouts:
        for _ in range(8):
            outputs = policy.generate_batch(
                [prompt] * 120, max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=-1
            )
            rows.extend(output.generated_tokens for output in outputs.values())
    assert head.num_exchanged == 16 and steps.replays > 8
    assert all(metrics.num_accepted_tokens for metrics in rollouts.metrics)
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    return fit(torch.tensor(rows), enumerate_tokens(policy, inputs, LENGTH))


@pytest.mark.slow
def test_texts_are_distributed_as_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit_while_the_vocabulary_changes(monkeypatch).p_value > SIGNIFICANCE


@pytest.mark.slow
def test_tokens_of_an_earlier_vocabulary_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step knows the new tokens, and not the new places of the old ones."""

    def half(self: HeldVocabulary, ids: torch.Tensor) -> HeldVocabulary:
        with torch.inference_mode():
            self.ids.copy_(ids)
        return self

    monkeypatch.setattr(HeldVocabulary, "renewed", half)
    assert fit_while_the_vocabulary_changes(monkeypatch).p_value < SIGNIFICANCE
