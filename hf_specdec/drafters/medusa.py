"""Drafting with Medusa heads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..medusa import MedusaHeads
from ..models.structure import execution_device
from ..sequences import Rows, Sequences, StepRows
from ..trees import DraftTree, DynamicTree, TokenTree, Tree, as_tree
from .base import Drafter, DraftRequest
from .drafting import Drafting, nodes_of
from .growth import grow_from_positions
from .heads import ModelRefs, in_dtype_of


if TYPE_CHECKING:
    from ..engine.request import Request
    from ..forwards.target import TreeTarget


class MedusaDrafter(Drafter):
    """
    Drafts with Medusa heads. All heads read one feature, that of the last token before the root, so that head d
    proposes the same tokens below every node of depth d; a child's rank is its token's rank in the head's logits.

    Args:
        heads (`MedusaHeads`): the heads.
    """

    def __init__(self, heads: MedusaHeads):
        self.heads = heads

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """
        The tree that the config names; else a dynamic tree, whose shape follows the heads' own probabilities: of 63
        nodes like the reference's static trees, or of 15 on a CPU.
        """
        if self.heads.config.default_tree is not None:
            return as_tree(self.heads.config.default_tree)
        depth = min(self.heads.config.num_heads, 4)
        nodes = 15 if self.heads.device.type == "cpu" else 63
        top_k = min(10, self.heads.config.vocab_size)
        return DynamicTree(depth=depth, top_k=top_k, num_nodes=min(nodes, top_k + (depth - 1) * top_k**2))

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.heads.config.vocab_size

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return self.heads.config.num_heads

    @property
    def times_key(self) -> Any:
        return self.heads

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        config, text_config = self.heads.config, target.config.get_text_config(decoder=True)
        for name, what in (("vocab_size", "vocabulary"), ("hidden_size", "hidden size")):
            if getattr(config, name) != getattr(text_config, name):
                raise ValueError(
                    f"`assistant_model`: the {type(self.heads).__name__} are for a {what} of {getattr(config, name)}, "
                    f"but that of the target {type(target).__name__} is {getattr(text_config, name)}. Use heads that "
                    "were trained for this target."
                )

    # ------------------------------------------------------------------------------------------------------- a call

    def for_call(self, target: PreTrainedModel) -> MedusaDrafter:
        drafter: Any = super().for_call(target)
        drafter._model_refs = ModelRefs(self.heads, target)
        drafter.refresh()
        return drafter

    def refresh(self) -> None:
        """Takes over changes of the heads since `for_call` made the drafter."""
        models = self._model_refs.models()
        if models is not None:
            self.heads = in_dtype_of(*models)
        self.device = execution_device(self.heads)

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        with target.watched([]) as self._features:
            yield

    def take_features(self) -> torch.Tensor:
        """What forwards of the target have computed since the last time, `[batch, tokens, hidden_size]`."""
        return self._features.take(self.device, self.heads.dtype)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        self._last = self.take_features()[:, -1]

    def commit(self, paths: list[list[int] | None]) -> None:
        features = self.take_features()
        nodes = torch.tensor([path[-1] if path else 0 for path in paths], device=self.device)
        last = features[torch.arange(len(paths), device=self.device), nodes]
        if None in paths:
            kept = torch.tensor([path is None for path in paths], device=self.device)[:, None]
            last = torch.where(kept, self._last, last)
        self._last = last

    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        depth = min(tree.depth, max(room))
        logits = torch.stack([head(self._last) for head in self.heads.heads[:depth]], dim=1)
        return grow_from_positions(tree, logits, depth).to(sequences.device).within(room)

    def propose_from(self, sequences: Rows, last: torch.Tensor) -> DraftTree | None:
        """`propose` for sequences whose last features, `[batch, hidden_size]`, are kept elsewhere."""
        self._last = last
        return self.propose(sequences)


# ------------------------------------------------------------------------------------- for requests in flight


class MedusaDrafting(Drafting):
    """Drafts with Medusa heads, which read each request's target feature of the last token before the root."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
        self._last: weakref.WeakKeyDictionary[Request, torch.Tensor] = weakref.WeakKeyDictionary()

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: TreeTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return request in self._last

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        device, dtype = self.drafter.device, self.drafter.heads.dtype
        taken = self.drafter.take_features() if features is None else features.to(device, dtype)
        last = nodes_of(taken, [nodes[-1:] for nodes in kept])
        for row, (request, nodes) in enumerate(zip(requests, kept, strict=True)):
            if nodes:
                self._last[request] = last[row]

    def propose(self, requests: list[Request], asked: DraftRequest) -> DraftTree | None:
        self.drafter.ask(asked)
        starts = [request.length - 1 for request in requests]
        last = torch.cat([self._last[request] for request in requests])
        return self.drafter.propose_from(StepRows(requests, self.drafter.device, starts), last)

    def forget(self, request: Request) -> None:
        self._last.pop(request, None)
