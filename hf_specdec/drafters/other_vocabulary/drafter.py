"""What drafters with a model of another vocabulary have in common: the texts that the model reads."""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers import PreTrainedModel

from ...cache import TreeCache
from ...models.structure import execution_device
from ...sequences import Rows, Sequences, StepRows
from ...states import layer_kinds_of
from ...trees import DraftTree
from ..base import Drafter
from ..draft_model import DraftModelDrafter
from ..request import DraftRequest
from .texts import DraftText
from .translation import Translation


class OtherVocabularyDrafter(DraftModelDrafter):
    """
    Drafts with a causal language model of another tokenizer. At every step it reads the committed text encoded anew,
    and forwards what follows the tokens that are as before.

    Args:
        model (`PreTrainedModel`): the draft model.
        translation (`Translation`): between the target's tokens and the draft's.
    """

    runs_in_graphs = False
    tokenizers: tuple[Any, Any] | None = None
    """The tokenizers of target and draft, by which transformers itself would draft with the model."""
    way = ""
    """The way in which it drafts, in words."""

    def __init__(self, model: PreTrainedModel, translation: Translation):
        super().__init__(model)
        self.translation = translation

    @property
    def summary(self) -> str:
        """How it drafts, and what it shares with the target, in one line."""
        translation = self.translation
        return (
            f"{type(self.model).__name__} drafts {self.way}: it has {translation.num_texts} of the target's "
            f"{len(translation.target.tokens)} tokens ({translation.share_of_vocabulary:.0%} of its vocabulary, "
            f"{translation.share_of_text:.0%} of the tokens of a text)."
        )

    def check_vocabulary(self, target: PreTrainedModel) -> None:
        if layer_kinds_of(self.model) is not None:
            raise ValueError(
                f"`assistant_tokenizer`: the draft {type(self.model).__name__} has recurrent states, which cannot "
                "take back tokens when the text is encoded anew. Use a draft with attention alone, or of the target's "
                "vocabulary."
            )

    def for_call(self, target: PreTrainedModel) -> Self:
        return Drafter.for_call(self, target)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self.ask(request)
        rows, device = sequences.batch_size, execution_device(self.model)
        self._texts: list[Any] = [DraftText(self.translation) for _ in range(rows)]
        ids, visible = sequences.columns(sequences.prompt_length), sequences.visible
        for text, row in zip(self._texts, range(rows), strict=True):
            text.read((ids[row] if visible is None else ids[row][visible[row]]).tolist())
            text.num_read = ids.shape[1]  # with the padding, as positions count that draw tokens
        self._lengths_read = [sequences.prompt_length] * rows
        ratio = max(1.0, self.translation.tokens_ratio)
        storage = request.storage(self.model, sequences, self.most_slots(request.plan), ratio)
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        capacity = 2 * max(text.length for text in self._texts) + 256
        cache = TreeCache(num_layers, rows, device, capacity, storage)
        self.begin(cache, None, torch.zeros(rows, dtype=torch.long, device=device))

    def propose(self, sequences: Rows) -> DraftTree | None:
        """Proposes for the rows of a call, or for texts that have been read (`StepRows` of `DraftText`s)."""
        if isinstance(sequences, StepRows):
            return super().propose(sequences)
        draft = super().propose(self._read(sequences))
        return None if draft is None else draft.to(sequences.device)

    def _read(self, sequences: Any) -> StepRows:
        """The texts of the rows of a call (`Sequences`); those that do not go on stay as they are."""
        lengths, kept = sequences.lengths, list(self.cache.lengths)
        start = min(self._lengths_read)
        new = sequences.columns(max(lengths))[:, start:].tolist()
        for row, text in enumerate(self._texts):
            text.room = sequences.room(row)
            if text.room > 0:
                same = text.read(new[row][self._lengths_read[row] - start : lengths[row] - start])
                self._lengths_read[row] = lengths[row]
                kept[row] = min(kept[row], same)
        self.cache.set_lengths(kept)
        starts = [min(count, text.length - 1) for count, text in zip(kept, self._texts, strict=True)]
        return StepRows(self._texts, self.device, starts)

    def wipe(self) -> None:
        self.cache.set_lengths([0] * len(self.cache.lengths))
        super().wipe()
