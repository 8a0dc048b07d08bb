"""`tree="auto"` among few trees, on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from hf_specdec.trees import DraftTree, Topology
from hf_specdec.trees.auto import AutoTree
from hf_specdec.trees.auto_tables import AcceptanceTable, expected_length, likeliest_paths
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.candidate_trees import CandidateTrees
from hf_specdec.trees.token_tree import TokenTree
from hf_specdec.trees.trials import Trials
from hf_specdec.trees.whole_times import WholeTimes


LIMITS = AutoTree()
GOOD, BAD = [[0.8, 0.1, 0.0]] * 8, [[0.1, 0.05, 0.0]] * 8

Machine = Callable[[TokenTree | None], float]
"""Seconds that a step with a tree takes."""


def machine(node: float, level: float) -> Machine:
    """One on which every draft node, and every level, takes so long, where a plain step takes 1."""
    return lambda tree: 1.0 if tree is None else 1.0 + node * tree.num_nodes + level * tree.depth


def warm_times(seconds: Machine) -> WholeTimes:
    """As after warming up."""
    times = WholeTimes()
    for tree in (None, *CandidateTrees(LIMITS).trees):
        for _ in range(3):
            times.add(tree, seconds(tree))
    return times


def choice_with(times: WholeTimes) -> CandidateChoice:
    return CandidateChoice(times, LIMITS, AcceptanceTable(LIMITS.max_depth, LIMITS.max_children))


def path_through(tree: TokenTree, chances: list[list[float]], draws: random.Random) -> list[int]:
    """The accepted nodes of a step, numbered from 1."""
    path: tuple[int, ...] = ()
    while len(path) < len(chances):
        (rank,) = draws.choices(range(len(chances[0]) + 1), [*chances[len(path)], 1 - sum(chances[len(path)])])
        if (*path, rank) not in tree.paths:
            break
        path = (*path, rank)
    return [tree.paths.index(path[:depth]) + 1 for depth in range(1, len(path) + 1)]


def gain(choice: CandidateChoice, chances: list[list[float]], seconds: Machine, steps: int, seed: int = 0) -> float:
    """Tokens per second of some steps, over those of plain ones."""
    draws, tokens, spent = random.Random(seed), 0, 0.0
    for _ in range(steps):
        tree = choice.begin_step(100)
        path = [] if tree is None else path_through(tree, chances, draws)
        choice.end_whole_step(tree, [] if tree is None else [path], seconds(tree))
        tokens += 1 + len(path)
        spent += seconds(tree)
    return tokens / (spent / seconds(None))


def test_acceptance_of_whole_trees() -> None:
    """The same as of trees some of whose nodes may be missing, where none is."""
    tables = [AcceptanceTable(8, 3) for _ in range(2)]
    draws = random.Random(0)
    for tree in CandidateTrees(LIMITS).trees:
        paths = 2 * [path_through(tree, GOOD, draws) for _ in range(5)]
        topology = Topology.of_tree(tree, torch.device("cpu"))
        tables[0].add(DraftTree(torch.zeros(11, tree.num_nodes, dtype=torch.long), topology), [None, *paths])
        tables[1].add_whole(tree, [*paths, None])
        expected, found = (table.chances() for table in tables)
        assert found == [pytest.approx(chances) for chances in expected]


@pytest.mark.parametrize(
    ("plain", "draft", "level", "node"),
    [(2.9, 0.35, 0.17, 0.006), (3.1, 0.35, 0.19, 0.03), (3.4, 0.5, 0.18, 0.07), (6.5, 0.3, 0.55, 0.01)],
    ids=["1 row", "8 rows", "64 rows", "large"],
)
@pytest.mark.parametrize(
    "chances", [(0.7, 0.1, 0.05, 0.03), (0.45, 0.13, 0.07, 0.04), (0.42, 0.2, 0.12, 0.07)], ids=str
)
def test_candidates_have_a_tree_for_every_text(
    plain: float, draft: float, level: float, node: float, chances: tuple[float, ...]
) -> None:
    """On machines like a GPU, in milliseconds of plain steps and more of drafts: one is within 6 % of the best."""
    table = [[*chances, 0.0]] * LIMITS.max_depth

    def rate(tree: TokenTree) -> float:
        return expected_length(tree.paths, table) / (plain + draft + level * tree.depth + node * tree.num_nodes)

    shapes = [(nodes, levels) for nodes in range(1, 65) for levels in range(1, LIMITS.max_depth + 1)]
    best = max(rate(TokenTree([path for _, path in likeliest_paths(table, *shape)])) for shape in shapes)
    assert max(map(rate, CandidateTrees(LIMITS).trees)) > 0.94 * best


def test_what_is_timed_is_known() -> None:
    times = WholeTimes()
    assert not times.are_known and not times.has(None)
    tree = TokenTree.chain(4)
    for seconds in (2.0, 2.0, 9.0):
        times.add(None, seconds)
    times.add(tree, 3.0)
    assert times.are_known and (times.of(None), times.of(tree), times.best_of(None)) == (2.0, 3.0, 2.0)
    assert 2.0 <= times.of(TokenTree.chain(2)) <= 3.0


def test_a_plan_computes_what_it_needs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes about a millisecond on the device; what has not changed since the last one is kept."""
    seconds = machine(node=0.02, level=0.05)
    choice, draws = choice_with(warm_times(seconds)), random.Random(0)
    computed = list[AcceptanceTable]()
    own = AcceptanceTable._computed
    monkeypatch.setattr(AcceptanceTable, "_computed", lambda table: computed.append(table) or own(table))
    gain(choice, GOOD, seconds, 40)
    assert 10 < len(computed) <= 40
    chances, expected = choice.learning.acceptance.chances(), choice.rate(choice.candidates[-1])
    assert choice.learning.acceptance.chances() is chances
    path = path_through(choice.candidates[-1], BAD, draws)
    choice.end_whole_step(choice.candidates[-1], [path], 2 * seconds(choice.candidates[-1]))
    assert choice.learning.acceptance.chances() != chances and choice.rate(choice.candidates[-1]) != expected


def test_the_load_is_believed_of_what_is_not_in_use() -> None:
    times, (used, other) = warm_times(machine(0.05, 0.05)), CandidateTrees(LIMITS).trees[:2]
    first = times.of(other)
    for _ in range(times.OLD):
        assert not times.is_old(other) or times.steps > times.OLD
        times.add(used, 2 * 1.1)
    assert times.is_old(other) and 1.2 * first < times.of(other) < 2 * first
    for _ in range(3):
        times.add(other, 3 * first)
    assert not times.is_old(other) and 2.4 * first < times.of(other) < 3 * first
    assert times.best_of(other) == first


def test_one_lucky_time_is_not_believed() -> None:
    times, (used, other) = warm_times(machine(0.05, 0.05)), CandidateTrees(LIMITS).trees[:2]
    first = times.of(other)
    for _ in range(500):
        times.add(used, 2 * 1.1)
    times.add(other, first)
    assert times.of(other) > 1.4 * first


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_good_draft_is_used(is_warm: bool) -> None:
    cheap = machine(0.002, 0.02)
    assert gain(choice_with(warm_times(cheap) if is_warm else WholeTimes()), GOOD, cheap, 600) > 2.5


@pytest.mark.parametrize("seconds", [machine(0.05, 0.05), machine(0.01, 0.5), machine(0.4, 0.0)])
@pytest.mark.some_cases(1)
def test_a_bad_one_costs_next_to_nothing(seconds: Machine) -> None:
    choice = choice_with(warm_times(seconds))
    gain(choice, BAD, seconds, 20)
    assert gain(choice, BAD, seconds, 2000) > 0.98


def test_a_time_that_was_bad_once_is_looked_at_again() -> None:
    """As where prompts were read beside the last steps without a tree, before one came to be in use."""
    seconds = machine(0.2, 0.1)
    times = warm_times(seconds)
    for _ in range(7):
        times.add(None, 9.0)
    choice = choice_with(times)
    gain(choice, BAD, seconds, 300)
    assert gain(choice, BAD, seconds, 2000) > 0.97
    cheap = machine(0.002, 0.02)
    times = warm_times(cheap)
    for tree in CandidateTrees(LIMITS).trees:
        for _ in range(7):
            times.add(tree, 40.0)
    choice = choice_with(times)
    gain(choice, GOOD, cheap, 300)
    assert gain(choice, GOOD, cheap, 1000) > 2.5


def test_a_tree_that_gains_little_is_not_taken_for_a_load_that_slows_trees_alone() -> None:
    """What is believed of plain steps while a tree is in use comes from the tree's: too slow by far."""
    idle = machine(0.02, 0.09)
    chances = [[0.37, 0.08, 0.05]] + [[0.33, 0.08, 0.05]] * 7

    def loaded(tree: TokenTree | None) -> float:
        return idle(tree) * (1.0 if tree is None else 1.4)

    choice = choice_with(warm_times(idle))
    assert gain(choice, chances, idle, 100) > 1.1
    assert gain(choice, chances, loaded, 100) > 0.9
    assert gain(choice, chances, loaded, 1000) > 0.98


@pytest.mark.parametrize("best", [0.3, 0.37, 0.45])
def test_a_load_under_which_no_tree_gains(best: float) -> None:
    """It slows plain steps, too, and no two take the same time: what is spent on knowing that stays within bounds."""
    idle, draws, spent, plain = machine(0.02, 0.09), random.Random(0), 0.0, 0.0
    chances = [[best, 0.08, 0.05]] + [[best - 0.04, 0.08, 0.05]] * 7
    choice, tokens = choice_with(warm_times(idle)), 0.0
    gain(choice, chances, idle, 100)
    for step in range(900):
        tree = choice.begin_step(100)
        paths = [] if tree is None else [path_through(tree, chances, draws) for _ in range(16)]
        noise = 1 + 0.1 * abs(draws.gauss(0, 1))
        choice.end_whole_step(tree, paths, noise * idle(tree) * (1.2 if tree is None else 1.8))
        if step >= 200:
            tokens += 1 + (sum(map(len, paths)) / 16 if paths else 0)
            spent += noise * idle(tree) * (1.2 if tree is None else 1.8)
            plain += noise * 1.2
    assert tokens / spent > 0.965 * 700 / plain


def test_no_tree_is_looked_at_as_soon_as_steps_are_slower() -> None:
    idle = machine(0.002, 0.02)
    choice = choice_with(warm_times(idle))
    gain(choice, GOOD, idle, 300)
    seen = []
    for _ in range(40):
        tree = choice.begin_step(100)
        seen.append(tree)
        choice.end_whole_step(tree, [] if tree is None else [[]], 2 * idle(tree))
    assert None in seen and None not in seen[:10]


def test_looks_are_few() -> None:
    """Where what did well once does not any more, fewer and fewer steps are spent on it."""
    times = warm_times(machine(0.002, 0.02))
    now = machine(0.2, 0.1)
    choice = choice_with(times)
    gain(choice, BAD, now, 500)
    draws, taken = random.Random(0), []
    for _ in range(4000):
        taken.append(choice.begin_step(100))
        path = [] if taken[-1] is None else path_through(taken[-1], BAD, draws)
        choice.end_whole_step(taken[-1], [] if taken[-1] is None else [path], now(taken[-1]))
    small = TokenTree.chain(2)
    assert 0 < sum(tree is not None and tree.paths != small.paths for tree in taken) < 80
    assert sum(map(now, taken)) < 1.02 * len(taken)


def test_steps_of_both_kinds_are_timed_apart() -> None:
    """Those in parts count until there are whole ones, which are several times as fast."""
    times, tree = WholeTimes(), TokenTree.chain(2)
    for one in (None, tree):
        times.add(one, 9.0, is_whole=False)
    assert times.of(None) == 9.0
    times.add(None, 2.0)
    times.add(tree, 9.0, is_whole=False)
    assert times.of(None) == 2.0 and not times.has(tree)


def test_few_nodes_are_left() -> None:
    cheap = machine(0.002, 0.02)
    choice = choice_with(warm_times(cheap))
    gain(choice, GOOD, cheap, 100)
    choice.most_nodes = 3
    assert gain(choice, GOOD, cheap, 100) > 1.5
    assert all(tree is None or tree.num_nodes <= 3 for tree in (choice.begin_step(9) for _ in range(300)))


def test_times_of_other_trees_are_estimated_from_one() -> None:
    """A third of what it adds for the tree, for its levels and for its nodes; from several by least squares."""
    times, seconds = WholeTimes(), machine(0.05, 0.3)
    small, other = TokenTree.chain(2), TokenTree.from_branching((4, 2, 1))
    assert times.reach == 0
    times.add(None, 1.0)
    times.add(small, seconds(small))
    assert times.reach == times.REACH * 2
    assert times.of(TokenTree.chain(4)) == pytest.approx(1.0 + (seconds(small) - 1.0) * (1 + 2 + 2) / 3)
    for tree in (other, TokenTree.chain(5)):
        times.add(tree, seconds(tree))
    tree = TokenTree.from_branching((2, 2, 2))
    assert times.of(tree) == pytest.approx(seconds(tree), rel=0.05)


def test_steps_that_nobody_times_are_tried_a_few_times_and_no_more() -> None:
    choice = choice_with(WholeTimes())
    taken = []
    for _ in range(100):
        taken.append(choice.begin_step(100))
        choice.end_whole_step(taken[-1], [] if taken[-1] is None else [[]], None)
    assert sum(tree is not None for tree in taken) <= Trials.MOST_OF_FIRST + Trials.ENOUGH
    assert not any(taken[50:])


def call_with(seconds: Machine) -> CandidateChoice:
    """The choice of a later call, whose graphs are steps without a tree and with nine nodes."""
    first = TokenTree([path for _, path in likeliest_paths([[0.6, 0.12, 0.05]] * 4, 9, 4)])
    limits, times = AutoTree(first=first), WholeTimes()
    for tree in 3 * (None, first):
        times.add(tree, seconds(tree))
    choice = CandidateChoice(times, limits, AcceptanceTable(limits.max_depth, limits.max_children), is_of_calls=True)
    choice.ready, choice.captures.is_closed = frozenset({None, first}), True
    return choice


def test_bad_luck_at_the_beginning_is_not_the_end() -> None:
    """Of a text with which a tree gains half as much again: a few rejected drafts prove nothing."""
    seconds = machine(node=0.02, level=0.055)  # nine nodes: 1.4
    fair = [[0.45, 0.165, 0.055]] * 8
    assert min(gain(call_with(seconds), fair, seconds, 80, seed) for seed in range(20)) > 1.25
    assert sum(gain(call_with(seconds), BAD, seconds, 120, seed) for seed in range(20)) > 20 * 0.96


def test_a_probe_goes_on_while_it_gains() -> None:
    """After a difficult beginning: one lucky step would not change the plan."""
    seconds = machine(node=0.02, level=0.055)
    choice = call_with(seconds)
    assert gain(choice, [[0.0] * 3] * 8, seconds, 40) < 1.0 and choice.begin_step(100) is None
    (tree,) = (tree for tree in choice.ready or () if tree is not None)
    waited = 0
    while choice.begin_step(100) is None:
        choice.end_whole_step(None, [], 1.0)
        waited += 1
        assert waited < 80
    for _ in range(5):
        choice.end_whole_step(tree, [[1, 2]], seconds(tree))
        assert choice.begin_step(100) == tree


def test_a_probe_that_gains_becomes_the_plan() -> None:
    """Soon, so that its steps are launched ahead; and the plan is the best tree, not the one that was tried."""
    seconds = machine(node=0.0, level=0.055)
    choice = call_with(seconds)
    deep, short = TokenTree.chain(8), TokenTree.chain(2)
    choice.candidates += [deep, short]
    choice.ready = frozenset({*(choice.ready or ()), deep, short})
    gain(choice, [[0.0] * 3] * 8, seconds, 60)
    perfect, taken = [[1.0, 0.0, 0.0]] * 8, list[TokenTree | None]()
    for _ in range(90):
        tree = choice.begin_step(100)
        taken.append(tree)
        path = [] if tree is None else path_through(tree, perfect, random.Random(0))
        choice.end_whole_step(tree, [] if tree is None else [path], seconds(tree))
    assert taken[-20:] == 20 * [deep] and not choice.explores and choice.begin_next()


def test_texts_that_change() -> None:
    seconds = machine(0.01, 0.05)
    choice = choice_with(warm_times(seconds))
    assert gain(choice, GOOD, seconds, 400) > 1.8
    gain(choice, BAD, seconds, 100)
    assert gain(choice, BAD, seconds, 1000) > 0.97
    gain(choice, GOOD, seconds, 600)
    assert gain(choice, GOOD, seconds, 400) > 1.8


def test_steps_that_nobody_times_do_not_keep_it_without_trees() -> None:
    """As while prompts are read beside every step: to have become slower is a reason to look once, not for ever."""
    idle = machine(0.002, 0.02)
    choice = choice_with(warm_times(idle))
    gain(choice, GOOD, idle, 300)
    for _ in range(31):
        choice.times.add(choice._planned, 3 * idle(choice._planned))
    taken, draws = [], random.Random(0)
    for _ in range(600):
        taken.append(tree := choice.begin_step(100))
        choice.end_whole_step(tree, [] if tree is None else [path_through(tree, GOOD, draws)], None)
    assert 0 < taken.count(None) < 60


@pytest.mark.parametrize("share_timed", [1.0, 0.6])
@pytest.mark.some_cases(1)
def test_what_a_head_reads_for_a_look_is_paid_for(share_timed: float) -> None:
    """Behind plain steps it has to read before there can be a tree, which none of the timed steps shows."""
    seconds, draws = machine(0.01, 0.05), random.Random(0)
    choice = choice_with(warm_times(seconds))
    gain(choice, BAD, seconds, 1000)
    tokens = spent = waiting = looks = 0
    for _ in range(4000):
        tree, took = choice.begin_step(100), 1.0
        only_read = tree is not None and waiting > 3
        path = [] if tree is None or only_read else path_through(tree, BAD, draws)
        took = 2.0 if only_read else seconds(tree)
        waiting = 0 if tree is not None else waiting + 1
        looks += bool(tree is not None and not only_read)
        is_timed = draws.random() < share_timed
        choice.end_whole_step(None if only_read else tree, [path], took if is_timed else None, only_read)
        if only_read:
            choice.defer()
        tokens, spent = tokens + 1 + len(path), spent + took
    assert looks > 10
    assert tokens / spent > 0.98
    assert choice.times.of(None) == pytest.approx(1.0)


def test_steps_in_which_a_head_only_reads_are_no_measure_of_others() -> None:
    choice = choice_with(WholeTimes())
    choice.end_whole_step(None, [], 2.0, only_read=True)
    assert not choice.times.has(None)
    choice.end_whole_step(None, [], 1.0)
    choice.end_whole_step(None, [], 2.0, only_read=True)
    assert choice.times.of(None) == 1.0


@pytest.mark.slow
def test_good_times_do_not_pay_for_many_bad_ones() -> None:
    seconds = machine(0.5, 0.1)
    good, choice = machine(0.002, 0.02), choice_with(warm_times(seconds))
    gain(choice, GOOD, good, 8000)
    gain(choice, BAD, seconds, 400)  # learns that it does not pay
    assert gain(choice, BAD, seconds, 600) > 0.97
