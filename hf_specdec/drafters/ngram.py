"""Drafting without a model: continuations looked up in the prompt and the text so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree, Topology
from .base import Drafter, DraftRequest


class NgramDraft(Drafter):
    """
    Finds earlier places where the last tokens stood, and proposes what came after them. The continuations of all
    matches are merged into a tree: longer matches count more than shorter ones, and recent ones more than old ones.

    Args:
        max_ngram (`int`, *optional*, defaults to 4): longest run of last tokens to look up.
        min_ngram (`int`, *optional*, defaults to 1): shortest run of last tokens to look up.

    Raises:
        ValueError: unless 1 ≤ min_ngram ≤ max_ngram, both integers.

    Examples:

    ```python
    >>> from hf_specdec import NgramDraft
    >>> draft = NgramDraft(max_ngram=3, min_ngram=1)
    >>> draft.default_tree
    DynamicTree(depth=10, top_k=3, num_nodes=16)

    ```
    """

    default_tree = DynamicTree(depth=10, top_k=3, num_nodes=16)

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1):
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`NgramDraft({name}={value!r})`: `{name}` must be a positive integer.")
        if min_ngram > max_ngram:
            raise ValueError(f"`NgramDraft(min_ngram={min_ngram})` is more than `max_ngram`={max_ngram}. Swap them.")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        visible = None if sequences.visible is None else sequences.visible.tolist()
        self._texts = [_IndexedText(self.min_ngram, self.max_ngram) for _ in range(sequences.batch_size)]
        self._seen = [0] * sequences.batch_size
        if visible is not None:
            for row, text in enumerate(self._texts):
                tokens = sequences.tokens(row, 0)
                text.extend([token for token, is_token in zip(tokens, visible[row], strict=True) if is_token])
                self._seen[row] = len(tokens)

    def propose(self, sequences: Sequences) -> DraftTree | None:
        tree = self.request.tree
        fill: Callable[..., _Filled] = _fill_static if isinstance(tree, TokenTree) else _fill_dynamic
        self._read(sequences)
        rows: list[_Filled] = []
        for row, text in enumerate(self._texts):
            depth = min(tree.depth, sequences.room(row))
            rows.append(fill(tree, text.continuations(depth), depth) if depth > 0 else _Filled())
        num_nodes = max(len(filled.tokens) for filled in rows)
        if num_nodes == 0:
            return None
        return _as_draft_tree(rows, num_nodes, sequences.device, self.request.vocab_size)

    def _read(self, sequences: Sequences) -> None:
        for row, text in enumerate(self._texts):
            text.extend(sequences.tokens(row, self._seen[row]))
            self._seen[row] = sequences.lengths[row]

    def evidence(self, sequences: Sequences) -> Evidence:
        """By row the chance that goes with the longest match of its last tokens; None without a match."""
        self._read(sequences)
        rooms = {row: sequences.room(row) for row in range(len(self._texts)) if not sequences.resting[row]}
        return {row: self._texts[row].chance() if room > 0 else None for row, room in rooms.items()}


# ------------------------------------------------------------------------------------------------------------ look-up


class _IndexedText:
    """A growing list of tokens with, for every n-gram, the positions right after its occurrences, oldest first."""

    MAX_MATCHES = 16
    CHANCES = ((16, 0.9), (8, 0.8), (5, 0.7), (3, 0.5), (2, 0.3), (1, 0.15))
    """Pairs of a match's length in tokens and how often the token after it is right, before anything is measured."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # The n-grams that end in the last token before this one now have a continuation.
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self.places.setdefault(tuple(self.tokens[end - size : end]), []).append(end)
            self.tokens.append(token)

    def chance(self) -> float | None:
        """The chance that goes with the longest match of the last tokens; None without a match."""
        end = len(self.tokens)
        for size in self.sizes:
            places = self.places.get(tuple(self.tokens[end - size : end]), ()) if size <= end else ()
            if places:
                length, most = size, self.CHANCES[0][0]
                while (
                    length < min(most, places[-1]) and self.tokens[places[-1] - 1 - length] == self.tokens[-1 - length]
                ):
                    length += 1
                return next(chance for least, chance in self.CHANCES if least <= length)
        return None

    def continuations(self, length: int) -> _Continuation:
        """Merged continuations of earlier occurrences of the last tokens, up to `length` tokens deep."""
        root, seen, end = _Continuation(), set(), len(self.tokens)
        for size in self.sizes:
            places = self.places.get(tuple(self.tokens[end - size : end]), ()) if size <= end else ()
            for age, place in enumerate(reversed(places[-self.MAX_MATCHES :])):
                if place in seen:
                    continue
                seen.add(place)
                root.add(self.tokens[place : place + length], weight=4.0**size / (1.0 + age))
            if len(seen) >= self.MAX_MATCHES:
                break
        return root


@dataclass
class _Continuation:
    """A node of the merged continuations: its weight, and its children by token."""

    weight: float = 0.0
    children: dict[int, _Continuation] = field(default_factory=dict)

    def add(self, tokens: list[int], weight: float) -> None:
        node = self
        node.weight += weight
        for token in tokens:
            node = node.children.setdefault(token, _Continuation())
            node.weight += weight

    def ranked(self) -> list[tuple[int, _Continuation]]:
        """Pairs of token and child, the heaviest child first."""
        return sorted(self.children.items(), key=lambda item: -item[1].weight)


# ----------------------------------------------------------------------------------------------------- filling a tree


@dataclass
class _Filled:
    """One row's nodes in breadth-first order: tokens, and parents (0: the root)."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


def _fill_static(tree: TokenTree, root: _Continuation, depth: int) -> _Filled:
    """Fills the nodes of a static tree by rank; nodes for which no continuation was found are left out."""
    filled, found = _Filled(), {0: (0, root.ranked())}
    for node in range(1, tree.level_offsets[depth + 1]):
        parent, candidates = found.get(tree.parents[node], (0, ()))
        if tree.ranks[node] < len(candidates):
            token, continuation = candidates[tree.ranks[node]]
            filled.tokens.append(token)
            filled.parents.append(parent)
            found[node] = len(filled.tokens), continuation.ranked()
    return filled


def _fill_dynamic(tree: DynamicTree, root: _Continuation, depth: int) -> _Filled:
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
    return _Filled([candidates[i][3] for i in chosen], [nodes[candidates[i][2]] for i in chosen])


def _as_draft_tree(rows: list[_Filled], num_nodes: int, device: torch.device, vocab_size: int) -> DraftTree:
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


def _without_foreign(filled: _Filled, vocab_size: int) -> list[int]:
    tokens: list[int] = []
    for token, parent in zip(filled.tokens, filled.parents, strict=True):
        counts = token < vocab_size and (parent == 0 or tokens[parent - 1] >= 0)
        tokens.append(token if counts else -1)
    return tokens
