"""
`tree="auto"` for captured steps of requests in flight: a choice among a few trees, each timed as a whole step.

Every tree costs a capture, so that there are only a few, the same for every text. How long a step with each takes
depends on the load, which changes while only one of the trees is in use, so that the times of the other trees grow
old. Now and then a few steps are therefore spent on a tree, or on none, whose best time so far would make it better
than the tree in use.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .auto import AutoTree, Plan
from .auto_learning import Ratio, Trust
from .auto_tables import AcceptanceTable, expected_length, likeliest_paths
from .choice import Evidence, TreeChoice
from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .token_tree import TokenTree
from .told import Belief, Told
from .whole_times import WholeTimes


class TreeMenu:
    """
    The trees to choose among: the likeliest paths of some depth, for drafts with peaked, average and flat
    distributions. For texts and machines of any kind one of them is nearly as fast as the best tree of all.

    Args:
        limits (`AutoTree`): largest size of a tree.
        times (`WholeTimes`, *optional*): times of steps with these trees. Once `WholeTimes.are_complete`, trees that
            were not timed are not worth a capture and are left out.
    """

    DRAFTS = (
        ((0.85, 0.06, 0.03, 0.02, 0.01), ((1, 1), (2, 2), (4, 4), (8, 8), (20, 8), (64, 7))),
        (AcceptanceTable.FIRST_GUESS, ((10, 2), (12, 5))),
        ((0.35, 0.15, 0.1, 0.07, 0.05), ((2, 1), (4, 2), (24, 3), (48, 3))),
    )
    """Acceptance probabilities by rank, and for each the nodes and levels of trees that are built for them."""

    def __init__(self, limits: AutoTree, times: WholeTimes | None = None):
        found: dict[TokenTree, None] = {}
        for chances, sizes in self.DRAFTS:
            table = [list(chances[: limits.max_children])] * limits.max_depth
            for nodes, levels in sizes:
                likeliest = likeliest_paths(table, min(nodes, limits.max_nodes), min(levels, limits.max_depth))
                found[TokenTree([path for _, path in likeliest])] = None
        trees = list(found)
        if times is not None and times.are_complete:
            trees = [tree for tree in found if times.has(tree)] or trees
        self.trees = sorted(trees, key=lambda tree: (tree.num_nodes, tree.depth))


class MenuChoice(TreeChoice):
    """
    Chooses the tree of every step among the trees of a `TreeMenu`: after a few trial steps it follows a plan, until
    another one promises more than `GAIN` times as much.

    Args:
        times (`WholeTimes`): measured times of whole steps on this machine, updated by every step.
        limits (`AutoTree`): largest size of a tree.
        acceptance (`AcceptanceTable`): measured acceptance of the texts, updated by every step.
    """

    reads_confidence = True
    REPLAN = 4
    """Steps from one plan to the next."""
    GAIN = 1.03
    """Factor by which another tree must promise to be better than the planned one."""
    PROBE = 16
    """Fewest steps without a tree after which one carries a small tree, to see whether acceptance has changed."""
    WORTH = 1.05
    """
    Factor by which a tree must promise more tokens per second than no tree. Load slows steps with trees by more than
    plain ones, which are not timed meanwhile, so that a tree with a small advantage may well lose.
    """
    ROUNDS = 3
    """Most rounds of trial steps; a round is repeated if untimed (captures, or steps with other requests' trees)."""
    BUDGET = 0.01
    """Largest share of step time that exploration may cost."""
    MEMORY = 1024
    """Number of last steps over which the cost of exploration is averaged (exponentially)."""
    LOOK = 64
    """
    Steps between explorations of trees with old times; the wait until the same tree is explored again doubles each
    time.
    """
    SLOWED = 1.15
    """Slowdown of all steps, since a plain one was timed last, above which a few steps go without a tree."""
    MOST_DOUBLINGS = 5
    STEPS_OF_LOOK = 3

    def __init__(self, times: WholeTimes, limits: AutoTree, acceptance: AcceptanceTable):
        super().__init__(None)
        self.times, self.acceptance, self.menu = times, acceptance, TreeMenu(limits, times)
        middling = min(self.menu.trees, key=lambda tree: (abs(tree.num_nodes - 8), tree.depth))
        self._small = TokenTree.chain(min(2, limits.max_depth))
        # Without known times, every kind of step is tried twice, because the first one includes warming up.
        self._trials = (None, self._small, None, self._small, middling, middling)
        self._to_try: list[TokenTree | None] = [] if times.are_known else list(self._trials)
        self._planned: TokenTree | None = None
        self._step = self._without = 0
        self._rounds = 1
        self._look_at, self._slow_look_at = self.LOOK, 0
        self._looks: dict[TokenTree | None, int] = {}
        self._next_look: dict[TokenTree | None, int] = {}
        self._explores = False
        """Whether the present step is an exploration: its tree is not the planned one."""
        self._spent = self._lost = 0.0
        """
        Seconds of all steps, and seconds that explorations took beyond planned steps for as many tokens. Both decay
        exponentially.
        """
        self._reading = 0.0
        """Extra seconds of the last step in which a head only caught up on waiting features."""
        self.trust, self._ratio = Trust(), Ratio()
        self._belief: Belief | None = None
        self.most_nodes: int | None = None
        """Most draft tokens per row of the next step; None for no limit."""

    def begin_step(self, length: int, evidence: Evidence | None = None) -> TokenTree | None:
        self.tree = self._chosen()
        self._explores = self.tree != self._planned
        return self.tree

    def begin_next(self) -> bool:
        if self._explores or self._may_explore or self.tree not in (None, *self._allowed):
            return False
        self._renew_plan()
        if self._planned != self.tree:
            return False
        self._count_step()
        return True

    @property
    def _may_explore(self) -> bool:
        """Whether the next step may be an exploration, so that `begin_step` must be asked."""
        if self._to_try or not self.times.has(None) or (not self.times.are_known and self._rounds < self.ROUNDS):
            return True
        step, is_slow = self._step + 1, self.times.slowed > self.SLOWED
        is_due = step >= self._look_at or (is_slow and step >= self._slow_look_at) or self._without + 1 >= self.PROBE
        return is_due and not self._is_over_budget

    @property
    def _is_over_budget(self) -> bool:
        """Whether exploration has cost so much that there must be none for now."""
        return self._lost > self.BUDGET * self._spent

    def _chosen(self) -> TokenTree | None:
        """The tree of this step: the planned one, or one to explore."""
        if not self._to_try and not self.times.are_known and self._rounds < self.ROUNDS:
            self._rounds += 1
            self._to_try = list(self._trials)  # not all of the earlier ones were timed
        if self._to_try:
            return self._to_try.pop(0)
        if self._planned not in (None, *self._allowed):
            self._planned = None
        self._renew_plan()
        self._count_step()
        if not self.times.has(None) or self._is_over_budget:
            return self._planned
        if self._without >= self.PROBE:
            self._without = 0
            return self._small
        tree = self._planned
        if self._planned is not None and self.times.slowed > self.SLOWED and self._step >= self._slow_look_at:
            self._slow_look_at, tree = self._step + self.LOOK, None
        elif self._step >= self._look_at:
            self._look_at, tree = self._step + self.LOOK, self._worth_a_look()
        if tree != self._planned:
            self._to_try = [tree] * (self.STEPS_OF_LOOK - 1)
        return tree

    def _renew_plan(self) -> None:
        if self._step % self.REPLAN:
            return
        self._belief = None
        if not self.times.has(None):
            return
        tree = self.plan().tree
        if self.worth(tree) > self.GAIN * self.worth(self._planned):
            self._planned = tree
            self._looks.pop(tree, None)

    def belief(self) -> Belief:
        """How the next step reads what its draft tells; renewed with the plan."""
        if self._belief is None:
            self._belief = Belief(self.acceptance.chances(), self.trust.share, self.trust.factor)
        return self._belief

    def _count_step(self) -> None:
        self._step += 1
        self._without = self._without + 1 if self._planned is None else 0

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        assert not isinstance(self.tree, DynamicTree)
        tree = self.tree if draft.num_nodes > 0 else None
        self.times.add(tree, propose + rest, is_whole=False)
        if self.tree is not None:
            self.acceptance.add(draft, paths)
        if not self.times.are_of_whole_steps:
            self._account(tree, paths, propose + rest)

    def end_whole_step(
        self,
        tree: TokenTree | None,
        paths: list[list[int] | None],
        seconds: float | None,
        only_read: bool = False,
        told: Sequence[Told] = (),
    ) -> None:
        """
        Takes the result of a step that ran whole on the device; all nodes of its tree count as drafted.

        Args:
            tree (`TokenTree`, *optional*): tree of the step; None if it had none.
            paths (`list`): for every row the accepted nodes, or None if it rested.
            seconds (`float`, *optional*): duration of the step; None if the measurement is not valid.
            only_read (`bool`, *optional*, defaults to `False`): whether a head caught up on waiting features in the
                step, without drafting, so that it took longer than other steps with the tree. In an exploration the
                extra time counts as lost.
            told (`Sequence[Told]`): what the draft told of its acceptance, if it shaped the tree by this.
        """
        if tree is not None and told:
            self._learn_told(tree, told)
        elif tree is not None:
            self.acceptance.add_whole(tree, paths)
        if only_read and self.times.has(tree):
            if seconds is None:
                seconds = self.times.of(tree) + self._reading
            self._reading = max(seconds - self.times.of(tree), 0.0)
        elif seconds is not None and not only_read:
            self.times.add(tree, seconds)
        self._account(tree, paths, seconds)

    def _learn_told(self, tree: TokenTree, told: Sequence[Told]) -> None:
        """Takes the result of a step whose tree was shaped by what the draft told."""
        learnt = self.belief().learnt
        accepted = statistics.mean(len(row.ranks) for row in told)
        self._ratio.add(expected_length(tree.paths, learnt) - 1.0, accepted)
        for row in told:
            ranks = [*row.ranks, None]
            for chance, level, offered, rank in zip(row.chances, learnt, row.offered, ranks, strict=False):
                if not offered:
                    break
                self.trust.learn(chance, level[0], rank == 0)
                if rank != 0:
                    break
        self.acceptance.add_offered([(row.ranks, row.offered) for row in told])

    def put_off(self) -> None:
        """Plans the tree of the last step again: the last step could not carry it, but the next one can."""
        if self.tree is not None:
            assert not isinstance(self.tree, DynamicTree)
            self._to_try.insert(0, self.tree)

    def plan(self) -> Plan[TokenTree]:
        """The best plan now, among trees that were timed or have at most `times.reach` nodes."""
        trees = [tree for tree in self._allowed if self.times.has(tree) or tree.num_nodes <= self.times.reach]
        plans = (Plan(tree, rate) for tree, rate in self.rates((None, *trees)).items())
        return max(plans, key=lambda plan: plan.tokens_per_second / self._price(plan.tree))

    def worth(self, tree: TokenTree | None) -> float:
        """Value by which trees, and no tree, are compared."""
        return self.rate(tree) / self._price(tree)

    def rate(self, tree: TokenTree | None) -> float:
        """Expected tokens per second of steps with `tree` (None: without a tree)."""
        return self.rates([tree])[tree]

    def rates(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """Expected tokens per second with each of several trees; acceptance is computed once for all of them."""
        return {tree: tokens / self.times.of(tree) for tree, tokens in self.expected_tokens(trees).items()}

    def expected_tokens(self, trees: Iterable[TokenTree | None]) -> dict[TokenTree | None, float]:
        """Expected tokens per row of a step with each of these trees."""
        chances = self.acceptance.chances()
        accepted = {tree: expected_length(() if tree is None else tree.paths, chances) - 1.0 for tree in trees}
        return {tree: 1.0 + its * self._ratio.value for tree, its in accepted.items()}

    def _price(self, tree: TokenTree | None) -> float:
        return 1.0 if tree is None else self.WORTH

    @property
    def _allowed(self) -> list[TokenTree]:
        return [tree for tree in self.menu.trees if self.most_nodes is None or tree.num_nodes <= self.most_nodes]

    def _worth_a_look(self) -> TokenTree | None:
        """
        A tree (or None) with an old time that would beat the planned tree at its best time; the planned tree if there
        is none.
        """
        now = self.worth(self._planned)
        old = [
            tree
            for tree in (None, *self._allowed)
            if tree != self._planned and self.times.is_old(tree) and self._step >= self._next_look.get(tree, 0)
        ]
        due = {
            tree: tokens / self.times.best_of(tree) / self._price(tree)
            for tree, tokens in self.expected_tokens(old).items()
        }
        tree = max(due, key=lambda tree: due[tree], default=self._planned)
        if tree == self._planned or due[tree] <= self.GAIN * now:
            return self._planned
        looks = self._looks[tree] = self._looks.get(tree, 0) + 1
        self._next_look[tree] = self._step + (self.LOOK << min(looks, self.MOST_DOUBLINGS))
        return tree

    def _account(self, tree: TokenTree | None, paths: list[list[int] | None], seconds: float | None) -> None:
        """Adds a step's seconds (None: the expected ones), and the seconds that an exploration lost, to the totals."""
        if not self.times.has(self._planned) or not self.times.has(tree):
            return
        seconds = self.times.of(tree) if seconds is None else seconds
        kept = 1.0 - 1.0 / self.MEMORY
        self._spent, self._lost = kept * self._spent + seconds, kept * self._lost
        if self._explores:
            taken = [len(path) for path in paths if path is not None]
            tokens = 1.0 + (statistics.mean(taken) if taken else 0.0)
            self._lost = max(self._lost + seconds - tokens / self.rate(self._planned), 0.0)
