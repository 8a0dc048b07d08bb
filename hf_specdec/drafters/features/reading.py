"""`FeatureReader`: reads the target's hidden states with a head, into the head's K/V cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ...cache import TreeCache
from ...forwards.chunks import LONGEST_FORWARD, WIDTHS
from ...forwards.node_inputs import causal_chain
from ...forwards.tree_forward import TreeForward
from ...graphs import GraphStore
from ...models.structure import execution_device
from ...sequences import Rows
from ..base import CachedDrafter


if TYPE_CHECKING:
    from ...forwards.target import TreeTarget

MOST_UNPADDED_ROWS = 16
"""Most waiting rows that are forwarded unpadded, by graphs of their exact number: steps leave so few, prompts more."""
MOST_PENDING = 4096
"""Most features that wait for a forward while speculation is off, counted as steps times rows: bounds their memory."""


class FeatureReader(CachedDrafter):
    """
    The part of a `FeatureDrafter` that fills the head's cache. Row t of the head's input holds the target's feature of
    position t, and where the head wants it the token of position t + 1. Features wait after a step until the next tree
    is proposed (`catch_up`). A subclass says how the head reads them (`forward_features`).

    Args:
        head (`PreTrainedModel`): an `EagleHead` or `BlockHead`.
    """

    def __init__(self, head: Any):
        self.head = head

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind a row's position on which its K/V depend."""
        return 1

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return (self.head,)

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        boundaries = self.head.config.aux_boundaries(num_layers)
        with target.watched(boundaries) as self._features:
            yield

    def take_features(self) -> torch.Tensor:
        """What forwards of the target have computed since the last time, `[batch, tokens, feature_size]`."""
        return self._features.take(execution_device(self.head), self.head.dtype)

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor, first: int) -> None:
        """
        Prepares for forwards into an empty cache; see `TreeForward` for `visible` and `shift` (`position_shift`). The
        first row pairs the feature of token `first` with the token after it.
        """
        self.device, self.cache, self.first = execution_device(self.head), cache, first
        self.forward = TreeForward(self.head, cache, visible, shift, shift_of_all=first if visible is None else None)
        self._pending: list[tuple[torch.Tensor, list[int]]] = []
        """Features that have not been read, and how many of them count for every sequence."""
        self.root_states: Any = None

    def commit(self, paths: list[list[int] | None]) -> None:
        features = self.take_features()
        kept = [[] if path is None else [0, *path] for path in paths]
        most = max(map(len, kept))
        if kept[0] != list(range(features.shape[1])) or len(kept) > 1:
            padded = [row + [0] * (most - len(row)) for row in kept]
            nodes = torch.tensor(padded, dtype=torch.long, device=self.device)
            features = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[2]))
        self._pending.append((features, [len(row) for row in kept]))
        if len(self._pending) * len(paths) >= MOST_PENDING:
            self.catch_up(self.sequences)

    def wipe(self) -> None:
        self.cache.wipe()

    def catch_up(self, sequences: Rows) -> None:
        """
        Forwards the rows whose features came in since the last call, and keeps the hidden state of every sequence's
        last row, which has the feature before the root, if the head computes any.
        """
        self.sequences = sequences
        if not self._pending:
            return
        done = self.cache.lengths
        counts = [sum(counts) for counts in zip(*(counts for _, counts in self._pending), strict=True)]
        # A sequence that ended within an accepted path has more features than tokens.
        most = [length - 1 - self.first for length in self.sequences.lengths]
        counts = [min(count, end - start) for count, end, start in zip(counts, most, done, strict=True)]
        features = self._features_in_order()
        self._pending = []
        for start in range(0, max(counts), LONGEST_FORWARD):
            self._forward_rows(features, done, counts, start, min(start + LONGEST_FORWARD, max(counts)))

    def _features_in_order(self) -> torch.Tensor:
        """The pending features of every sequence without gaps, `[batch, rows, feature_size]`."""
        if len(self._pending) == 1:
            return self._pending[0][0]
        all_features = torch.cat([features for features, _ in self._pending], dim=1)
        places: list[list[int]] = [[] for _ in self.sequences.lengths]
        offset = 0
        for features, counts in self._pending:
            for of_sequence, count in zip(places, counts, strict=True):
                of_sequence.extend(range(offset, offset + count))
            offset += features.shape[1]
        most = max(map(len, places))
        padded = [of_sequence + [0] * (most - len(of_sequence)) for of_sequence in places]
        index = torch.tensor(padded, dtype=torch.long, device=self.device)
        return all_features.gather(1, index[:, :, None].expand(-1, -1, all_features.shape[2]))

    def _forward_rows(self, features: torch.Tensor, done: list[int], counts: list[int], start: int, end: int) -> None:
        """
        Forwards waiting rows `start` to `end` of every sequence, which has `done` rows in the cache and `counts`
        waiting. The K/V of surplus rows, where fewer wait, lies after the rows that count.
        """
        lengths = self.sequences.lengths
        starts = [rows + self.first + 1 + start for rows in done]
        self.cache.set_lengths([rows + min(start, count) for rows, count in zip(done, counts, strict=True)])
        width = self._width(end - start)
        begins, ends = torch.tensor([starts, lengths], device=self.sequences.device)[:, :, None]
        positions = (begins + torch.arange(width, device=self.sequences.device)).minimum(ends - 1)
        tokens = self.sequences.gather(positions).to(self.device)
        features, depths = features[:, start:end], None
        if width > end - start:
            features = torch.nn.functional.pad(features, (0, 0, 0, width - (end - start)))
            depths = torch.arange(width, device=self.device).clamp(max=end - start - 1)[None]
        states = self.forward_features(tokens, features, depths)
        self.cache.set_lengths([rows + min(end, count) for rows, count in zip(done, counts, strict=True)])
        if states is None:
            return
        last = [min(count, end) - 1 - start if start < count else -1 for count in counts]
        index = torch.tensor(last, device=self.device)[:, None, None]
        root_states = states.gather(1, index.clamp(min=0).expand(-1, 1, states.shape[2]))
        if min(last) < 0 and self.root_states is not None:
            root_states = torch.where(index < 0, self.root_states, root_states)
        self.root_states = root_states

    def _width(self, count: int) -> int:
        """
        Rows to forward for `count` waiting ones: more than `MOST_UNPADDED_ROWS` are padded to a width with CUDA
        graphs, if it fits.
        """
        storage, forward = self.cache.storage, self.forward
        if not isinstance(storage, GraphStore) or not storage.works or count <= MOST_UNPADDED_ROWS:
            return count
        if not forward.can_be_captured or not forward.has_kernel or forward.visible is not None:
            return count
        room = storage.capacity - max(self.cache.lengths)
        return min((width for width in WIDTHS if count <= width <= room), default=count)

    @abstractmethod
    def forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """
        Reads consecutive rows into the cache, and returns their hidden states, `[batch, rows, H]`, or None if nothing
        is drafted from these.

        Args:
            tokens (`torch.Tensor` of shape `[batch, rows]`, int64): the tokens after the features.
            features (`torch.Tensor` of shape `[batch, rows, feature_size]`): the target's features.
            position_depths (`torch.Tensor` of shape `[1 or batch, rows]`, int64, *optional*): see `TreeForward`.
        """

    @abstractmethod
    def cache_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> None:
        """Writes only the K/V of rows from which nothing is drafted; see `forward_features` for the arguments."""

    def read_rows(self, tokens: torch.Tensor, position_depths: torch.Tensor | None, inputs: dict[str, Any]) -> Any:
        """The head's output for consecutive rows after the cache; `inputs` are keyword arguments of its forward."""
        chain = causal_chain(tokens.shape[1], self.device)
        inputs = {"logits_to_keep": None, **inputs}
        return self.forward(tokens, *chain, position_depths=position_depths, inputs=inputs)
