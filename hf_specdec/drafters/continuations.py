"""Texts that may come next, merged by their tokens, and the trees that they fill."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..trees import DraftTree, DynamicTree, TokenTree, Topology


@dataclass
class Continuation:
    """A node of the merged continuations: its weight, and its children by token."""

    weight: float = 0.0
    children: dict[int, Continuation] = field(default_factory=dict)

    def add(self, tokens: list[int], weight: float) -> None:
        node = self
        node.weight += weight
        for token in tokens:
            node = node.children.setdefault(token, Continuation())
            node.weight += weight

    def ranked(self) -> list[tuple[int, Continuation]]:
        """Pairs of token and child, the heaviest child first."""
        return sorted(self.children.items(), key=lambda item: -item[1].weight)


@dataclass
class Filled:
    """One row's nodes in breadth-first order: tokens, and parents (0: the root)."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


def fill_static(tree: TokenTree, root: Continuation, depth: int) -> Filled:
    """Fills the nodes of a static tree by rank; nodes for which no continuation was found are left out."""
    filled, found = Filled(), {0: (0, root.ranked())}
    for node in range(1, tree.level_offsets[depth + 1]):
        parent, candidates = found.get(tree.parents[node], (0, ()))
        if tree.ranks[node] < len(candidates):
            token, continuation = candidates[tree.ranks[node]]
            filled.tokens.append(token)
            filled.parents.append(parent)
            found[node] = len(filled.tokens), continuation.ranked()
    return filled


def fill_dynamic(tree: DynamicTree, root: Continuation, depth: int) -> Filled:
    """
    Fills a dynamic tree with the `num_nodes` likeliest continuations. A child has its parent's probability times its
    weight over the total weight of its parent's children.
    """
    candidates: list[tuple[float, int, int, int]] = []  # minus the probability, depth, number of the parent, token
    frontier = [(1.0, -1, root)]
    for level in range(1, depth + 1):
        below = []
        for share, number, continuation in frontier:
            total = sum(child.weight for child in continuation.children.values())
            for token, child in continuation.ranked()[: tree.top_k]:
                # In this order no child's share is rounded past its parent's: a chosen child's parent is chosen.
                below.append((share * (child.weight / total), len(candidates), child))
                candidates.append((-below[-1][0], level, number, token))
        frontier = sorted(below, key=lambda item: -item[0])[: tree.top_k]
    chosen = sorted(sorted(range(len(candidates)), key=lambda i: candidates[i][:2])[: tree.num_nodes])
    nodes = {-1: 0} | {number: node for node, number in enumerate(chosen, start=1)}
    return Filled([candidates[i][3] for i in chosen], [nodes[candidates[i][2]] for i in chosen])


def as_draft_tree(rows: list[Filled], num_nodes: int, device: torch.device, vocab_size: int) -> DraftTree:
    """Joins the rows' nodes into one `DraftTree`; shorter rows are padded with invalid nodes."""
    tokens, parents, deepest = [], [], 0
    for filled in rows:
        missing = num_nodes - len(filled.tokens)
        # A prompt may hold ids beyond the vocabulary (placeholders of images): nodes with these, and all nodes below
        # them, are invalid.
        tokens.append(_without_foreign(filled, vocab_size) + [-1] * missing)
        parents.append([0, *filled.parents] + [0] * missing)
        depths = [0]
        for parent in filled.parents:
            depths.append(depths[parent] + 1)
        deepest = max(deepest, *depths)
    drafted = torch.tensor(tokens, device=device)
    topology = Topology.of_parents(torch.tensor(parents, device=device), deepest)
    return DraftTree(drafted.clamp(min=0), topology, None if min(map(min, tokens)) >= 0 else drafted >= 0)


def _without_foreign(filled: Filled, vocab_size: int) -> list[int]:
    tokens: list[int] = []
    for token, parent in zip(filled.tokens, filled.parents, strict=True):
        counts = token < vocab_size and (parent == 0 or tokens[parent - 1] >= 0)
        tokens.append(token if counts else -1)
    return tokens
