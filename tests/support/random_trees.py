"""A drafter of random irregular trees, a new one for every row and step, that hold known texts in part."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from hf_specdec import Drafter, DraftTree, TokenTree, Topology
from hf_specdec.sequences import Sequences


NODES, DEPTH = 12, 5


class RandomTrees(Drafter):
    """
    Every row gets a tree of 1 to 12 nodes, up to 5 deep, in no order but that parents come first. Steps without drafts
    come between, so that one node follows a tree.

    Args:
        texts (`Sequence[Sequence[int]]`): whole texts, prompts included. A node often holds the token that comes next
            in the text which starts as its row.
        seed (`int`): of the trees.
        hit (`float`): how often a node that can be right is.
        rest (`float`): how often a step has no drafts.
        pad (`int`): the token of left padding, which texts leave out.
    """

    default_tree = TokenTree([(0,) * depth for depth in range(1, DEPTH + 1)] + [(n,) for n in range(1, 8)])
    max_depth = DEPTH

    def __init__(
        self, texts: Sequence[Sequence[int]], seed: int = 0, hit: float = 0.75, rest: float = 0.3, pad: int = 0
    ):
        self.texts = [self._unpadded(text, pad) for text in texts]
        self.random, self.hit, self.rest, self.pad = random.Random(seed), hit, rest, pad

    def propose(self, sequences: Sequences) -> DraftTree | None:
        rows = range(sequences.batch_size)
        room = [sequences.room(row) for row in rows]
        most = self.random.randint(1, min(NODES, self.request.tree.num_nodes))
        if max(room) == 0 or self.random.random() < self.rest:
            return None
        parents, tokens, depths = [], [], []
        for row in rows:
            grown = self._tree(self._unpadded(sequences.tokens(row, 0), self.pad), most)
            for values, found in zip((parents, tokens, depths), grown, strict=True):
                values.append(found)
        topology = Topology.of_parents(torch.tensor(parents), max(map(max, depths)))
        return DraftTree(torch.tensor(tokens), topology).within(room)

    def _tree(self, text: list[int], nodes: int) -> tuple[list[int], list[int], list[int]]:
        """Parents and depths of the root and so many nodes, and the tokens of the nodes."""
        rest = next((known[len(text) :] for known in self.texts if known[: len(text)] == text), [])
        vocab = self.request.vocab_size
        parents, depths, tokens, right = [0], [0], list[int](), [True]
        taken: list[set[int]] = [set()]
        while len(tokens) < nodes:
            parent = self.random.choice([node for node, depth in enumerate(depths) if depth < DEPTH])
            next_token = rest[depths[parent]] if right[parent] and depths[parent] < len(rest) else None
            is_right = next_token is not None and next_token not in taken[parent] and self.random.random() < self.hit
            free = [token for token in range(vocab) if token not in taken[parent] and token != next_token]
            token = next_token if is_right and next_token is not None else self.random.choice(free)
            taken[parent].add(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(token)
            right.append(is_right)
            taken.append(set())
        return parents, tokens, depths

    @staticmethod
    def _unpadded(text: Sequence[int], pad: int) -> list[int]:
        start = next((place for place, token in enumerate(text) if token != pad), 0)
        return [int(token) for token in text[start:]]
