"""Checks of what a user's drafter proposes for one request."""

from __future__ import annotations

import torch

from ...drafters import Drafter, DraftRequest
from ...trees import DraftTree


def check_proposal(draft: DraftTree, drafter: Drafter, asked: DraftRequest) -> None:
    """Raises `TypeError` or `ValueError` for a draft that would fail the whole step: all its requests would end."""
    name, most = f"`{type(drafter).__name__}.propose`", asked.tree.num_nodes
    if not isinstance(draft, DraftTree):
        raise TypeError(f"{name} returned {type(draft).__name__}. Return a DraftTree, or None.")
    tokens, topology = draft.tokens, draft.topology
    if tokens.dtype != torch.int64 or tokens.dim() != 2:
        raise TypeError(
            f"{name} returned `tokens` of dtype {tokens.dtype} with {tokens.dim()} dimensions. Return int64 of shape "
            "[1, nodes]."
        )
    if len(tokens) != 1 or topology.rows != 1:
        rows = max(len(tokens), topology.rows)
        raise ValueError(f"{name} returned {rows} rows for 1. Return a tree for each row of `sequences`.")
    if topology.num_nodes != draft.num_nodes or (draft.valid is not None and draft.valid.shape != tokens.shape):
        raise ValueError(
            f"{name} returned {draft.num_nodes} `tokens`, but a `topology` of {topology.num_nodes} nodes or a `valid` "
            "of another shape. Return a token for each node but the root."
        )
    if draft.num_nodes > most:
        raise ValueError(
            f"{name} returned {draft.num_nodes} nodes, but there is memory for the {most} of the step's tree. Return "
            "no more than `tree_within(room)` has, or ask for a larger `tree`."
        )
    counted = draft.tokens if draft.valid is None else draft.tokens[draft.valid]
    foreign = counted[(counted < 0) | (counted >= asked.vocab_size)].tolist()
    if foreign:
        raise ValueError(
            f"{name} returned token {foreign[0]}, but the target knows {asked.vocab_size} from 0. Mark nodes that "
            "are not to count in `valid`."
        )
    if asked.plan.uses_rejection:
        _check_scores(draft, name, asked.vocab_size)


def _check_scores(draft: DraftTree, name: str, vocab_size: int) -> None:
    """Raises `ValueError` for drawn tokens whose distributions cannot be read."""
    index = torch.as_tensor([] if draft.score_index is None else draft.score_index)
    if draft.scores is None or draft.scores.dim() != 3 or index.shape != (1, draft.num_nodes + 1):
        raise ValueError(
            f"{name} returned no `scores` of shape [1, parents, vocab], or a `score_index` that is not [1, nodes + "
            "1]. Return the distributions of drawn tokens, or set `has_probabilities = False`."
        )
    parents = draft.topology.parents[:, 1:] if draft.valid is None else draft.topology.parents[:, 1:][draft.valid]
    used = {node: int(index[0, node]) for node in parents.unique().tolist()}
    missing = [node for node, place in used.items() if not 0 <= place < draft.scores.shape[1]]
    if missing:
        raise ValueError(
            f"{name} returned no distribution for the children of node {missing[0]}. Give its index in `scores` in "
            "`score_index`."
        )
    size = draft.scores.shape[-1] if draft.vocabulary is None else draft.vocab_size
    if size != vocab_size:
        raise ValueError(
            f"{name} returned `scores` for {size} tokens, but the target knows {vocab_size}. Name the target's token "
            "of each column in `vocabulary`."
        )
    if not draft.scores[0, list(used.values())].amax(dim=-1).isfinite().all():
        raise ValueError(
            f"{name} returned `scores` that are NaN, infinite or all -inf. Mark nodes without a distribution in "
            "`valid`."
        )
