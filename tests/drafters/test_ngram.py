"""N-gram drafts against a look-up that is slow and obvious, and in calls."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.calls import TREE, assert_same_calls, generate_plain, generate_with_tree, is_ragged
from support.models import prompts, tiny_model
from transformers import LogitsProcessorList, PreTrainedModel

import hf_specdec
from hf_specdec import DraftTree, DynamicTree, NgramDraft, TokenTree
from hf_specdec.drafters import Drafter, DraftRequest
from hf_specdec.plan import SpeculationPlan
from hf_specdec.sequences import Sequences


VOCAB = 50
Paths = dict[tuple[int, ...], float]


# ------------------------------------------------------------------------------------------------ the slow and obvious


def weights_of_continuations(tokens: list[int], min_ngram: int, max_ngram: int, depth: int) -> Paths:
    """
    How much every continuation weighs: for each earlier place where the last n tokens stood, longest n first, what
    came after it counts 4ⁿ / (1 + number of more recent places). Of each n the 16 most recent places count, and a
    place counts for its longest n alone; with 16 places found, shorter n are not looked at. In the order in which they
    were found.
    """
    weights: Paths = defaultdict(float)
    found: list[int] = []
    for size in range(max_ngram, min_ngram - 1, -1):
        places = [
            end
            for end in range(size, len(tokens))
            if size <= len(tokens) and tokens[end - size : end] == tokens[-size:]
        ]
        for age, place in enumerate(reversed(places[-16:])):
            if place not in found:
                found.append(place)
                continuation = tuple(tokens[place : place + depth])
                for length in range(1, len(continuation) + 1):
                    weights[continuation[:length]] += 4.0**size / (1 + age)
        if len(found) >= 16:
            break
    return weights


def children_by_rank(weights: Paths, path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The continuations one token longer, heaviest first, and among equals the one found first."""
    below = [other for other in weights if len(other) == len(path) + 1 and other[:-1] == path]
    return sorted(below, key=lambda other: -weights[other])


def expected_of_static(tree: TokenTree, weights: Paths) -> list[tuple[int, ...]]:
    """What fills the places of a static tree, in the order of its nodes."""
    filled: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for ranks in tree.paths:
        if ranks[:-1] in filled:
            candidates = children_by_rank(weights, filled[ranks[:-1]])
            if ranks[-1] < len(candidates):
                filled[ranks] = candidates[ranks[-1]]
    return [path for ranks, path in filled.items() if ranks]


# -------------------------------------------------------------------------------------------------------- the real one


def started(drafter: Drafter, tree: TokenTree | DynamicTree, sequences: Sequences, vocab_size: int = VOCAB) -> Drafter:
    """The drafter of a call."""
    plan = SpeculationPlan(tree, draws_children=False, uses_rejection=False, disable_by_batch_size=None)
    drafter = drafter.for_call(None)
    drafter.start(sequences, DraftRequest(plan, vocab_size, LogitsProcessorList()))
    return drafter


def proposed(draft: DraftTree | None, row: int = 0) -> list[tuple[int, ...]]:
    """The token paths of a row's nodes that count, in their order."""
    if draft is None:
        return []
    topology = draft.topology
    parents = topology.parents[row if topology.rows > 1 else 0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node, token in enumerate(draft.tokens_list[row], start=1):
        paths.append((*paths[parents[node]], token))
    return [path for path, token in zip(paths[1:], draft.tokens_list[row], strict=True) if token >= 0]


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)
STATIC = [
    TokenTree.chain(1),
    TokenTree.chain(4),
    TokenTree.from_branching((3, 2, 1)),
    TokenTree.parse(TREE),
    TokenTree.parse("[(1,), (0,), (1, 0), (1, 0, 1)]"),  # rank gaps
]


@settings(max_examples=150, deadline=None)
@given(text=texts, sizes=sizes, tree=st.sampled_from(STATIC))
def test_static_trees_are_filled_by_rank(text: list[int], sizes: list[int], tree: TokenTree) -> None:
    sequences = Sequences(torch.tensor([text]))
    drafter = started(NgramDraft(min_ngram=sizes[0], max_ngram=sizes[1]), tree, sequences)
    weights = weights_of_continuations(text, *sizes, tree.depth)
    assert proposed(drafter.propose(sequences)) == expected_of_static(tree, weights)


@settings(max_examples=300, deadline=None)
@given(text=texts, sizes=sizes, limits=st.tuples(st.integers(1, 10), st.integers(1, 3), st.integers(1, 16)))
@example(text=[0, 1, 0, 0, 0, 0, 0, 0], sizes=[1, 3], limits=(4, 1, 3))  # only children, whose shares round up
def test_dynamic_trees_hold_the_likeliest(text: list[int], sizes: list[int], limits: tuple[int, int, int]) -> None:
    """
    No more than the budget allows, every parent before its children, and no candidate that is likelier than what was
    chosen: a path's share is that of its first token among all that were found, times that of the next behind it, …
    """
    depth, top_k, num_nodes = limits
    tree = DynamicTree(depth=depth, top_k=top_k, num_nodes=min(num_nodes, top_k + (depth - 1) * top_k**2))
    sequences = Sequences(torch.tensor([text]))
    drafter = started(NgramDraft(min_ngram=sizes[0], max_ngram=sizes[1]), tree, sequences)
    weights = weights_of_continuations(text, *sizes, depth)
    chosen = proposed(drafter.propose(sequences))

    shares, candidates, frontier = {(): 1.0}, [], [()]
    for _ in range(depth):
        below = []
        for path in frontier:
            ranked = children_by_rank(weights, path)
            total = sum(weights[child] for child in ranked)
            for child in ranked[:top_k]:
                shares[child] = shares[path] * weights[child] / total
                below.append(child)
        candidates += below
        frontier = sorted(below, key=lambda path: -shares[path])[:top_k]

    assert len(chosen) == len(set(chosen)) == min(tree.num_nodes, len(candidates))
    assert all(path[:-1] in ((), *chosen[:place]) for place, path in enumerate(chosen))
    assert max(map(len, chosen), default=0) <= depth
    assert all(len(list(group)) <= top_k for _, group in itertools.groupby(sorted(chosen), key=lambda path: path[:-1]))
    assert set(chosen) <= set(candidates)
    best = sorted((shares[path] for path in candidates), reverse=True)[: len(chosen)]
    assert sorted((shares[path] for path in chosen), reverse=True) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(text=texts, sizes=sizes, cuts=st.lists(st.integers(1, 7), max_size=12), tree=st.sampled_from(STATIC))
def test_a_growing_text_is_looked_up_as_a_whole(
    text: list[int], sizes: list[int], cuts: list[int], tree: TokenTree
) -> None:
    """What is proposed after some steps is what a drafter would propose that starts there; two rows grow apart."""
    start = max(len(text) - sum(cuts), 1)
    other = [(token + 1) % 4 for token in text]
    sequences = Sequences(torch.tensor([text[:start], other[:start]]))
    drafter = started(NgramDraft(min_ngram=sizes[0], max_ngram=sizes[1]), tree, sequences)
    lengths = [start, start]
    for step, cut in enumerate([0, *cuts]):
        row = step % 2
        sequences.extend(row, (text, other)[row][lengths[row] : lengths[row] + cut])
        lengths[row] = sequences.lengths[row]
        draft = drafter.propose(sequences)
        for row, tokens in enumerate((text, other)):
            weights = weights_of_continuations(tokens[: lengths[row]], *sizes, tree.depth)
            assert proposed(draft, row) == expected_of_static(tree, weights)


@settings(max_examples=60, deadline=None)
@given(text=texts, sizes=sizes, padding=st.integers(0, 9), tree=st.sampled_from(STATIC))
def test_padding_is_no_text(text: list[int], sizes: list[int], padding: int, tree: TokenTree) -> None:
    """Padding on the left, with a token that the text has too, changes nothing; the other row has none."""
    ids = torch.tensor([[0] * padding + text, [0] * padding + text])
    visible = torch.ones_like(ids, dtype=torch.bool)
    visible[0, :padding] = False
    sequences = Sequences(ids, visible)
    draft = started(NgramDraft(min_ngram=sizes[0], max_ngram=sizes[1]), tree, sequences).propose(sequences)
    assert proposed(draft, 0) == expected_of_static(tree, weights_of_continuations(text, *sizes, tree.depth))
    whole = [0] * padding + text
    assert proposed(draft, 1) == expected_of_static(tree, weights_of_continuations(whole, *sizes, tree.depth))


@pytest.mark.parametrize("tree", [TokenTree.chain(5), DynamicTree(depth=5, top_k=2, num_nodes=8)], ids=repr)
def test_nothing_deeper_than_there_is_room(tree: TokenTree | DynamicTree) -> None:
    """The step's own token takes the last place of a row; a row without room gets no tokens, the other its own."""
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    for max_length in range(len(text) + 1, len(text) + 8):
        sequences = Sequences(torch.tensor([text, text]), max_length=max_length)
        sequences.extend(1, [3])
        draft = started(NgramDraft(), tree, sequences).propose(sequences)
        for row in range(2):
            room = max_length - len(text) - 1 - row
            assert max(map(len, proposed(draft, row)), default=0) == min(5, max(room, 0))


def test_tokens_beyond_the_vocabulary_are_not_proposed() -> None:
    """Placeholders of images have such ids; nothing below them counts either."""
    sequences = Sequences(torch.tensor([[7, 8, 1, VOCAB + 3, 2, 7, 8]]))
    draft = started(NgramDraft(), TokenTree.chain(4), sequences).propose(sequences)
    assert proposed(draft) == [(1,)]
    assert int(draft.tokens.max()) < VOCAB and int(draft.tokens.min()) >= 0


def test_the_most_recent_and_the_longest_come_first() -> None:
    """An example to read: behind (1, 2) came 5 and later 6, behind (0, 1, 2) came 7."""
    text = [0, 1, 2, 7, 3, 1, 2, 5, 4, 1, 2, 6, 0, 1, 2]
    sequences = Sequences(torch.tensor([text]))
    tree = TokenTree.parse("[(0,), (1,), (2,), (0, 0)]")
    draft = started(NgramDraft(max_ngram=3, min_ngram=2), tree, sequences).propose(sequences)
    assert proposed(draft) == [(7,), (6,), (5,), (7, 3)]


# ------------------------------------------------------------------------------------------------------------ in calls


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model()


@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize(
    "tree", [None, TREE, TokenTree.chain(6), DynamicTree(depth=4, top_k=4, num_nodes=20)], ids=repr
)
@pytest.mark.some_cases(4)
def test_calls(target: PreTrainedModel, tree: Any, batch_size: int) -> None:
    """Greedy text is the same; tiny models repeat themselves, so that much is accepted."""
    inputs = prompts(batch_size, 12, padding=batch_size > 1)
    _, metrics = assert_same_calls(target, NgramDraft(min_ngram=1), inputs, {"max_new_tokens": 40}, tree)
    assert is_ragged(metrics) or batch_size == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_end_at_different_places(target: PreTrainedModel, batch_size: int) -> None:
    inputs = prompts(batch_size, 12, padding=batch_size > 1)
    options = {"max_new_tokens": 40, "eos_token_id": [22, 33], "repetition_penalty": 1.05}
    assert_same_calls(target, NgramDraft(min_ngram=1, max_ngram=2), inputs, options)


def test_where_nothing_is_found_steps_are_plain(target: PreTrainedModel, default_trees: None) -> None:
    """No draft tokens, and forwards over one token each: as plain `generate` has them."""
    widths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    inputs = {"input_ids": torch.arange(3, 40)[None]}
    options = {"max_new_tokens": 12, "no_repeat_ngram_size": 2, "suppress_tokens": list(range(3, 40))}
    try:
        ours = generate_with_tree(target, NgramDraft(max_ngram=4, min_ngram=2), inputs, options, None)
        assert widths == [37] + [1] * 11
    finally:
        handle.remove()
    assert ours.tolist() == generate_plain(target, inputs, options).tolist()
    metrics = hf_specdec.last_metrics()
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (0, 0)
    assert metrics.num_drafts == 11 and metrics.mean_acceptance_length == 1.0


def test_a_drafter_serves_many_calls(target: PreTrainedModel) -> None:
    """What one call looked up is forgotten in the next: the drafter that a user holds has no text."""
    drafter = NgramDraft(min_ngram=1)
    before = dict(vars(drafter))
    first = [assert_same_calls(target, drafter, prompts(1, 12, seed=seed), {"max_new_tokens": 30}) for seed in (0, 1)]
    again = [assert_same_calls(target, drafter, prompts(1, 12, seed=seed), {"max_new_tokens": 30}) for seed in (0, 1)]
    assert vars(drafter) == before
    for (_, then), (_, now) in zip(first, again, strict=True):
        assert now.accepted_per_step == then.accepted_per_step


def test_transformers_own_interface() -> None:
    """As a `CandidateGenerator`: the first path of the tree as a chain."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 1, 2]])
    with pytest.raises(ValueError, match="NgramDraft has not been started.*assistant_model"):
        NgramDraft().get_candidates(ids)
    drafter = started(NgramDraft(), TokenTree.parse("[(0,), (1,), (0, 0), (0, 0, 0)]"), Sequences(ids))
    candidates, scores = drafter.get_candidates(ids)
    assert candidates.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5]] and scores is None
    drafter.update_candidate_strategy(candidates, scores, 3)
