"""Choice of the tree of each step: always the same, by the length of the text, or chosen from measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .draft_tree import DraftTree
from .dynamic import DynamicTree
from .token_tree import TokenTree


Evidence = dict[int, float | None]
"""
By row that goes on: how often the best draft token is right, as a drafter expects without measurements; None where it
has nothing to propose.
"""


class TreeChoice:
    """
    Says which tree each step of a call takes: here the same at every step.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree of every step; None: no tree.
    """

    def __init__(self, tree: TokenTree | DynamicTree | None):
        self.tree = tree
        """The tree of the present step; None if the step carries no draft tokens."""

    takes_best = False
    """Whether the present step's children are the draft's best tokens, in a call that draws them otherwise."""
    reads_evidence = False
    """Whether `begin_step` makes use of evidence."""
    reads_confidence = False
    """Whether `refine` makes use of a draft's confidence."""

    def begin_step(self, length: int, evidence: Evidence | None = None) -> TokenTree | DynamicTree | None:
        """
        The tree of the step that begins.

        Args:
            length (`int`): tokens of the longest unfinished row, the root included.
            evidence (`dict`, *optional*): what the drafter knows before it proposes; see `Drafter.evidence`.
        """
        return self.tree

    def refine(
        self, confidences: Mapping[int, Sequence[float]], most_nodes: int | None = None
    ) -> TokenTree | DynamicTree | None:
        """
        The tree of the step at hand (None: no tree), once the draft has run and no child has been drawn: its
        confidence depends on the text so far alone, so that samples stay exact.

        Args:
            confidences (`Mapping[int, Sequence[float]]`): by row and depth, the draft's own estimate of the chance
                that its best token is accepted where those before it are.
            most_nodes (`int`, *optional*): most nodes of the tree.
        """
        return self.tree

    def begin_next(self) -> bool:
        """
        Begins a step with the tree of the last one, which has not ended. Returns False if the next step may take
        another tree: it must be begun by `begin_step`.
        """
        return False

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        """
        Takes the result of a step, from which subclasses learn.

        Args:
            draft (`DraftTree`): the proposed draft tokens.
            paths (`list`): for every row the accepted nodes, or None if the row rested.
            propose (`float`), rest (`float`): seconds of drafting, and of the rest of the step.
        """


@dataclass(frozen=True)
class TreeSchedule:
    """
    Trees by the length of the text.

    Args:
        entries (`tuple`): pairs of a length in tokens, prompt included, and the tree from there on (None: no tree).
            The first length is 0, and they rise.

    Raises:
        ValueError: for an empty schedule, or lengths that do not begin with 0 and rise.
    """

    entries: tuple[tuple[int, Any], ...]

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.entries]
        if not lengths or lengths[0] != 0 or any(a >= b for a, b in zip(lengths, lengths[1:], strict=False)):
            raise ValueError(
                f"`tree`: the lengths of a schedule must begin with 0 and rise, but are {lengths}. Write for example "
                "[(0, '[(0,), (1,)]'), (512, '[(0,)]')]."
            )
        if all(tree is None for _, tree in self.entries):
            raise ValueError("`tree`: a schedule must name a tree somewhere. Leave `assistant_model` out instead.")

    @property
    def trees(self) -> list[Any]:
        """Trees of the schedule, without the entries that have none."""
        return [tree for _, tree in self.entries if tree is not None]

    def map(self, change: Callable[[Any], Any]) -> TreeSchedule:
        """The schedule with every tree changed."""
        return TreeSchedule(tuple((length, None if tree is None else change(tree)) for length, tree in self.entries))

    @property
    def num_nodes(self) -> int:
        """Most draft nodes of a step."""
        return max(tree.num_nodes for tree in self.trees)

    @property
    def depth(self) -> int:
        """Most levels of draft tokens."""
        return max(tree.depth for tree in self.trees)

    def to_dict(self) -> list[Any]:
        """A JSON-able form, which `tree=` accepts again."""
        return [[length, None if tree is None else tree.to_dict()] for length, tree in self.entries]


class ScheduledChoice(TreeChoice):
    """Chooses by a `TreeSchedule`; `choices` holds the choice of each of its entries, in order."""

    def __init__(self, schedule: TreeSchedule, choices: Sequence[TreeChoice]):
        super().__init__(None)
        self._starts = [length for length, _ in schedule.entries]
        self._choices = choices
        self._current = choices[0]
        self.reads_evidence = any(choice.reads_evidence for choice in choices)
        self.reads_confidence = any(choice.reads_confidence for choice in choices)

    def begin_step(self, length: int, evidence: Evidence | None = None) -> TokenTree | DynamicTree | None:
        entry = max(index for index, start in enumerate(self._starts) if start <= length)
        self._current = self._choices[entry]
        self.tree = self._current.begin_step(length, evidence)
        return self.tree

    @property
    def takes_best(self) -> bool:  # type: ignore[override]
        return self._current.takes_best

    def refine(
        self, confidences: Mapping[int, Sequence[float]], most_nodes: int | None = None
    ) -> TokenTree | DynamicTree | None:
        self.tree = self._current.refine(confidences, most_nodes)
        return self.tree

    def end_step(self, draft: DraftTree, paths: list[list[int] | None], propose: float, rest: float) -> None:
        self._current.end_step(draft, paths, propose, rest)
