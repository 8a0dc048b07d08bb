"""Draft models whose vocabulary is padded to another size: ids that only one of the two knows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.batches import limits, runs_of_steps, text_alone
from support.device_steps import install
from support.exact import SIGNIFICANCE, Fit, fit
from support.graphs import install_stand_in
from support.models import VOCAB, noisy_copy, padded_otherwise, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text
from support.sampling import LENGTH, LIMITS, PROMPT, TREE, a_draft, expected_tokens, sampled_tokens, the_target
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.drafters import DraftModelDrafter
from hf_specdec.forwards.vocabulary import SharedVocabulary


SMALLER, LARGER = 45, 67
DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=8)
ROWS = 1_000
both_sizes = pytest.mark.parametrize("size", [SMALLER, LARGER], ids=["smaller", "larger"])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model()


@cache
def draft_of(target: PreTrainedModel, size: int) -> PreTrainedModel:
    return padded_otherwise(noisy_copy(target, 0.05), size)


def assert_holds_foreign(text: torch.Tensor) -> None:
    """Ids that the smaller draft lacks, generated ones among them."""
    assert (text[:, 12:-2] >= SMALLER).any()


# ------------------------------------------------------------------------------------------------------- greedy texts


@both_sizes
@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto"], ids=["static", "dynamic", "auto"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(2)
def test_greedy_texts(target: PreTrainedModel, size: int, tree: Any, batch_size: int) -> None:
    inputs = prompts(batch_size, 12, padding=True)
    text = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert_holds_foreign(text)
    assert_same_text(target, inputs, draft_of(target, size), tree, text, max_new_tokens=40)


@pytest.mark.parametrize(
    "size, tree, whole, with_kernel",
    [
        pytest.param(SMALLER, IRREGULAR, True, True, id="smaller, steps"),
        pytest.param(SMALLER, IRREGULAR, False, True, id="smaller, forwards"),
        pytest.param(LARGER, DYNAMIC, True, True, id="larger, steps"),
    ],
)
@pytest.mark.some_cases(1)
def test_greedy_texts_on_graphs(
    target: PreTrainedModel, size: int, tree: Any, whole: bool, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    draft = padded_otherwise(draft_of(target, size), size).float()
    target = padded_otherwise(target, VOCAB).float()
    steps = install(monkeypatch, with_kernel)
    if not whole:
        monkeypatch.setattr("hf_specdec.generation.static_batch.StaticBatch.obstacle", lambda call: "not here")
    inputs = prompts(2, 12, padding=True)
    text = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert_holds_foreign(text)
    config = SpeculativeConfig(tree=tree, cuda_graphs=True)
    assert_same_text(target, inputs, draft, None, text, max_new_tokens=24, speculative_config=config)
    assert (steps.replays > 0) is whole


@pytest.mark.parametrize("with_graphs", [False, True], ids=["host", "steps"])
@both_sizes
@pytest.mark.some_cases(2)
def test_greedy_requests(
    target: PreTrainedModel, size: int, with_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_of_steps(monkeypatch)
    if with_graphs:
        install_stand_in(monkeypatch, with_kernel=True)
    draft = padded_otherwise(draft_of(target, size), size).float()  # the kernels take no float64
    target = padded_otherwise(target, VOCAB).float()
    texts = [row[number:].tolist() for number, row in enumerate(prompts(3, 12)["input_ids"])]
    outputs = target.generate_batch(texts, assistant_model=draft, tree=IRREGULAR, max_new_tokens=24, do_sample=False)
    for text, output in zip(texts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, text, max_new_tokens=24)
    assert any(token >= SMALLER for output in outputs.values() for token in output.generated_tokens[:-2])
    assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0
    assert bool(runs) is with_graphs


def test_a_row_after_a_foreign_token_drafts_nothing(target: PreTrainedModel) -> None:
    """And drafts again after the next one, for which the foreign one is read as a stand-in."""
    draft = draft_of(target, SMALLER)
    inputs = prompts(1, 12)
    text = target.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
    output = target.generate(
        **inputs,
        max_new_tokens=40,
        do_sample=False,
        assistant_model=draft,
        tree=TokenTree.chain(1),
        return_dict_in_generate=True,
    )
    accepted, place, seen = output.speculation.accepted_per_step[0], 12, 0
    for count in accepted:
        if text[place] >= SMALLER:
            seen += 1
            assert count == 0
        place += 1 + count
    assert seen > 0 and sum(accepted[-10:]) > 0


# ------------------------------------------------------------------------------------------------------- sampled texts


METHODS = {
    "rejection": SpeculativeConfig(tree=TREE),
    "rejection, budgets": SpeculativeConfig(tree=LIMITS, draft_sampling="sample"),
    "target": SpeculativeConfig(tree=TREE, draft_sampling="greedy"),
}
"""The target has 8 tokens; the drafts 6, so that every fourth token or so is foreign, and 11."""
few_or_many = pytest.mark.parametrize("size", [6, 11], ids=["smaller", "larger"])


@cache
def models_of(size: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    return padded_otherwise(the_target(), 8).float(), padded_otherwise(a_draft("noisy"), size).float()


def sampled(size: int, config: SpeculativeConfig, rows: int = ROWS, **options: Any) -> Fit:
    """How well texts of `generate` fit the enumerated distribution."""
    new = sampled_tokens(*models_of(size), config, rows, **options)
    assert (new >= 6).any()
    return fit(new, expected_tokens("top-k" if options else "plain"))


@few_or_many
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.some_cases(2)
def test_the_distribution(size: int, method: str) -> None:
    found = sampled(size, METHODS[method])
    assert found.p_value > SIGNIFICANCE, found


@few_or_many
def test_the_distribution_with_a_warper(size: int) -> None:
    found = sampled(size, METHODS["rejection"], top_k=5)
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.parametrize("size, method", [(6, "rejection"), (6, "target"), (11, "rejection")])
@pytest.mark.some_cases(1)
def test_the_distribution_of_captured_steps(size: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    steps = install(monkeypatch, with_kernel=True)
    found = sampled(size, replace(METHODS[method], cuda_graphs=True), rows=300)
    assert steps.replays > 0 and found.p_value > SIGNIFICANCE, found


@pytest.mark.parametrize(
    "size, with_graphs", [(6, False), (11, False), (6, True)], ids=["smaller", "larger", "smaller, steps"]
)
@pytest.mark.some_cases(1)
def test_the_distribution_of_requests(size: int, with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = runs_of_steps(monkeypatch)
    if with_graphs:
        install_stand_in(monkeypatch, with_kernel=True)
    target, draft = models_of(size)
    rows = 200 if with_graphs else 600
    torch.manual_seed(0)
    outputs = target.generate_batch(
        [PROMPT["input_ids"][0].tolist()] * rows,
        assistant_model=draft,
        speculative_config=METHODS["rejection"],
        continuous_batching_config=limits(3000, max_requests_per_batch=rows, max_batch_tokens=4 * rows),
        max_new_tokens=LENGTH + 2,
        do_sample=True,
        top_k=0,
    )
    new = torch.tensor([output.generated_tokens[:LENGTH] for output in outputs.values()])
    found = fit(new, expected_tokens("plain"))
    assert (new >= 6).any() and bool(runs) is with_graphs
    assert found.p_value > SIGNIFICANCE, found


@few_or_many
def test_another_distribution_than_was_drawn_from_is_caught(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = DraftModelDrafter.propose

    def shifted(self: DraftModelDrafter, *args: Any) -> Any:
        draft = propose(self, *args)
        return None if draft is None else replace(draft, scores=draft.scores.roll(1, dims=-1))

    monkeypatch.setattr(DraftModelDrafter, "propose", shifted)
    assert sampled(size, METHODS["rejection"]).p_value < 1e-6


def test_logits_over_the_targets_vocabulary() -> None:
    """Foreign ids have left q, which sums to 1, before anything is drawn."""
    logits = torch.randn(2, 3, 7)
    for num_target in (5, 9):
        shared = SharedVocabulary(num_target, 7)
        q = shared.logits(logits).softmax(dim=-1)
        assert q.shape == (2, 3, num_target)
        torch.testing.assert_close(q.sum(dim=-1), torch.ones(2, 3))
        torch.testing.assert_close(q[..., : min(num_target, 7)], logits[..., : min(num_target, 7)].softmax(dim=-1))
        assert not q[..., 7:].any()


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"vocab_size": VOCAB + 1024}, "less than 1,024"),
        ({"vocab_size": 67, "eos_token_id": 5}, "another `eos_token_id` (5, the target's is 2)"),
        ({"vocab_size": 50, "bos_token_id": None}, "another `bos_token_id` (None, the target's is 1)"),
    ],
    ids=str,
)
def test_what_is_another_vocabulary(target: PreTrainedModel, values: dict[str, Any], reason: str) -> None:
    draft = tiny_model(**values)
    for call in (
        lambda: target.generate(**prompts(1, 6), assistant_model=draft, tree="[(0,)]", max_new_tokens=4),
        lambda: target.generate_batch([[5, 6]], assistant_model=draft, tree="[(0,)]", max_new_tokens=4),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        for words in ("`assistant_model`", f"of {values['vocab_size']} tokens", f"one of {VOCAB}", reason):
            assert words in str(caught.value)


def test_without_special_tokens_nothing_tells(target: PreTrainedModel) -> None:
    none: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    target, draft = tiny_model(**none), tiny_model(vocab_size=64, **none)
    with pytest.raises(ValueError, match="of 64 tokens, the target one of 61.*no special tokens"):
        target.generate(**prompts(1, 6), assistant_model=draft, tree="[(0,)]", max_new_tokens=4)


def test_ranks_beyond_what_both_know(target: PreTrainedModel) -> None:
    tree = [(rank,) for rank in range(SMALLER + 1)]
    with pytest.raises(ValueError, match=rf"rank {SMALLER}, but the vocabulary has only {SMALLER}"):
        target.generate(**prompts(1, 6), assistant_model=draft_of(target, SMALLER), tree=tree)
