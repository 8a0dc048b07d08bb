"""Drafting with an assistant of Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedModel

from ..gemma import GemmaAssistant
from ..gemma.modeling_gemma import Shared, SharedBlocks, SharedKV
from ..models.structure import config_of_layer
from ..sequences import Rows
from ..trees import DraftTree, DynamicTree, TokenTree, Tree
from .captured import CapturedDraft
from .growth import LevelNodes, Warp, grow
from .heads import Borrowed, roots_of, tree_of_head
from .last_feature import CapturedLastFeature, LastFeatureDrafter, LastFeatureDrafting


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
    from ..engine.request import Request
    from ..forwards.target import TreeTarget
    from .request import DraftRequest

TARGETS = ("gemma4_text", "gemma4_unified_text")
"""Values of `model_type` of text configs of targets that have assistants."""


class GemmaDrafter(LastFeatureDrafter):
    """
    Drafts with an assistant of Gemma 4, which attends to the target's own K/V of the committed tokens. It keeps
    nothing of a text but the feature of the token before the root, so that there is nothing to catch up with; every
    level of a tree is one more forward, over the states of the nodes above.

    Args:
        assistant (`GemmaAssistant`): the assistant.
    """

    heads: GemmaAssistant
    has_probabilities = reads_noise = runs_in_graphs = True

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """The tree that the config names; else a dynamic one of 31 draft tokens, or of 11 on a CPU."""
        size = (4, 3, 11) if self.heads.device.type == "cpu" else (5, 6, 31)
        return tree_of_head(self.heads, *size, num_tokens=self.num_tokens)

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.heads.config.vocab_size

    @property
    def feature_size(self) -> int:
        return self.heads.config.backbone_hidden_size

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        text_config, config = target.config.get_text_config(decoder=True), self.heads.config
        name = type(target).__name__
        if text_config.model_type not in TARGETS:
            raise ValueError(
                f"`assistant_model`: the GemmaAssistant reads keys and values of a Gemma 4, but the target is "
                f"{name} (`model_type`={text_config.model_type!r}). Use the Gemma 4 that it is for, or another draft."
            )
        for size, its_size, what in (
            (config.vocab_size, text_config.vocab_size, "a vocabulary of"),
            (config.backbone_hidden_size, text_config.hidden_size, "a hidden size of"),
        ):
            if size != its_size:
                raise _other_gemma(f"{what} {size}", name, str(its_size))
        sources = shared_layers(target)
        for kind in self.heads.layer_kinds:
            if kind not in sources:
                raise _other_gemma(f"layers of the kind {kind}", name, f"only {', '.join(sorted(sources))}")
            size, its = self.heads.head_dim(kind), config_of_layer(text_config, sources[kind])
            if size != its.head_dim:
                raise _other_gemma(f"keys of size {size} in layers of the kind {kind}", name, str(its.head_dim))
            heads, its_heads = config.text_config.num_attention_heads, its.num_key_value_heads
            if heads % its_heads:
                raise _other_gemma(f"{heads} heads in layers of the kind {kind}", name, f"{its_heads} of keys")

    # ------------------------------------------------------------------------------------------------------- a call

    def for_call(self, target: PreTrainedModel) -> Self:
        drafter = super().for_call(target)
        drafter._embedding = Borrowed(target.get_input_embeddings(), target.dtype)
        drafter.sources = shared_layers(target)
        return drafter

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        with super().watching(target):
            self.target = target
            try:
                yield
            finally:
                del self.target

    @torch.no_grad()
    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        self._begin(roots_of(sequences).to(self.device))
        noise = self.request.noise(sequences.lengths)
        depth, warp = min(max(room), tree.depth), self.request.warp_if_drawn
        draft = grow(tree, self._root_logits, self.run_level, depth, warp, noise, self.request.limits(sequences))
        return draft.to(sequences.device).within(room)

    def _begin(self, roots: torch.Tensor) -> None:
        """Reads what all nodes of the tree attend to, and runs the roots (`[batch, 1]`)."""
        forward = self.target.forward
        cache = forward.cache
        self.shared: dict[str, Shared] = {kind: self._read(kind) for kind in self.heads.layer_kinds}
        self.run_roots(roots, cache.lengths_tensor[:, None] + forward.position_shift[..., None])

    def run_roots(self, roots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, vocab]` after the roots (`[batch, 1]`), which are at `positions` (`[batch, 1]`)."""
        before = 1 if self.heads.config.position_of_feature else 0
        self._positions = (positions - before).clamp(min=0).to(self.device)
        self._root_logits = self._run(roots, self._last[:, None])[:, 0]
        return self._root_logits

    def _run(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, nodes, vocab]` of nodes, from the states of their parents."""
        embeddings = self._embedding(tokens).to(self.heads.dtype)
        output = self.heads(features, embeddings, self._positions, self.shared)
        self._states = output.hidden_states
        return output.logits

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        parents = nodes.parents.expand(len(nodes.tokens), -1)
        features = self._states.gather(1, parents[:, :, None].expand(-1, -1, self._states.shape[2]))
        return self._run(nodes.tokens, features)

    def _read(self, kind: str) -> SharedKV:
        """The target's K/V of the committed tokens that layers of a kind attend to."""
        forward, window = self.target.forward, self.heads.window(kind)
        cache = forward.cache
        shortest, longest = min(cache.lengths), max(cache.lengths)
        layer: Any = cache.layers[self.sources[kind]]
        first = 0 if window is None else max(shortest - window, getattr(layer, "first", 0))
        keys, values = layer.read(first, longest)
        keys, values = (states.to(self.device, self.heads.dtype) for states in (keys, values))
        visible = forward.visible
        if shortest == longest and (visible is None or bool(visible[:, first:].all())):
            return SharedKV(keys, values)
        slots = torch.arange(first, longest, device=cache.device)
        lengths = cache.lengths_tensor[:, None]
        mask = slots < lengths
        if window is not None:
            mask &= slots >= lengths - window
        if visible is not None:
            known = visible[:, first:].to(mask.device)[:, : mask.shape[1]]
            mask[:, : known.shape[1]] &= known
        return SharedKV(keys, values, mask[:, None, None].to(self.device))


def shared_layers(target: PreTrainedModel) -> dict[str, int]:
    """By kind of layer, the number of the target's last layer of this kind that has K/V of its own."""
    config: Any = target.config.get_text_config(decoder=True)
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: index for index, kind in enumerate(config.layer_types[:own])}


def _other_gemma(what: str, target: str, its: str) -> ValueError:
    return ValueError(
        f"`assistant_model`: the GemmaAssistant is for {what}, but the target {target} has {its}: it belongs to "
        "another Gemma 4. Use the assistant whose name is the target's with `-assistant`."
    )


# ------------------------------------------------------------------------------------- for requests in flight


class CapturedGemma(CapturedLastFeature):
    """An assistant in a captured step, whose layers read the target's blocks by the tables of the step's rows."""

    drafter: GemmaDrafter

    def __init__(
        self,
        drafting: GemmaDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        super().__init__(drafting, tree, rows, draft_request)
        layers, heads = self.drafter.target.forward.cache.layers, self.drafter.heads
        self._layers = {kind: layers[self.drafter.sources[kind]] for kind in heads.layer_kinds}

    def without_drafter(self) -> CapturedDraft:
        held: Any = super().without_drafter()
        held._layers = None
        return held

    def grown(self, last: torch.Tensor, warp: Warp | None) -> DraftTree:
        rows, drafter, tree = self.rows, self.drafter, self.tree
        assert tree is not None
        lengths = rows.lengths - 1
        drafter.shared = {
            kind: SharedBlocks(layer.keys, layer.values, rows.tables, lengths, drafter.heads.window(kind))
            for kind, layer in self._layers.items()
        }
        drafter.take_last(last)
        shift = 0 if rows.position_shift is None else rows.position_shift[0]
        root_logits = drafter.run_roots(rows.roots, (lengths + shift)[:, None])
        return grow(tree, root_logits, drafter.run_level, tree.depth, warp, limits=rows.limits())


class GemmaDrafting(LastFeatureDrafting):
    """Drafts with an assistant of Gemma 4 for requests in flight, from the target's blocks."""

    drafter: GemmaDrafter
    captured_draft = CapturedGemma

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        cache: Any = self.drafter.target.forward.cache
        cache.seat([request.table for request in requests])
        return super().propose(requests, draft_request)
