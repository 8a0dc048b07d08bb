"""A drafter that knows what plain `generate` writes: for targets that take no draft model, or none at hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from hf_specdec import Drafter, DraftTree, TokenTree, Topology
from hf_specdec.drafters import DraftRequest
from hf_specdec.sequences import Sequences


class ScriptedDraft(Drafter):
    """
    Fills a fixed tree. Along one of its paths, another one at every step and row, stand the next tokens of the text,
    now and then a wrong one; at all other nodes, random ones.

    Args:
        texts (`Sequence[Sequence[int]]`): the new tokens of every row.
        hit (`float`): how often a token of the path is right.
    """

    def __init__(self, texts: Sequence[Sequence[int]], hit: float = 0.8):
        self.texts, self.hit, self.random = texts, hit, random.Random(0)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        self._begins = sequences.prompt_length

    def propose(self, sequences: Sequences) -> DraftTree | None:
        tree = self.request.tree
        assert isinstance(tree, TokenTree)
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        if max(room) == 0:
            return None
        rows = [self._tokens(tree, row, sequences.lengths[row] - self._begins) for row in range(len(room))]
        parents = torch.tensor([[0, *tree.parents[1:]]] * len(room))
        return DraftTree(torch.tensor(rows), Topology.of_parents(parents, tree.depth)).within(room)

    def _tokens(self, tree: TokenTree, row: int, written: int) -> list[int]:
        right = self.random.choice(tree.paths)
        tokens: dict[tuple[int, ...], int] = {}
        for path in tree.paths:
            taken = {token for other, token in tokens.items() if other[:-1] == path[:-1]}
            place = written + len(path) - 1
            known = self.texts[row][place] if place < len(self.texts[row]) else None
            is_right = path == right[: len(path)] and self.random.random() < self.hit
            free = [one for one in range(self.request.vocab_size) if one not in taken and one != known]
            tokens[path] = known if is_right and known is not None else self.random.choice(free)
        return list(tokens.values())
