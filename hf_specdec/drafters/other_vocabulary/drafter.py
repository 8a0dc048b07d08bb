"""What drafters with a model of another vocabulary have in common: the texts that the model reads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...cache import TreeCache
from ...models.structure import execution_device
from ...sequences import Sequences
from ...states import layer_kinds_of
from ..base import Drafter, DraftRequest
from ..draft_model import DraftModelDrafter
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

    def __init__(self, model: PreTrainedModel, translation: Translation):
        super().__init__(model)
        self.translation = translation

    def check_vocabulary(self, target: PreTrainedModel) -> None:
        if layer_kinds_of(self.model) is not None:
            raise ValueError(
                f"`assistant_tokenizer`: the draft {type(self.model).__name__} has recurrent states, which cannot "
                "take back tokens when the text is encoded anew. Use a draft with attention alone, or of the target's "
                "vocabulary."
            )

    def for_call(self, target: PreTrainedModel) -> OtherVocabularyDrafter:
        of_call: Any = Drafter.for_call(self, target)
        return of_call

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self.ask(request)
        rows, device = sequences.batch_size, execution_device(self.model)
        visible = None if sequences.visible is None else sequences.visible.tolist()
        self._prompts = [
            [token for place, token in enumerate(sequences.tokens(row, 0)) if visible is None or visible[row][place]]
            for row in range(rows)
        ]
        self._prompt_length = sequences.prompt_length
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        cache = TreeCache(num_layers, rows, device, 2 * max(map(len, self._prompts)) + 256)
        self.begin(cache, None, torch.zeros(rows, dtype=torch.long, device=device))
        self._read: list[list[int]] = [[] for _ in range(rows)]

    def text(self, sequences: Sequences, row: int) -> list[int]:
        """The target's tokens of a row, without padding."""
        return self._prompts[row] + sequences.tokens(row, self._prompt_length)

    def read(self, sequences: Sequences) -> list[int]:
        """
        Encodes the texts of rows that go on. Returns the levels of draft tokens that the model has positions for, by
        row.
        """
        for row in range(sequences.batch_size):
            if sequences.room(row) > 0 or not self._read[row]:
                self._read[row] = self.translation.context(self.text(sequences, row))
        most = [sequences.room(row) for row in range(sequences.batch_size)]
        if self.max_positions is None:
            return most
        known = self.max_positions
        return [min(room, known - len(read)) for room, read in zip(most, self._read, strict=True)]

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor) -> None:
        super().begin(cache, visible, shift)
        self._cached: list[list[int]] = [[] for _ in cache.lengths]

    def forward_texts(self) -> None:
        """Forwards what the model has not read of the texts; keeps the logits after them, `[batch, vocab]`."""
        known = [_num_equal(mine, read) for mine, read in zip(self._cached, self._read, strict=True)]
        self.cache.set_lengths(known)
        self.catch_up(_Texts(self._read, self.device))
        self._cached = self._read.copy()

    def wipe(self) -> None:
        self._cached = [[] for _ in self._cached]
        super().wipe()


class _Texts:
    """Texts of the draft's tokens, as `Rows`."""

    def __init__(self, texts: list[list[int]], device: torch.device):
        self.batch_size, self.device, self.lengths = len(texts), device, list(map(len, texts))
        width = max(self.lengths)
        self._ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)

    def room(self, row: int) -> int:
        """Not asked for: the target's rows have the room."""
        return 0

    def last_tokens(self, count: int) -> torch.Tensor:
        """See `Rows`."""
        return self._ids[:, self._ids.shape[1] - count :]

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return self._ids.gather(1, positions)


def _num_equal(first: list[int], second: list[int]) -> int:
    """Number of tokens with which both texts begin."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(place for place in range(shorter) if first[place] != second[place])
