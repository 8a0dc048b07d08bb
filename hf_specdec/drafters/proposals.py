"""Checks of what a user's drafter proposes for one request."""

from __future__ import annotations

import torch

from ..trees import DraftTree, Topology
from .base import Drafter
from .request import DraftRequest


def check_proposal(draft: DraftTree, drafter: Drafter, draft_request: DraftRequest) -> None:
    """
    Raises `TypeError` or `ValueError` for a draft that would fail the whole step: all its requests would end. Drafters
    of this library are not checked.
    """
    if type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return
    name, most = f"`{type(drafter).__name__}.propose`", draft_request.tree.num_nodes
    if not isinstance(draft, DraftTree):
        raise TypeError(f"{name} returned {type(draft).__name__}. Return a DraftTree, or None.")
    tokens, topology, valid = draft.tokens, draft.topology, draft.valid
    _check_dtype(name, "tokens", tokens, torch.int64)
    if tokens.dim() != 2:
        raise ValueError(f"{name} returned `tokens` of {tokens.dim()} dimensions. Return the shape [1, nodes].")
    if len(tokens) != 1 or topology.rows != 1:
        rows = max(len(tokens), topology.rows)
        raise ValueError(f"{name} returned {rows} rows for 1. Return a tree for each row of `sequences`.")
    if topology.num_nodes != draft.num_nodes or (valid is not None and valid.shape != tokens.shape):
        raise ValueError(
            f"{name} returned {draft.num_nodes} `tokens`, but a `topology` of {topology.num_nodes} nodes or a `valid` "
            "of another shape. Return a token for each node but the root."
        )
    if draft.num_nodes > most:
        raise ValueError(
            f"{name} returned {draft.num_nodes} nodes, but there is memory for the {most} of the step's tree. Return "
            "no more than `tree_within(room)` has, or ask for a larger `tree`."
        )
    if valid is not None:
        _check_dtype(name, "valid", valid, torch.bool)
    _check_topology(topology, name)
    counted = tokens if valid is None else tokens[valid]
    foreign = counted[(counted < 0) | (counted >= draft_request.vocab_size)].tolist()
    if foreign:
        raise ValueError(
            f"{name} returned token {foreign[0]}, but the target knows {draft_request.vocab_size} from 0. Mark nodes "
            "that are not to count in `valid`."
        )
    if draft_request.plan.uses_rejection and counted.numel() > 0:
        _check_scores(draft, name, draft_request.vocab_size)


def _check_dtype(name: str, argument: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        raise TypeError(f"{name} returned `{argument}` of dtype {value.dtype}. Return {dtype}.")


def _check_topology(topology: Topology, name: str) -> None:
    """Raises `TypeError` or `ValueError` for a topology that is no tree in the order of its nodes."""
    parents, depths, ancestors = topology.parents, topology.depths, topology.ancestors
    for argument, value, dtype in (
        ("topology.parents", parents, torch.int64),
        ("topology.depths", depths, torch.int64),
        ("topology.ancestors", ancestors, torch.bool),
    ):
        _check_dtype(name, argument, value, dtype)
    nodes = parents.shape[1]
    if depths.shape != parents.shape or ancestors.shape != (1, nodes, nodes):
        raise ValueError(
            f"{name} returned a `topology` whose `depths` or `ancestors` are not those of {nodes} nodes, the root "
            "included. Make it by `Topology.of_tree` or `Topology.of_parents`."
        )
    before = torch.arange(nodes, device=parents.device).clamp(min=1)
    if not ((parents >= 0) & (parents < before)).all():
        raise ValueError(
            f"{name} returned a `topology` with a parent that does not come before its child: {parents[0].tolist()}."
        )


def _check_scores(draft: DraftTree, name: str, vocab_size: int) -> None:
    """Raises `TypeError` or `ValueError` for drawn tokens whose distributions cannot be read."""
    index = [] if draft.score_index is None else draft.score_index
    if not isinstance(index, torch.Tensor):
        index = torch.tensor(index, device="cpu")
    if draft.scores is None or draft.scores.dim() != 3 or index.shape != (1, draft.num_nodes + 1):
        raise ValueError(
            f"{name} returned no `scores` of shape [1, parents, vocab], or a `score_index` that is not [1, nodes + "
            "1]. Return the distributions of drawn tokens, or set `has_probabilities = False`."
        )
    _check_dtype(name, "score_index", index, torch.int64)
    places = index[0].tolist()
    parents = draft.topology.parents[:, 1:] if draft.valid is None else draft.topology.parents[:, 1:][draft.valid]
    used = {node: places[node] for node in parents.unique().tolist()}
    missing = [node for node, place in used.items() if not 0 <= place < draft.scores.shape[1]]
    if missing:
        raise ValueError(
            f"{name} returned no distribution for the children of node {missing[0]}. Give its index in `scores` in "
            "`score_index`."
        )
    size = draft.scores.shape[-1]
    if draft.vocabulary is not None:
        _check_vocabulary(draft.vocabulary, name, size, vocab_size)
        size = draft.vocab_size or 0
    if size != vocab_size:
        raise ValueError(
            f"{name} returned `scores` for {size} tokens, but the target knows {vocab_size}. Name the target's token "
            "of each column in `vocabulary`, and its number of tokens in `vocab_size`."
        )
    if not draft.scores[0, list(used.values())].amax(dim=-1).isfinite().all():
        raise ValueError(
            f"{name} returned `scores` that are NaN, infinite or all -inf. Mark nodes without a distribution in "
            "`valid`."
        )


def _check_vocabulary(vocabulary: torch.Tensor, name: str, columns: int, vocab_size: int) -> None:
    _check_dtype(name, "vocabulary", vocabulary, torch.int64)
    if vocabulary.shape != (columns,) or not ((vocabulary >= 0) & (vocabulary < vocab_size)).all():
        raise ValueError(
            f"{name} returned a `vocabulary` that does not name one of the target's {vocab_size} tokens for each of "
            f"the {columns} columns of `scores`."
        )
