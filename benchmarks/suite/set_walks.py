"""Walks that accept a set number of tokens, with which steps of random models are timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_specdec.engine.captured.verdicts import Verdict
from hf_specdec.trees import DraftTree, TokenTree
from hf_specdec.verification import Verifier


@contextmanager
def accepting(tree: TokenTree, length: float, device: torch.device) -> Iterator[None]:
    """
    A context in which captured steps of one row or more that grow `tree` accept `length` tokens a step, the bonus
    token included: nodes of the tree's path of best (or first drawn) children. The walks run as well, so a step does
    all its work and some 10 us more for each; the next token of a sampled row is the one that its walk has drawn.
    Steps must be captured within it; those without drafts are left as they are.

    Args:
        tree (`TokenTree`): the tree, whose nodes a static draft has in the same order.
        length (`float`): tokens of a step; between two whole numbers, steps alternate.
        device (`torch.device`): where the steps run.

    Raises:
        ValueError: if the tree is not deep enough.
    """
    if not 1 <= length <= tree.depth + 1:
        raise ValueError(f"`length` must be from 1 to {tree.depth + 1}, the tokens of the deepest path, not {length}.")
    nodes = [0, *(1 + tree.paths.index((0,) * depth) for depth in range(1, tree.depth + 1))]
    best = torch.tensor(nodes, device=device)
    whole, rest = math.floor(length - 1), math.fmod(length - 1, 1)
    carried = {kind: torch.zeros((), dtype=torch.float64, device=device) for kind in Verifier}
    patched: Any = Verdict
    original = patched.walk

    def walk(
        verdict: Verdict,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        draft: DraftTree,
        *rest_of_call: Any,
        **options: Any,
    ) -> Any:
        walked = original(verdict, logits, tokens, draft, *rest_of_call, **options)
        if tokens.shape[1] == 1:
            return walked
        assert tokens.shape[1] == tree.num_nodes + 1
        path, accepted, next_tokens = walked
        path = best.expand(path.shape)
        carried[verdict.kind].add_(rest)
        wanted = (whole + carried[verdict.kind].floor()).long()
        carried[verdict.kind].frac_()
        usable = (tokens.gather(1, path)[:, 1:] >= 0).long().cumprod(dim=1).sum(dim=1)
        accepted = torch.where(accepted < 0, accepted, usable.minimum(wanted))
        if verdict.kind == Verifier.GREEDY:
            last = path.gather(1, accepted.clamp(min=0)[:, None])
            at_last = logits.gather(1, last[:, :, None].expand(-1, 1, logits.shape[2]))[:, 0]
            next_tokens = at_last.argmax(dim=-1).masked_fill(accepted < 0, -1)
        return walked._replace(path=path.contiguous(), accepted=accepted, next_tokens=next_tokens)

    patched.walk = walk
    try:
        yield
    finally:
        patched.walk = original
