"""`FeatureDrafter`: drafts with a head that reads the target's hidden states into a K/V cache of its own."""

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
from ...sequences import Rows, Sequences
from ...trees import DraftTree, DynamicTree, TokenTree
from ..base import Drafter
from ..growth import LevelNodes, Noise, TokenLimits, Warp, grow
from ..heads import Borrowed, ModelRefs, borrowed_lm_head, in_dtype_of, roots_of
from ..request import DraftRequest
from .checks import check_sizes, in_draft_vocabulary
from .vocabulary import HeldVocabulary, held_by


if TYPE_CHECKING:
    from ...forwards.target import TreeTarget

MOST_UNPADDED_ROWS = 16
"""Most waiting rows that are forwarded unpadded, by graphs of their exact number: steps leave so few, prompts more."""
DEEPER = 2
"""Levels beyond those of the planned tree that a head estimates: every one costs a row of logits."""
MOST_PENDING = 4096
"""Most features that wait for a forward while speculation is off, counted as steps times rows: bounds their memory."""


class FeatureDrafter(Drafter):
    """
    Drafts with a head that reads the target's hidden states. Row t of the head's input holds the target's feature of
    position t, and where the head wants it the token of position t + 1. The head's cache keeps only rows computed from
    the target's own features: every step first reads the features of the newly accepted tokens, then grows the tree,
    whose K/V the next step overwrites. A subclass says how features are read (`forward_features`) and how trees grow
    (`begin_tree`, `run_level`).

    Args:
        head (`PreTrainedModel`): an `EagleHead` or `BlockHead`.
    """

    has_probabilities = reads_noise = True
    held_vocabulary: HeldVocabulary | None = None
    """The head's draft vocabulary, as the last `refresh` found it; None if it drafts from all tokens."""

    def __init__(self, head: Any):
        self.head = head

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind a row's position on which its K/V depend."""
        return 1

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return (self.head,)

    @property
    def prior(self) -> tuple[float, ...] | None:  # type: ignore[override]
        """Agreement with the target on held-out texts, by depth, as the head's config tells of its training."""
        found = (self.head.config.recipe or {}).get("held_out_top1")
        if not isinstance(found, list | tuple) or not found:
            return None
        are_rates = all(isinstance(rate, int | float) and 0.0 <= rate <= 1.0 for rate in found)
        return tuple(found) if are_rates else None

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.head.config.num_draft_tokens

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        check_sizes(self.head, target)

    # ------------------------------------------------------------------------------------------------------- a call

    def for_call(self, target: PreTrainedModel) -> FeatureDrafter:
        drafter: Any = super().for_call(target)
        drafter._model_refs = ModelRefs(self.head, target)
        drafter.refresh()
        return drafter

    def refresh(self) -> None:
        """Takes over changes of head and target since `for_call` made the drafter."""
        models = self._model_refs.models()
        if models is None:
            return
        target = models[1]
        self.head = in_dtype_of(*models)
        ids = self.head.target_ids
        self.held_vocabulary = None if ids is None else held_by(models[0], ids)
        self._embedding, self._lm_head = self.head.embed_tokens, None
        if self._embedding is None:
            self._embedding = Borrowed(target.get_input_embeddings(), target.dtype)
        if self.head.lm_head is None:
            self._lm_head = borrowed_lm_head(self.head, target)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """The target's token of every index of the head's logits, `[draft vocab]` int64; None: they are the same."""
        return None if self.held_vocabulary is None else self.held_vocabulary.ids

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        boundaries = self.head.config.aux_boundaries(num_layers)
        with target.watched(boundaries) as self._features:
            yield

    def take_features(self) -> torch.Tensor:
        """What forwards of the target have computed since the last time, `[batch, tokens, feature_size]`."""
        return self._features.take(execution_device(self.head), self.head.dtype)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self.ask(request)
        self.sequences: Any = sequences
        device = execution_device(self.head)
        features = self.take_features()
        # Tokens whose K/V was handed in with the call have no features. Inputs that are no tokens (`inputs_embeds`)
        # make one row only, which pairs their last feature with the first token.
        first = max(sequences.prompt_length - features.shape[1], -1)
        features = features[:, features.shape[1] - (sequences.prompt_length - first) :]
        visible = None
        shift = torch.full((sequences.batch_size,), first, device=device)
        if sequences.visible is not None:
            shift -= (~sequences.visible).sum(dim=1).to(device)
            visible = sequences.visible[:, max(first, 0) :].to(device)
        layers = self.head.config.text_config.num_hidden_layers
        storage = request.storage(self.head, sequences, self.most_slots(request.plan))
        cache = TreeCache(layers, sequences.batch_size, device, 2 * features.shape[1] + 256, storage)
        self.begin(cache, visible, shift, first)
        self._pending = [(features, [features.shape[1]] * sequences.batch_size)]

    def ask(self, request: DraftRequest) -> None:
        """Sets the request for the trees that follow, with its warpers translated to the head's draft vocabulary."""
        self.request = in_draft_vocabulary(request, self.target_ids)

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor, first: int) -> None:
        """
        Prepares for forwards into an empty cache; see `TreeForward` for `visible` and `shift` (`position_shift`). The
        first row pairs the feature of token `first` with the token after it.
        """
        self.device, self.cache, self.first = execution_device(self.head), cache, first
        self.forward = TreeForward(self.head, cache, visible, shift, shift_of_all=first if visible is None else None)
        self._pending = []
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

    # ------------------------------------------------------------------------------------------------------- propose

    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        self.catch_up(sequences)
        depth, refine, roots = min(max(room), tree.depth), self.request.refine, roots_of(sequences).to(self.device)
        is_refined = refine is not None and self.has_confidence
        levels = min(max(room), depth + DEEPER) if is_refined else depth
        root_logits = self.begin_tree(self.root_states, roots, levels)
        if refine is not None and is_refined:
            confidences = self.confidence(root_logits, roots).tolist()
            refined = refine({row: its for row, its in enumerate(confidences) if room[row] > 0})
            if refined is None:
                return DraftTree.empty(sequences.batch_size, sequences.device)
            depth = min(levels, refined.depth)
            tree = (refined.truncate(depth) if isinstance(refined, TokenTree) else None) or refined
        noise = self.request.noise(sequences.lengths, self.target_ids)
        limits = self.request.limits(sequences, self.target_ids)
        draft = self.grow(tree, root_logits, depth, self.request.warp_if_drawn, noise, limits)
        draft = draft.in_vocabulary(self.target_ids, self.request.vocab_size)
        return draft.to(sequences.device).within(room)

    def propose_from(self, sequences: Rows, features: torch.Tensor, counts: list[int]) -> DraftTree | None:
        """
        `propose` for sequences whose features are kept elsewhere: `features` (`[batch, rows, feature_size]`), of which
        the first `counts` of every sequence have not been forwarded. Nothing is kept of them here. If it returns None,
        they have not been forwarded.
        """
        self.root_states, self._pending = None, [(features, counts)]
        draft = self.propose(sequences)
        self.sequences, self._pending = None, []  # requests that are over are not kept alive
        return draft

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

    @abstractmethod
    def begin_tree(self, states: torch.Tensor | None, roots: torch.Tensor, depth: int) -> torch.Tensor:
        """
        Begins a tree at the end of the cache: the logits after the root, `[batch, draft vocab]`.

        Args:
            states (`torch.Tensor` of shape `[batch, 1, H]`, *optional*): hidden state of every sequence's last row, as
                `forward_features` returned it.
            roots (`torch.Tensor` of shape `[batch, 1]`, int64): the root of every sequence.
            depth (`int`): levels of the tree.
        """

    @property
    def has_confidence(self) -> bool:
        """Whether the head estimates its acceptance before a tree grows; see `confidence`."""
        return False

    def confidence(self, root_logits: torch.Tensor, roots: torch.Tensor, is_quick: bool = False) -> torch.Tensor:
        """
        The estimated chance that the best token of each level of the tree that was begun is accepted where those
        before it are, `[batch, levels]` float32.

        Args:
            root_logits (`torch.Tensor` of shape `[batch, draft vocab]`): what `begin_tree` returned.
            roots (`torch.Tensor` of shape `[batch, 1]`, int64): the root of every sequence.
            is_quick (`bool`): whether estimates may be of tokens that each position takes for the best by itself, so
                that all levels are computed at once.
        """
        raise NotImplementedError(f"{type(self).__name__} has no confidence head.")

    @abstractmethod
    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, draft vocab]` after one level's nodes, which come level by level."""

    def grow(
        self,
        tree: TokenTree | DynamicTree,
        root_logits: torch.Tensor,
        depth: int,
        warp: Warp | None = None,
        noise: Noise | None = None,
        limits: TokenLimits | None = None,
    ) -> DraftTree:
        """Grows the tree that `begin_tree` has begun; see `growth.grow`."""
        return grow(tree, root_logits, self.run_level, depth, warp, noise, limits)

    def read_rows(self, tokens: torch.Tensor, position_depths: torch.Tensor | None, inputs: dict[str, Any]) -> Any:
        """The head's output for consecutive rows after the cache; `inputs` are keyword arguments of its forward."""
        chain = causal_chain(tokens.shape[1], self.device)
        inputs = {"logits_to_keep": None, **inputs}
        return self.forward(tokens, *chain, position_depths=position_depths, inputs=inputs)

    @property
    def constants(self) -> list[Any]:
        """
        Tensors that are not the head's own, which a captured graph reads as long as it lives: copied rows (weight,
        bias) of the target's lm_head for the draft vocabulary, and the target's token of each of its indices.
        """
        return [getattr(self._lm_head, "rows", None), self.held_vocabulary]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[batch, tokens, H]` in the head's dtype."""
        return self._embedding(tokens).to(self.head.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, rows, draft vocab]` of hidden states."""
        return self.head.compute_logits(states, self._lm_head)
