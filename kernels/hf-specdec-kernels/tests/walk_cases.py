"""Random trees, logits and random numbers for the tests of the walks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """
    Sizes and options of a random call of a walk.

    Args:
        sharpness (`float`): standard deviation of the target's logits.
        distance (`float`): standard deviation of the draft's logits around the target's.
        draft_vocab (`int`, *optional*): size of the draft vocabulary.
        support (`int`, *optional*): number of tokens that are possible under q.
        ties (`bool`): whether logits are rounded to halves.
    """

    batch: int = 10
    nodes: int = 9
    vocab: int = 11
    dtype: torch.dtype = torch.float32
    sharpness: float = 1.5
    distance: float = 0.7
    own_trees: bool = True
    draft_vocab: int | None = None
    support: int | None = None
    void: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    ends: bool = False
    resting: bool = False
    ties: bool = False
    indexed: bool = False
    max_depth: int | None = None


def tree_arguments(case: Case, device: torch.device) -> dict:
    """The arguments that all walks take."""
    logits = case.sharpness * torch.randn(case.batch, case.nodes, case.vocab)
    if case.ties:
        logits = (2 * logits).round() / 2
    parents = torch.stack([random_parents(case.nodes) for _ in range(case.batch if case.own_trees else 1)])
    tokens = torch.randint(0, case.vocab, (case.batch, case.nodes))
    # Half of the tokens are the parent's argmax, so that walks go far.
    follow = torch.rand(case.batch, case.nodes) < 0.5
    best = logits.argmax(-1).gather(1, parents.expand(case.batch, -1))
    tokens = torch.where(follow, best, tokens)
    if case.void:
        tokens = torch.where(torch.rand(case.batch, case.nodes) < 0.3, -1, tokens)
    depth = case.nodes - 1 if case.max_depth is None else case.max_depth
    return {
        "logits": logits.to(device, case.dtype),
        "tokens": tokens.to(device),
        "parents": parents.to(device),
        "max_depth": depth,
        "end_tokens": torch.tensor([1, 4], device=device) if case.ends else None,
        "active": (torch.rand(case.batch) < 0.7).to(device) if case.resting else None,
    }


def filter_arguments(case: Case, device: torch.device) -> dict:
    """Temperature, top-k and top-p, one per row, some without effect."""
    top_k = torch.randint(0, case.vocab + 2, (case.batch,))
    top_p = torch.where(torch.rand(case.batch) < 0.2, 1.0, 0.1 + 0.9 * torch.rand(case.batch))
    return {
        "temperature": (0.3 + 1.5 * torch.rand(case.batch)).to(device) if case.temperature else None,
        "top_k": top_k.to(device) if case.top_k else None,
        "top_p": top_p.to(device) if case.top_p else None,
    }


def draft_arguments(case: Case, device: torch.device, tree: dict) -> dict:
    """The arguments of a draft near the target; replaces the tokens in `tree` by children drawn from it, in order."""
    size = case.draft_vocab or case.vocab
    vocabulary = torch.randperm(case.vocab)[:size].sort().values
    scores = tree["logits"].cpu().float()[..., vocabulary] + case.distance * torch.randn(case.batch, case.nodes, size)
    if case.support is not None:
        scores = scores.masked_fill(scores < scores.topk(case.support, dim=-1).values[..., -1:], -torch.inf)
    scores = scores.to(case.dtype)
    heat = 0.5 + torch.rand(case.batch) if case.temperature else None
    heated = scores.float() if heat is None else scores.float() / heat[:, None, None]
    parents = tree["parents"].cpu().expand(case.batch, -1)
    perturbed = heated - torch.empty_like(heated).exponential_().log()
    most = min(size, case.nodes)
    order = perturbed.topk(most, dim=-1)
    tokens = torch.full((case.batch, case.nodes), -1)
    for row in range(case.batch):
        drawn = [0] * case.nodes
        for node in range(1, case.nodes):
            parent = int(parents[row, node])
            rank = drawn[parent]
            drawn[parent] += 1
            if rank < most and order.values[row, parent, rank] > -torch.inf:
                tokens[row, node] = vocabulary[order.indices[row, parent, rank]]
    if case.void:
        # The last children may be dropped, as long as the choice does not depend on their tokens.
        tokens[:, case.nodes - 2 :] = -1
    tree["tokens"] = tokens.to(device)
    index = None
    if case.indexed:
        shuffled = torch.randperm(case.nodes)
        scores = torch.empty_like(scores).index_copy(1, shuffled, scores)
        index = shuffled[None].clone()
        index[0, 3] = -1
    columns = torch.full((case.vocab,), -1).scatter(0, vocabulary, torch.arange(size))
    return {
        "draft_logits": scores.to(device),
        "draft_index": None if index is None else index.to(device),
        "draft_columns": columns.to(device) if case.draft_vocab else None,
        "draft_temperature": None if heat is None else heat.to(device),
    }


def random_parents(nodes: int) -> torch.Tensor:
    """Parents `[nodes]` of a random tree: a parent comes before its children."""
    parents = torch.zeros(nodes, dtype=torch.long)
    for node in range(1, nodes):
        parents[node] = torch.randint(max(0, node - 4), node, ())
    return parents


def uniforms(case: Case, device: torch.device) -> torch.Tensor:
    return torch.rand(case.batch, case.nodes, dtype=torch.float64).to(device)
