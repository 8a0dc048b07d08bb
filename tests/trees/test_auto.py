"""`tree="auto"` and schedules: what is measured, what is chosen, and that the text stays the same."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE
from support.models import noisy_copy, prompts, tiny_model
from support.parity import plain_text
from support.sampling import a_draft, a_head, fit_samples
from support.simulated import simulated_step
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import DynamicTree, MedusaConfig, MedusaHeads, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.trees import AutoTree, DraftTree, TreeSchedule, as_tree
from hf_specdec.trees.auto import _times, best_plan
from hf_specdec.trees.auto_choice import AutoChoice
from hf_specdec.trees.auto_learning import Acceptances, Ratio, Remembered
from hf_specdec.trees.auto_tables import AcceptanceTable, likeliest_paths
from hf_specdec.trees.step_times import StepTimes, TimeTable


LIMITS = AutoTree(max_nodes=32, max_depth=5, max_children=4)


def times(points: dict[int, float]) -> TimeTable:
    table = TimeTable()
    for number, seconds in points.items():
        table.add(number, seconds)
    return table


# ---------------------------------------------------------------------------------------------------------- the tables


def test_times_between_and_beyond_what_was_measured() -> None:
    assert times({2: 1.0, 4: 3.0}).up_to(6) == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert times({0: 5.0, 10: 3.0}).up_to(20) == [4.0] * 21  # more nodes are never quicker
    assert times({0: 1.0, 1: 9.0, 8: 10.0, 16: 10.8}).up_to(24)[-1] == pytest.approx(11.6)  # not as from 0 to 1
    assert times({3: 2.0}).up_to(1) == [2.0, 2.0]
    table = times({0: 1.0})
    for seconds in (1.0, 1.0, 50.0, 1.0):
        table.add(0, seconds)
    assert table.up_to(0) == [1.0]  # one slow step is no reason


def test_a_number_that_was_seldom_measured_leans_on_the_others() -> None:
    """Four times while the machine was busy; the others 30 times each."""
    table = TimeTable()
    for number in (1, 2, 3, 4, 6):
        for _ in range(4 if number == 4 else 30):
            table.add(number, (10.0 + number) * (1.5 if number == 4 else 1.0))
    assert table.up_to(4)[-1] < 19.0
    assert table.up_to(3)[-1] == pytest.approx(13.0, rel=0.05)


def test_times_that_are_not_seen() -> None:
    """Drafting a tree takes no time of its own where a step with it is as fast as one without."""
    table = TimeTable()
    for number in (1, 2, 3, 4):
        for _ in range(3):
            table.add(number, 0.0)
    assert table.up_to(6) == [0.0] * 7
    table.add(8, 0.01)
    assert 0.0 == table.up_to(8)[1] < table.up_to(8)[8]


def test_likeliest_paths_by_brute_force() -> None:
    chances = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.9, 0.05, 0.02]]
    everything = [(chances[0][a], (a,)) for a in range(3)]
    everything += [(chances[0][a] * chances[1][b], (a, b)) for a in range(3) for b in range(3)]
    everything += [
        (chances[0][a] * chances[1][b] * chances[2][c], (a, b, c))
        for a in range(3)
        for b in range(3)
        for c in range(3)
    ]
    for depth in (1, 2, 3):
        for count in (1, 5, 12):
            wanted = sorted((item for item in everything if len(item[1]) <= depth), reverse=True)[:count]
            found = likeliest_paths(chances, count, depth)
            assert [round(chance, 12) for chance, _ in found] == [round(chance, 12) for chance, _ in wanted]
            tree = TokenTree([path for _, path in found])  # every parent is there
            assert not tree.has_rank_gaps


def test_acceptance_is_learnt() -> None:
    chances = [[0.6, 0.2, 0.1, 0.0], [0.4, 0.3, 0.0, 0.0], [0.9, 0.0, 0.0, 0.0]]
    tree, table, generator = TokenTree.from_branching((3, 2, 1)), AcceptanceTable(3, 4), random.Random(0)
    for _ in range(3000):
        draft, path = simulated_step(tree, chances, generator)
        table.add(draft, [path, None])
    for found, wanted in zip(table.chances(), chances, strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=0.2)
        assert found == sorted(found, reverse=True)
        assert sum(found) <= 1 + 1e-9


def test_calls_begin_with_what_earlier_ones_accepted() -> None:
    """Until enough has been seen: from then on the same call begins in the same way."""
    chances, tree = [[0.3, 0.2, 0.1, 0.05]] * 5, TokenTree.from_branching((2, 2))
    limits, remembered, generator = AutoTree(max_children=4, prior=(0.9,)), Remembered(), random.Random(0)
    dynamic = DynamicTree(depth=2, top_k=2, num_nodes=4)
    seen = []
    for _ in range(12):
        call = Acceptances(limits, remembered)
        seen.append((call.of().chances()[0][0], call.of(None, True).chances()[0][0], call.ratio(False, dynamic).value))
        for _ in range(40):
            draft, path = simulated_step(tree, chances, generator)
            call.add(None, False, draft, [path])
            call.add_ratio(False, dynamic, 1.0, 1.5)
    assert seen[0] == (0.9, 0.9, Ratio.USUAL)
    assert seen[1][0] < 0.5 and seen[1][2] > 1.15
    assert seen[-1] == seen[-2] and abs(seen[-1][0] - 0.3) < 0.06
    assert all(best == 0.9 for _, best, _ in seen)  # of the other way nothing is known


def test_what_was_not_proposed_was_not_wrong() -> None:
    table = AcceptanceTable(1, 2)
    before = table.chances()
    for _ in range(50):
        table.add(DraftTree.empty(1, torch.device("cpu")), [[]])
    assert table.chances()[0] == pytest.approx(before[0])


# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_plan_is_the_best_of_all() -> None:
    """Against every depth and number of nodes, one by one."""
    chances = [[0.7, 0.15, 0.05, 0.02]] * 5
    propose, rest = times({0: 0.0, 1: 1.0, 5: 5.0}), times({0: 20.0, 8: 23.0, 16: 26.0, 32: 33.0})
    plan = best_plan(chances, StepTimes(propose, rest), LIMITS, reach=32, widths=range(1, 33))
    rates = {}
    for depth in range(1, 6):
        for count in range(1, 33):
            found = likeliest_paths(chances, count, depth)
            seconds = propose.up_to(5)[depth] + rest.up_to(32)[len(found)]
            rates[depth, count] = (1 + sum(chance for chance, _ in found)) / seconds
    assert plan.tokens_per_second == pytest.approx(max(rates.values()))
    assert plan.tokens_per_second > 1.5 / 20
    assert plan.tree.depth >= 3


@pytest.mark.parametrize(
    "chances, node, level",
    [
        ([[0.05, 0.01, 0.0, 0.0]] * 5, 0.1, 2.0),  # a bad draft
        ([[0.7, 0.1, 0.05, 0.02]] * 5, 0.1, 60.0),  # a slow one
        ([[0.7, 0.1, 0.05, 0.02]] * 5, 40.0, 1.0),  # a target whose time goes with its nodes: a large batch
    ],
)
def test_no_tree_is_a_choice(chances: list[list[float]], node: float, level: float) -> None:
    propose, rest = times({0: 0.0, 1: level, 5: 5 * level}), times({0: 20.0, 32: 20.0 + 32 * node})
    assert best_plan(chances, StepTimes(propose, rest), LIMITS, reach=32).tree is None


def simulated_steps(choice: AutoChoice, chances: list[list[float]], node: float, level: float, steps: int) -> float:
    """Tokens per second over so many steps, in those of plain decoding."""
    generator, tokens, seconds = random.Random(1), 0, 0.0
    for _ in range(steps):
        tree = choice.begin_step(10)
        draft, path = DraftTree.empty(1, torch.device("cpu")), []
        if tree is not None:
            draft, path = simulated_step(tree, chances, generator)
        propose, rest = level * draft.topology.depth, 20.0 + node * draft.num_nodes
        choice.end_step(draft, [path], propose, rest)
        tokens, seconds = tokens + len(path) + 1, seconds + propose + rest
    return tokens / seconds * 20.0


def test_a_good_draft_is_used_and_a_bad_one_is_not() -> None:
    good, bad = [[0.75, 0.1, 0.05, 0.02]] * 5, [[0.03, 0.01, 0.0, 0.0]] * 5
    assert simulated_steps(AutoChoice(StepTimes(), LIMITS), good, 0.4, 1.0, 300) > 2.2
    for chances, node, level in ((bad, 0.4, 1.0), (good, 5.0, 30.0)):
        times = StepTimes()
        simulated_steps(AutoChoice(times, LIMITS), chances, node, level, 20)
        assert simulated_steps(AutoChoice(times, LIMITS), chances, node, level, 500) > 0.98


def test_a_first_call_of_few_steps() -> None:
    """A slow draft, met by calls of a single step: the next ones still find out what a step without it takes."""
    times, bad = StepTimes(), [[0.1, 0.05, 0.0, 0.0]] * 5
    for _ in range(3):
        simulated_steps(AutoChoice(times, LIMITS), bad, 0.4, 30.0, 1)
    simulated_steps(AutoChoice(times, LIMITS), bad, 0.4, 30.0, 6)
    assert simulated_steps(AutoChoice(times, LIMITS), bad, 0.4, 30.0, 200) > 0.97


def test_a_text_that_changes() -> None:
    """From hopeless to easy and back within one call: the probes see it."""
    good, bad = [[0.8, 0.1, 0.02, 0.01]] * 5, [[0.02, 0.01, 0.0, 0.0]] * 5
    choice, rates = AutoChoice(StepTimes(), LIMITS), []
    for chances, steps in ((bad, 300), (good, 100), (good, 300), (bad, 60), (bad, 300)):
        rates.append(simulated_steps(choice, chances, 0.4, 1.0, steps))
    assert rates[2] > 2.0
    assert rates[4] > 0.97


# ------------------------------------------------------------------------------------------------- in `generate` calls


def drafts_of(target: Any) -> dict[str, Any]:
    config = MedusaConfig(hidden_size=32, vocab_size=target.config.vocab_size, num_heads=2)
    return {
        "draft model": noisy_copy(target, 0.05),
        "n-gram": NgramDraft(min_ngram=1),
        "medusa": MedusaHeads(config).to(target.dtype),
    }


@pytest.mark.parametrize("kind", ["draft model", "n-gram", "medusa"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(1)
def test_the_text_is_the_same(kind: str, batch_size: int) -> None:
    target = tiny_model("llama", attention_sharpness=3.0)
    inputs = prompts(batch_size, 12, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=60)
    draft = drafts_of(target)[kind]
    drafts = 0
    for _ in range(2):  # the second call begins with what the first has measured
        text = target.generate(**inputs, do_sample=False, max_new_tokens=60, assistant_model=draft, tree="auto")
        assert text.tolist() == expected.tolist()
        drafts += hf_specdec.last_metrics().num_drafts
    assert drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["noisy", "head"])
def test_sampled_texts_fit_the_enumeration(draft: str) -> None:
    assistant = a_head(5) if draft == "head" else a_draft(draft)
    assert fit_samples(SpeculativeConfig(tree="auto"), assistant, "plain").p_value > SIGNIFICANCE


def test_times_go_with_their_models() -> None:
    target = tiny_model("llama")
    target.generate(**prompts(1, 5), max_new_tokens=8, assistant_model=NgramDraft(), tree="auto")
    assert target in _times
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_a_schedule_by_length() -> None:
    target = tiny_model("llama", seed=1)
    schedule = [(0, "[(0,), (1,), (0,0)]"), (20, None), (28, TokenTree.chain(1)), (36, "auto")]
    seen = []

    class Recording(NgramDraft):
        def propose(self, sequences):
            seen.append((sequences.longest, self.request.tree))
            return super().propose(sequences)

    inputs = prompts(1, 12)
    expected = plain_text(target, inputs, max_new_tokens=40)
    text = target.generate(
        **inputs, do_sample=False, max_new_tokens=40, assistant_model=Recording(min_ngram=1), tree=schedule
    )
    assert text.tolist() == expected.tolist()
    assert {tree for length, tree in seen if length < 20} == {TokenTree.parse("[(0,), (1,), (0,0)]")}
    assert not [length for length, _ in seen if 20 <= length < 28]
    assert {tree for length, tree in seen if 28 <= length < 36} == {TokenTree.chain(1)}
    assert [tree for length, tree in seen if length >= 36]


def test_saved_and_read_again(tmp_path: Any) -> None:
    dynamic = DynamicTree(depth=2, top_k=2, num_nodes=4)
    for tree in ("auto", [(0, "[(0,)]"), (9, "auto"), (12, None), (20, dynamic)]):
        value = as_tree(tree)
        assert as_tree(value.to_dict()) == value
        GenerationConfig(tree=SpeculativeConfig(tree=tree).to_dict()["tree"]).save_pretrained(tmp_path)
        assert as_tree(GenerationConfig.from_pretrained(tmp_path).tree) == value
    assert isinstance(as_tree([(0, "[(0,)]")]), TreeSchedule)
    assert isinstance(as_tree([(0,), (0, 1), (0, 0)]), TokenTree)
