"""What `tree="auto"` learns of a text: how often draft tokens are accepted."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .token_tree import TokenTree


class AcceptanceTable:
    """
    Acceptance probability of the child of rank r at depth d, given an accepted parent, as running averages.

    Args:
        max_depth (`int`), max_children (`int`): number of depths and of ranks that are counted.
        prior (`Sequence[float]`, *optional*): probability of the child of rank 0 by depth, before anything is counted;
            deeper levels take the last one. Defaults to `FIRST_GUESS`.
        guesses (`list[list[float]]`, *optional*): probabilities `[depth][rank]` before anything is counted, in place
            of `prior`.
        weight (`float`, *optional*): weight in drafts of these probabilities, and of a rank's average over all depths
            in the estimate for one depth. Defaults to `WEIGHT`.
    """

    FIRST_GUESS = (0.6, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
    """Prior acceptance probability by rank, of the order that the papers of EAGLE and SpecInfer report."""
    WEIGHT = 4.0
    """Usual weight of the prior."""
    DECAY = 0.985
    """Factor by which earlier counts shrink at every step."""

    def __init__(
        self,
        max_depth: int,
        max_children: int,
        prior: Sequence[float] | None = None,
        guesses: list[list[float]] | None = None,
        weight: float = WEIGHT,
    ):
        self._weight = weight
        self._chances: list[list[float]] | None = None
        """The present chances; None if they are yet to be computed."""
        depths, ranks = range(max_depth), range(max_children)
        self._hits = [[0.0 for _ in ranks] for _ in depths]
        self._trials = [[0.0 for _ in ranks] for _ in depths]
        best = prior or self.FIRST_GUESS[:1]
        self._guesses = guesses or [
            self._guesses_below(best[min(depth, len(best) - 1)], max_children) for depth in depths
        ]

    def _guesses_below(self, best: float, max_children: int) -> list[float]:
        """Prior probabilities by rank, that of rank 0 being `best`: the others share what is left as usual."""
        best = min(best, 0.97)
        usual = [self.FIRST_GUESS[min(rank, len(self.FIRST_GUESS) - 1)] for rank in range(max_children)]
        return [best] + [rate * min((1.0 - best) / (1.0 - usual[0]), best / usual[0]) for rate in usual[1:]]

    def add(self, draft: DraftTree, paths: list[list[int] | None]) -> None:
        """
        Counts one step: at every node reached, which of its drafted children was accepted. Places where the drafter
        proposed nothing count neither as accepted nor as rejected.
        """
        self.grow_older()
        for number, path in enumerate(paths):
            if path is not None:
                self._add_path(path, partial(drafted_children, draft, number))
        self._chances = None

    def add_whole(self, tree: TokenTree, paths: list[list[int] | None]) -> None:
        """
        Counts one step in which every row drafted all nodes of `tree`; `paths` holds the accepted nodes per row (None:
        rested).
        """
        self.grow_older()
        children = tree.children
        for path, times in Counter(tuple(path) for path in paths if path is not None).items():
            self._add_path(path, children.__getitem__, times)
        self._chances = None

    def add_offered(self, rows: Iterable[tuple[Sequence[int], Sequence[int]]], num_ranks: int = 0) -> None:
        """
        Counts one step: of every row the ranks of the accepted nodes, and how many children were drafted at the root
        and at each of them. Where there were any, children of the first `num_ranks` ranks count as rejected if they
        were not drafted, as in a tree that has those that are likely.
        """
        self.grow_older()
        for ranks, offered in rows:
            steps = zip([*ranks, None], offered, strict=True)
            for trials, hits, (accepted, count) in zip(self._trials, self._hits, steps, strict=False):
                for rank in range(min(max(count, num_ranks) if count else 0, len(trials))):
                    trials[rank] += 1
                    hits[rank] += rank == accepted
        self._chances = None

    @property
    def num_drafts(self) -> float:
        """Drafts that were counted, earlier ones as far as they still count."""
        return self._trials[0][0]

    def grow_older(self) -> None:
        """Lets earlier counts count less."""
        for table in (self._hits, self._trials):
            for row in table:
                row[:] = [self.DECAY * count for count in row]
        self._chances = None

    def _add_path(self, path: Sequence[int], children_of: Callable[[int], Sequence[int]], times: int = 1) -> None:
        steps = zip([0, *path], [*path, None], strict=True)
        for trials, hits, (node, accepted) in zip(self._trials, self._hits, steps, strict=False):
            for rank, child in enumerate(children_of(node)[: len(trials)]):
                trials[rank] += times
                hits[rank] += times * (child == accepted)

    @property
    def _parts(self) -> tuple[list[list[float]], ...]:
        return self._hits, self._trials, self._guesses

    def chances(self) -> list[list[float]]:
        """
        Acceptance probabilities `[depth][rank]`, not rising with the rank; rarely seen entries lean on other depths of
        the rank. The same list until something is counted.
        """
        found = self._chances
        if found is None:
            found = self._chances = self._computed()
        return found

    def _computed(self) -> list[list[float]]:
        """See `chances`."""
        table, weight = [], self._weight
        # How many times the prior of each rank came true, over all depths.
        ratios = []
        for hits, trials, guesses in zip(*(zip(*part, strict=True) for part in self._parts), strict=True):
            expected = sum(trial * guess for trial, guess in zip(trials, guesses, strict=True))
            ratios.append((sum(hits) + weight * guesses[0]) / (expected + weight * guesses[0]))
        for hits, trials, guesses in zip(*self._parts, strict=True):
            chances, least, left = [], 1.0, 1.0
            for hit, trial, guess, ratio in zip(hits, trials, guesses, ratios, strict=True):
                least = min(least, (hit + weight * min(guess * ratio, 1.0)) / (trial + weight), left)
                left -= least  # at most one child of a node is accepted
                chances.append(least)
            table.append(chances)
        return table


def drafted_children(draft: DraftTree, row: int, node: int) -> list[int]:
    """The children that a draft proposes for a node, by rank."""
    tokens = draft.tokens_list[row]
    return [child for child in draft.topology.children_of(row, node) if tokens[child - 1] >= 0]


def likeliest_paths(chances: list[list[float]], num_nodes: int, depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `num_nodes` likeliest rank paths of at most `depth` levels, with their chances, the likeliest first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(-chances[0][0], (0,))]
    while queue and len(found) < num_nodes:
        negative, path = heapq.heappop(queue)
        found.append((-negative, path))
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < len(chances[level]) and chances[level][rank] > 0:
            sibling = negative / chances[level][rank] * chances[level][rank + 1]
            heapq.heappush(queue, (sibling, (*path[:-1], rank + 1)))
        if level + 1 < depth:
            heapq.heappush(queue, (negative * chances[level + 1][0], (*path, 0)))
    return [(chance, path) for chance, path in found if chance > 0]


def expected_length(paths: Iterable[tuple[int, ...]], chances: list[list[float]]) -> float:
    """
    Expected tokens per step with a tree: 1 + the sum of its paths' probabilities; parents precede children in `paths`.
    """
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    expected = 1.0
    for path in paths:
        reached[path] = reached[path[:-1]] * chances[len(path) - 1][path[-1]]
        expected += reached[path]
    return expected


def expected_of(tree: TokenTree | DynamicTree | None, chances: list[list[float]]) -> float:
    """
    Expected tokens per step with a tree (None: without a tree); with a dynamic one those of the likeliest static tree
    of its size.
    """
    if tree is None:
        return 1.0
    if isinstance(tree, TokenTree):
        return expected_length(tree.paths, chances)
    chances = [level[: tree.top_k] for level in chances]
    return 1.0 + sum(chance for chance, _ in likeliest_paths(chances, tree.num_nodes, min(tree.depth, len(chances))))
