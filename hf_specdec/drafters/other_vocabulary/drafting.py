"""Drafting with a model of another vocabulary for requests in flight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel

from ...cache.blocks import BlockPool
from ...graphs import GraphPool
from ...trees import DraftTree
from ...trees.joining import join_drafts
from ..draft_model import DraftModelDrafting
from ..drafting import Drafting
from ..request import DraftRequest
from .drafter import OtherVocabularyDrafter
from .texts import DraftText


if TYPE_CHECKING:
    from ...engine.request import Request


class OtherVocabularyDrafting(Drafting):
    """
    Drafts as with a model of the target's vocabulary, but for the requests' texts in the draft's tokens. These have
    blocks of their own, since their numbers differ. A request whose text finds none is not drafted for.

    Args:
        drafter (`OtherVocabularyDrafter`): the drafter of a call.
        pool (`BlockPool`): the target's blocks; there are as many for the draft as its number of tokens suggests.
        max_requests (`int`), cuda_graphs (`bool` or `"auto"`), graph_pool (`GraphPool`, *optional*): see
            `drafting_of`.
    """

    def __init__(
        self,
        drafter: OtherVocabularyDrafter,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        num_blocks = math.ceil(max(1.0, drafter.translation.tokens_ratio) * pool.num_blocks)
        self._pool = BlockPool(num_blocks, pool.block_size)
        self._of_texts = DraftModelDrafting(drafter, self._pool, max_requests, cuda_graphs, graph_pool)
        self._texts: dict[Request, DraftText] = {}

    @property
    def drafter(self) -> OtherVocabularyDrafter:
        """The drafter of the call."""
        return self._of_texts.drafter

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return self._of_texts.models

    @property
    def about(self) -> str:
        return self.drafter.summary

    def refresh(self) -> None:
        graphs = self._of_texts.cache.graphs
        if graphs is not None:
            graphs.renew()

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        most_slots = self.num_slots(draft_request.tree)
        texts: list[Any] = [self._text(request) for request in requests]
        rows = [row for row, text in enumerate(texts) if self._pool.reserve(text.table, text.length + most_slots)]
        if not rows:
            return None
        if draft_request.noises is not None:
            draft_request = replace(draft_request, noises=[draft_request.noises[row] for row in rows])
        draft = self._of_texts.propose([texts[row] for row in rows], draft_request)
        return None if draft is None else join_drafts([(rows, draft)], len(requests), draft.tokens.device)

    def _text(self, request: Request) -> DraftText:
        """A request's text as it is now; what the draft's cache holds of it ends where it has changed."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = DraftText(self.drafter.translation)
        cache, new = self._of_texts.cache, request.tokens[text.num_read :]
        cache.note_length(text.table, min(cache.length_of(text.table), text.read(new)))
        text.room = request.room
        return text

    def wipe(self, request: Request) -> None:
        if request in self._texts:
            table = self._texts[request].table
            self._of_texts.cache.wipe_after(table, 0)
            self._of_texts.cache.note_length(table, 0)

    def mark_nan(self, request: Request) -> None:
        if request in self._texts:
            self._of_texts.cache.mark_nan(self._texts[request].table)

    def forget(self, request: Request) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self._of_texts.cache.forget(text.table)
            self._pool.release(text.table)
