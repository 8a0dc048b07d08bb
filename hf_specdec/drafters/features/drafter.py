"""`FeatureDrafter`: drafts with a head that reads the target's hidden states into a K/V cache of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from ...cache import TreeCache
from ...models.structure import execution_device
from ...sequences import Rows, Sequences
from ...trees import DraftTree, DynamicTree, TokenTree
from ..growth import LevelNodes, Noise, TokenLimits, Warp, grow
from ..heads import Borrowed, ModelRefs, borrowed_lm_head, in_dtype_of, roots_of
from ..request import DraftRequest
from .checks import check_sizes, in_draft_vocabulary
from .reading import FeatureReader
from .vocabulary import HeldVocabulary, held_by


DEEPER = 2
"""Levels beyond those of the planned tree that a head estimates: every one costs a row of logits."""


class FeatureDrafter(FeatureReader):
    """
    Drafts with a head that reads the target's hidden states. The head's cache keeps only rows computed from the
    target's own features: every step first reads the features of the newly accepted tokens, then grows the tree, whose
    K/V the next step overwrites. A subclass says how features are read (`forward_features`) and how trees grow
    (`begin_tree`, `run_level`).

    Args:
        head (`PreTrainedModel`): an `EagleHead` or `BlockHead`.
    """

    has_probabilities = reads_noise = True
    held_vocabulary: HeldVocabulary | None = None
    """The head's draft vocabulary, as the last `refresh` found it; None if it drafts from all tokens."""
    first_states: torch.Tensor | None = None
    """Hidden states of the last row that each sequence's cache holds, `[batch, 1, …]`, of heads that read them."""

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

    def for_call(self, target: PreTrainedModel) -> Self:
        drafter = super().for_call(target)
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
        self.root_states, self._pending = self.first_states, [(features, counts)]
        draft = self.propose(sequences)
        self.sequences, self._pending = None, []  # requests that are over are not kept alive
        return draft

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

    @property
    def constants(self) -> list[object]:
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
