"""Calls for which no tree is asked: on a CPU "auto", whose choices change neither the text nor its distribution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import plain_text
from support.sampling import a_draft, a_head, fit_samples

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.drafters import Drafter
from hf_specdec.plan import SpeculationPlan
from hf_specdec.sequences import Sequences
from hf_specdec.trees import AutoTree, DraftTree, Topology
from hf_specdec.trees.step_times import StepTimes
from hf_specdec.verification import PositionNoise, draw_by_position


TARGET = tiny_model("llama", attention_sharpness=3.0)


def drafts() -> dict[str, dict[str, Any]]:
    return {
        "n-gram": {"assistant_model": NgramDraft()},
        "draft model": {"assistant_model": noisy_copy(TARGET, 0.05), "speculative_config": SpeculativeConfig()},
        "head": {"assistant_model": tiny_head(TARGET)},
    }


@pytest.fixture
def shuffled_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measured time is another than the clock's, so that calls choose other trees."""
    numbers = itertools.count()
    add = StepTimes.add

    def shuffled(times: StepTimes, tree: Any, depth: int, num_nodes: int, propose: float | None, rest: float) -> None:
        factor = 1.0 + (next(numbers) * 7919 % 13) / (1.0 + num_nodes)
        add(times, tree, depth, num_nodes, None if propose is None else 1e-4 * factor, 1e-3 * factor)

    monkeypatch.setattr(StepTimes, "add", shuffled)


@pytest.mark.parametrize("kind", ["n-gram", "draft model", "head"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.some_cases(1)
def test_a_seed_reproduces_a_call(kind: str, rows: int, shuffled_times: None) -> None:
    inputs, options, texts, trees = prompts(rows, 12, padding=True), drafts()[kind], [], []
    if kind == "n-gram":  # which find something in a text that repeats itself
        inputs["input_ids"][:, -6:] = torch.tensor([5, 6, 7, 5, 6, 7])
        options = options | {"temperature": 0.05}
    for _ in range(3):
        torch.manual_seed(5)
        output = TARGET.generate(
            **inputs, do_sample=True, max_new_tokens=40, return_dict_in_generate=True, pad_token_id=0, **options
        )
        texts.append(output.sequences.tolist())
        trees.append((output.speculation.num_drafts, output.speculation.num_draft_tokens))
    assert texts[0] == texts[1] == texts[2]
    assert len(set(trees)) > 1  # not for want of other trees


@pytest.mark.slow
def test_draws_at_a_position_do_not_depend_on_the_draft() -> None:
    inputs, texts = prompts(1, 12), []
    for options in drafts().values():
        torch.manual_seed(5)
        texts.append(TARGET.generate(**inputs, do_sample=True, max_new_tokens=40, **options).tolist())
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ["draft model", "n-gram"])
@pytest.mark.some_cases(1)
def test_a_seed_reproduces_a_batch(kind: str, shuffled_times: None) -> None:
    requests, texts = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3], [9, 4, 9, 4, 9]], []
    for _ in range(2):
        torch.manual_seed(5)
        outputs = TARGET.generate_batch(requests, do_sample=True, max_new_tokens=30, **drafts()[kind])
        texts.append([output.generated_tokens for output in outputs.values()])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["noisy", "head"])
@pytest.mark.parametrize("tree", [None, "auto"])
def test_the_distribution_is_the_target_s(draft: str, tree: str | None) -> None:
    assistant = a_head(5) if draft == "head" else a_draft(draft)
    assert fit_samples(SpeculativeConfig(tree=tree), assistant, "temperature").p_value > SIGNIFICANCE


@pytest.mark.parametrize("kind", ["n-gram", "draft model", "head"])
@pytest.mark.some_cases(2)
def test_greedy_texts_are_plain(kind: str, shuffled_times: None) -> None:
    inputs = prompts(3, 12, padding=True)
    expected = plain_text(TARGET, inputs, max_new_tokens=40)
    for _ in range(2):
        text = TARGET.generate(**inputs, do_sample=False, max_new_tokens=40, pad_token_id=0, **drafts()[kind])
        assert text.tolist() == expected.tolist()


def test_what_is_chosen_by_default() -> None:
    options = {"has_probabilities": True, "do_sample": True, "vocab_size": 100, "default_tree": TokenTree.chain(4)}
    on_gpu = SpeculationPlan.resolve(SpeculativeConfig(), **options)
    assert on_gpu.tree == TokenTree.chain(4) and on_gpu.uses_rejection and not on_gpu.draws_by_position
    plan = SpeculationPlan.resolve(SpeculativeConfig(), **options, on_cpu=True, reads_noise=True, prior=[0.7])
    assert isinstance(plan.tree, AutoTree) and plan.tree.first == TokenTree.chain(4) and plan.tree.prior == (0.7,)
    assert plan.draws_children and plan.draws_by_position and not plan.uses_rejection
    asked = SpeculationPlan.resolve(SpeculativeConfig(tree="[(0,)]"), **options, on_cpu=True)
    assert asked.tree == TokenTree.chain(1) and asked.uses_rejection and not asked.draws_by_position
    by_name = SpeculationPlan.resolve(SpeculativeConfig(tree="auto"), **options, on_cpu=True, reads_noise=True)
    assert by_name.tree == AutoTree(first=TokenTree.chain(4), takes_either=True)
    for own in (SpeculativeConfig(verification="rejection"), SpeculativeConfig()):  # or children are drawn otherwise
        tested = SpeculationPlan.resolve(own, **options, on_cpu=True, reads_noise=own.verification == "rejection")
        assert tested.tree == TokenTree.chain(4) and tested.uses_rejection and not tested.draws_by_position


def test_a_head_s_prior_comes_from_its_training() -> None:
    from hf_specdec.drafters import as_drafter

    head = tiny_head(TARGET)
    assert as_drafter(head).prior is None
    head.config.recipe = {"held_out_top1": [0.8, 0.7]}
    assert as_drafter(head).prior == (0.8, 0.7)
    for damaged in ({"held_out_top1": 3}, {"held_out_top1": ["a"]}, {"held_out_top1": [2.0]}, {}):
        head.config.recipe = damaged
        assert as_drafter(head).prior is None


@pytest.mark.parametrize("repeats", [False, True])
def test_n_grams_without_a_match_cost_no_drafts(repeats: bool) -> None:
    """Of a text that never repeats itself nothing is proposed, and the drafter is not asked."""
    asked = 0

    class Counting(NgramDraft):
        def propose(self, sequences: Any) -> Any:
            nonlocal asked
            asked += 1
            return super().propose(sequences)

    ids = torch.arange(3, 20)[None]

    def next_token(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        number = text.shape[1] - ids.shape[1]
        token = 20 + number % 5 if repeats else 20 + number
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "logits_processor": [next_token]}
    TARGET.generate(input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=Counting(), **options)
    assert (asked > 0) is repeats


def test_an_invalid_default_tree_is_refused() -> None:
    head = tiny_head(TARGET)
    head.config.default_tree = DynamicTree(depth=1, top_k=1000, num_nodes=1000).to_dict()
    with pytest.raises(ValueError, match="rank"):
        TARGET.generate(**prompts(1, 5), max_new_tokens=5, assistant_model=head)


class Own(Drafter):
    """A drafter of a user's own, which knows what it may ask of its request."""

    default_tree = TokenTree.chain(2)
    prior = [0.7, 0.6]

    def __init__(self, evidence: Any = None):
        self._evidence = evidence

    def evidence(self, sequences: Sequences) -> Any:
        if isinstance(self._evidence, Exception):
            raise self._evidence
        return self._evidence

    def propose(self, sequences: Sequences) -> DraftTree:
        noise = self.request.noise(sequences.lengths)
        if noise is not None:
            logits = torch.zeros(len(sequences.lengths), 1, self.request.vocab_size)
            assert noise(0, logits).shape == logits.shape
        tokens = torch.full((len(sequences.lengths), 1), 7)
        return DraftTree(tokens, Topology.of_tree(TokenTree.chain(1), tokens.device)).within(
            [sequences.room(row) for row in range(len(sequences.lengths))]
        )


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("evidence", [None, {0: 0.333}])
def test_drafters_of_ones_own_in_a_batch(do_sample: bool, evidence: Any) -> None:
    """Each request has one, with its own noise; without evidence it always has something to propose."""
    options = {"assistant_model": Own(evidence), "do_sample": do_sample, "max_new_tokens": 20}
    outputs = TARGET.generate_batch([[5, 6, 7], [1, 2, 3, 4]], **options)
    assert all(output.error is None and len(output.generated_tokens) == 20 for output in outputs.values())
    assert all(output.speculation.num_draft_tokens > 0 for output in outputs.values())


def test_an_error_of_evidence_fails_its_request_alone() -> None:
    class Picky(Own):
        def evidence(self, sequences: Sequences) -> Any:
            if sequences.tokens(0, 0)[0] == 9:
                raise RuntimeError("mine")
            return {0: 0.5}

    outputs = TARGET.generate_batch([[5, 6, 7], [9, 2, 3, 4]], assistant_model=Picky(), max_new_tokens=20)
    well, ill = outputs.values()
    assert well.error is None and len(well.generated_tokens) == 20 and "mine" in ill.error


def test_noise_is_float32_whatever_the_default() -> None:
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert PositionNoise(3, torch.device("cpu")).at(5, 100).dtype == torch.float32
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.slow
def test_draws_by_position_of_large_scores() -> None:
    scores, count = torch.full((1, 2), 1e7), 2000
    noise = PositionNoise(3, torch.device("cpu"))
    drawn = sum(int(draw_by_position(scores, [noise.take(place, 2)])) for place in range(count))
    assert abs(drawn / count - 0.5) < 0.06


@pytest.mark.parametrize("is_on", [False, True])
def test_on_a_gpu_sampled_calls_may_choose(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    One switch makes "auto" their default, but for compiled ones, and drafters that do not draw by position; greedy
    calls keep the draft's own tree.
    """
    monkeypatch.setattr("hf_specdec.plan.SAMPLED_CALLS_CHOOSE_ON_GPU", is_on)
    given: dict[str, Any] = {"default_tree": TokenTree.chain(5), "has_probabilities": True, "vocab_size": 32}
    for asked, do_sample in itertools.product(
        (SpeculativeConfig(), SpeculativeConfig(compile=True), SpeculativeConfig(tree="chain:2")), (False, True)
    ):
        for reads_noise in (False, True):
            plan = SpeculationPlan.resolve(asked, do_sample=do_sample, on_cpu=False, reads_noise=reads_noise, **given)
            chooses = is_on and do_sample and reads_noise and asked == SpeculativeConfig()
            assert isinstance(plan.tree, AutoTree) == plan.draws_by_position == chooses
            assert plan.uses_rejection == (do_sample and not chooses)
