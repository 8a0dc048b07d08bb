"""Joining the trees drafted for parts of a batch into one draft tree for all rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .draft_tree import DraftTree, Topology


@dataclass(eq=False)
class JoinedDraft(DraftTree):
    """
    A draft whose rows have trees of different shapes, each padded with invalid nodes to the largest.

    Args:
        parts (`list`): for every row, its original draft and its row in that draft; None for a row without a tree.
    """

    parts: list[tuple[DraftTree, int] | None] = field(default_factory=list)

    def scores_of(self, row: int, node: int) -> torch.Tensor:
        part = self.parts[row]
        assert part is not None, "the row has no tree"
        draft, row_there = part
        return draft.scores_of(row_there, node)

    def to(self, device: torch.device) -> DraftTree:
        if self.tokens.device == device:
            return self
        moved = super().to(device)
        # Only the scores of the original drafts are read.
        parts = [
            part if part is None or part[0].scores is None else (part[0].to(device), part[1]) for part in self.parts
        ]
        return JoinedDraft(moved.tokens, moved.topology, moved.valid, parts=parts)


def join_drafts(parts: list[tuple[list[int], DraftTree]], batch_size: int, device: torch.device) -> DraftTree:
    """
    Joins trees of different shapes.

    Args:
        parts (`list`): pairs of row numbers of the step and the draft for these rows, in their order.
        batch_size (`int`): rows of the step; rows without a tree get invalid nodes.
        device (`torch.device`): device of the joined draft.
    """
    if len(parts) == 1 and parts[0][0] == list(range(batch_size)):
        return parts[0][1].to(device)
    num_nodes = max(draft.num_nodes for _, draft in parts)
    tokens = torch.zeros(batch_size, num_nodes, dtype=torch.long, device=device)
    valid = torch.zeros(batch_size, num_nodes, dtype=torch.bool, device=device)
    parents = torch.zeros(batch_size, num_nodes + 1, dtype=torch.long, device=device)
    origin: list[tuple[DraftTree, int] | None] = [None] * batch_size
    for rows, draft in parts:
        draft, index = draft.to(device), torch.tensor(rows, device=device)
        tokens[index, : draft.num_nodes] = draft.tokens
        valid[index, : draft.num_nodes] = True if draft.valid is None else draft.valid
        parents[index, : draft.num_nodes + 1] = draft.topology.parents.expand(len(rows), -1)
        for place, row in enumerate(rows):
            origin[row] = draft, place
    depth = max(draft.topology.depth for _, draft in parts)
    return JoinedDraft(tokens, Topology.of_parents(parents, depth), valid, parts=origin)
