"""The likeliest nodes of a wider tree, as many as a step has room for."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...trees import DraftTree, TokenTree, Topology


class LikeliestNodes:
    """
    Keeps the likeliest nodes of a wide static tree. Which ones depends on chances alone that were there before any
    child was drawn, so that samples stay exact.

    Args:
        wide (`TokenTree`): the tree, without rank gaps.
        num_nodes (`int`): number of nodes to keep.
        num_ranks (`int`): ranks of the chances, more than the tree has.
        device (`torch.device`): device of the draft.
    """

    def __init__(self, wide: TokenTree, num_nodes: int, num_ranks: int, device: torch.device):
        self.wide, self.num_nodes = wide, num_nodes
        places, none = [], wide.depth * num_ranks
        for path in wide.paths:
            own = [depth * num_ranks + rank for depth, rank in enumerate(path)]
            places.append(own + [none] * (wide.depth - len(path)))
        self._places = torch.tensor(places, device=device)
        """For every node the places of all ranks on its path in `[depth, ranks]` chances, padded with one behind."""
        self._parents = torch.tensor(wide.parents, device=device)[1:]

    def of(self, draft: DraftTree, chances: torch.Tensor) -> DraftTree:
        """
        The draft with its likeliest nodes alone.

        Args:
            draft (`DraftTree`): the wide tree.
            chances (`torch.Tensor` of shape `[rows, depth, ranks]`): acceptance probabilities, given an accepted
                parent; none is above that of a lower rank, and those of rank 0 are less than 1.
        """
        rows, device = len(draft.tokens), draft.tokens.device
        logs = torch.nn.functional.pad(chances.flatten(1).clamp(min=1e-30).log(), (0, 1))
        scores = logs.index_select(1, self._places.flatten()).view(rows, *self._places.shape).sum(dim=2)
        # Sums fall along a path and with the rank, and ties keep their order: parents and better siblings stay, too.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        kept = order[:, : self.num_nodes].sort(dim=1).values
        numbers = torch.arange(1, self.num_nodes + 1, device=device).expand_as(kept)
        new = torch.zeros(rows, len(self._parents) + 1, dtype=torch.long, device=device).scatter(1, kept + 1, numbers)
        parents = torch.nn.functional.pad(new.gather(1, self._parents[kept]), (1, 0))
        nodes = torch.nn.functional.pad(kept + 1, (1, 0))
        index = draft.score_index
        assert index is None or isinstance(index, torch.Tensor)
        return replace(
            draft,
            tokens=draft.tokens.gather(1, kept),
            topology=Topology.of_parents(parents, self.wide.depth),
            valid=None if draft.valid is None else draft.valid.expand(rows, -1).gather(1, kept),
            score_index=None if index is None else index.expand(rows, -1).gather(1, nodes),
        )
