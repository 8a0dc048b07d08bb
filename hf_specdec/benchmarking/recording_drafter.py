"""A drafter that counts what is accepted of another one's trees."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from ..drafters import Drafter, DraftRequest
from ..sequences import Sequences
from ..target import Target
from ..trees import DraftTree, DynamicTree, TokenTree
from ..trees.auto_tables import AcceptanceTable


class RecordingDrafter(Drafter):
    """
    Does what another drafter does, and adds every step to a table.

    Args:
        drafter (`Drafter`): the other one.
        table (`AcceptanceTable`): shared by all calls.
    """

    def __init__(self, drafter: Drafter, table: AcceptanceTable):
        self.drafter, self.table = drafter, table
        self.has_probabilities = drafter.has_probabilities
        self.default_tree = drafter.default_tree
        self.max_depth, self.num_tokens = drafter.max_depth, drafter.num_tokens

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        self.drafter.check(target, tree)

    def for_call(self, target: PreTrainedModel) -> RecordingDrafter:
        of_call = copy.copy(self)
        of_call.drafter = self.drafter.for_call(target)
        return of_call

    def watching(self, target: Target) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self._proposed: DraftTree | None = None
        self.drafter.start(sequences, request)

    def propose(self, sequences: Sequences) -> DraftTree | None:
        self._proposed = self.drafter.propose(sequences)
        return self._proposed

    def commit(self, paths: list[list[int] | None]) -> None:
        if self._proposed is not None:
            self.table.add(self._proposed, paths)
            self._proposed = None
        self.drafter.commit(paths)
