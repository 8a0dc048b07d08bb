"""A wrapper of a drafter that shows every step to an observer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from transformers import PreTrainedModel

from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree
from .base import Drafter
from .request import DraftRequest


if TYPE_CHECKING:
    from ..forwards.target import TreeTarget

Observer = Callable[[DraftTree | None, list[list[int] | None]], None]


class ObservedDrafter(Drafter):
    """
    Wraps a drafter, and shows every step to an observer.

    Args:
        drafter (`Drafter`): the wrapped drafter (`as_drafter` makes one of a model or head).
        observer (`Callable[[DraftTree | None, list[list[int] | None]], None]`): called after every step with the tree
            that was proposed (None if none was) and, for every row, the accepted nodes from the root's child down
            (None: not even the root is committed). Stopping criteria may still drop the last accepted nodes. The
            step's tokens reach the streamer afterwards, except where logits processors read the text so far of one
            sequence: then each token is streamed as soon as it is accepted.
    """

    def __init__(self, drafter: Drafter, observer: Observer):
        self.drafter, self.observer = drafter, observer
        self.has_probabilities = drafter.has_probabilities
        self.default_tree = drafter.default_tree
        self.max_depth, self.num_tokens = drafter.max_depth, drafter.num_tokens
        self.prior, self.reads_noise = drafter.prior, drafter.reads_noise

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self.drafter.models

    @property
    def times_key(self) -> Any:
        return self.drafter.times_key

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        self.drafter.check(target, tree)

    def for_call(self, target: PreTrainedModel) -> Self:
        of_call = copy.copy(self)
        of_call.drafter = self.drafter.for_call(target)
        return of_call

    def watching(self, target: TreeTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self._proposed: DraftTree | None = None
        super().start(sequences, request)
        self.drafter.start(sequences, request)

    def evidence(self, sequences: Sequences) -> Evidence | None:
        return self.drafter.evidence(sequences)

    def propose(self, sequences: Sequences) -> DraftTree | None:
        self._proposed = self.drafter.propose(sequences)
        return self._proposed

    def wipe(self) -> None:
        self.drafter.wipe()

    def commit(self, paths: list[list[int] | None]) -> None:
        proposed, self._proposed = self._proposed, None
        self.observer(proposed, paths)
        self.drafter.commit(paths)
