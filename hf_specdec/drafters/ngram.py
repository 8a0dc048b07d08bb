"""Drafting without a model: continuations looked up in the prompt and the text so far."""

from __future__ import annotations

from collections.abc import Callable

from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree
from .base import Drafter
from .continuations import Continuation, Filled, as_draft_tree, fill_dynamic, fill_static
from .request import DraftRequest


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
        fill: Callable[..., Filled] = fill_static if isinstance(tree, TokenTree) else fill_dynamic
        self._read(sequences)
        rows: list[Filled] = []
        for row, text in enumerate(self._texts):
            depth = min(tree.depth, sequences.room(row))
            rows.append(fill(tree, text.continuations(depth), depth) if depth > 0 else Filled())
        num_nodes = max(len(filled.tokens) for filled in rows)
        if num_nodes == 0:
            return None
        return as_draft_tree(rows, num_nodes, sequences.device, self.request.vocab_size)

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

    def continuations(self, length: int) -> Continuation:
        """Merged continuations of earlier occurrences of the last tokens, up to `length` tokens deep."""
        root, seen, end = Continuation(), set(), len(self.tokens)
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
