"""Tokens that have to come next, merged into a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .draft_tree import DraftTree, Topology


MOST_FORCED = 12
"""Most tokens of a chain that is merged into a tree: each one is a node of the forward."""


@dataclass(eq=False)
class ForcedDraft(DraftTree):
    """
    A draft tree with nodes of which the drafter knows nothing, each the last child of its parent. They were not drawn.

    Args:
        drafted (`DraftTree`): the tree without them, whose nodes have the same numbers.
    """

    drafted: DraftTree = field(kw_only=True)

    def is_drawn(self, node: int) -> bool:
        return node <= self.drafted.num_nodes

    def scores_of(self, row: int, node: int) -> torch.Tensor:
        return self.drafted.scores_of(row, node)

    def to(self, device: torch.device) -> DraftTree:
        if self.tokens.device == device:
            return self
        moved = super().to(device)
        return ForcedDraft(moved.tokens, moved.topology, moved.valid, drafted=self.drafted.to(device))

    def within_drafted(self, paths: Sequence[list[int] | None]) -> tuple[DraftTree, list[list[int] | None]]:
        most = self.drafted.num_nodes
        own: list[list[int] | None] = []
        for path in paths:
            kept = [] if path is None else path
            end = next((place for place, node in enumerate(kept) if node > most), len(kept))
            own.append(None if path is None else kept[:end])
        return self.drafted, own


def forced_chain(
    draft: DraftTree, row: int, forced: Callable[[list[int], int], list[int]], room: int
) -> tuple[int, list[int]]:
    """
    A node of a row's tree, and the tokens that have to come below it and are not in the tree. The way to the node is
    by tokens that have to come, and by first children elsewhere.

    Args:
        draft (`DraftTree`): the tree of every row.
        row (`int`): the row.
        forced (`Callable`): up to a number of tokens that have to come after others in the tree.
        room (`int`): most levels.
    """
    node, path = 0, list[int]()
    while True:
        chain = forced(path, min(room - len(path), MOST_FORCED))
        for place, token in enumerate(chain):
            child = draft.child_with(row, node, token)
            if child is None:
                return node, chain[place:]
            node, path = child, [*path, token]
        tokens = draft.tokens_list[row]
        first = next((child for child in draft.topology.children_of(row, node) if tokens[child - 1] >= 0), None)
        if first is None:
            return node, []
        node, path = first, [*path, tokens[first - 1]]


def with_forced(draft: DraftTree, missing: Mapping[int, tuple[int, Sequence[int]]]) -> DraftTree:
    """
    The tree with a chain of tokens below a node, for some rows (one at least).

    Args:
        draft (`DraftTree`): the tree of every row.
        missing (`Mapping[int, tuple[int, Sequence[int]]]`): by row the node and the tokens, see `forced_chain`.
    """
    batch_size, count = len(draft.tokens), draft.num_nodes
    most = max(len(tokens) for _, tokens in missing.values())
    tokens = [[0] * most for _ in range(batch_size)]
    valid = [[False] * most for _ in range(batch_size)]
    parents = [[0] * most for _ in range(batch_size)]
    for row, (node, own) in missing.items():
        tokens[row][: len(own)] = own
        valid[row][: len(own)] = [True] * len(own)
        parents[row][: len(own)] = [node, *range(count + 1, count + len(own))]
    device, topology = draft.tokens.device, draft.topology
    drafted_valid = torch.ones_like(draft.tokens, dtype=torch.bool) if draft.valid is None else draft.valid
    return ForcedDraft(
        torch.cat([draft.tokens, torch.tensor(tokens, device=device)], dim=1),
        Topology.of_parents(
            torch.cat([topology.parents.expand(batch_size, -1), torch.tensor(parents, device=device)], dim=1),
            max(topology.depth, *(_depth_of(topology, row, node) + len(own) for row, (node, own) in missing.items())),
        ),
        torch.cat([drafted_valid, torch.tensor(valid, device=device)], dim=1),
        drafted=draft,
    )


def _depth_of(topology: Topology, row: int, node: int) -> int:
    return int(topology.depths[row if topology.rows > 1 else 0, node])
