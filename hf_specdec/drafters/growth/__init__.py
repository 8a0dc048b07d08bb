"""
Growth of a tree, level by level, from a draft's logits, whatever model computes them.

`root_logits` are `[batch, vocab]`; `run_level` forwards one level's nodes (`LevelNodes`) and returns their logits
`[batch, queries, vocab]`.

- `static`: static trees, filled with the best tokens or with drawn ones.
- `dynamic`: dynamic trees from the best tokens.
- `positions`: trees from logits that depend on the position alone, as of Medusa heads.
- `pairs`: trees from logits that depend on the token before, too, as of Markov heads.
- `budgeted`: dynamic trees from drawn tokens.
- `likeliest`: the likeliest nodes of a wider tree.
- `best_tokens`, `drawing`: a level's candidates.
- `nodes`: the nodes that a level forwards.
- `reread`: those of all levels so far, where states let them be read from the root alone.
"""

from __future__ import annotations

import torch

from ...trees import DraftTree, DynamicTree, TokenTree
from .best_tokens import BestTokens, best_tokens
from .budgeted import grow_budgeted
from .drawing import Draws, Tempered, draw_without_replacement
from .dynamic import grow_dynamic
from .likeliest import LikeliestNodes
from .nodes import LevelNodes, Noise, RunLevel, TokenLimits, Warp
from .pairs import grow_from_pairs, pairs_of
from .positions import grow_from_positions
from .reread import RereadNodes, num_forwarded
from .static import grow_drawn, grow_static, held_levels


__all__ = [
    "BestTokens",
    "Draws",
    "LevelNodes",
    "LikeliestNodes",
    "Noise",
    "RereadNodes",
    "RunLevel",
    "Tempered",
    "TokenLimits",
    "Warp",
    "best_tokens",
    "draw_without_replacement",
    "grow",
    "grow_budgeted",
    "grow_drawn",
    "grow_dynamic",
    "grow_from_pairs",
    "grow_from_positions",
    "grow_static",
    "held_levels",
    "num_forwarded",
    "pairs_of",
]


def grow(
    tree: TokenTree | DynamicTree,
    root_logits: torch.Tensor,
    run_level: RunLevel,
    depth: int,
    warp_if_drawn: Warp | None = None,
    noise: Noise | None = None,
    limits: TokenLimits | None = None,
) -> DraftTree:
    """
    Fills a tree with the draft's best tokens, or with tokens drawn from the draft's distribution q.

    Args:
        depth (`int`): levels that can be used (a static tree has no more).
        warp_if_drawn (`Callable`, *optional*): function from the draft's logits to the scores of q; children are then
            drawn from the softmax of the scores, on the device alone if it is a `Tempered`. Without it, children are
            the draft's best tokens.
        noise (`Callable`, *optional*): the noise by which children are drawn; by default it comes from torch's
            generator.
        limits (`TokenLimits`, *optional*): hides tokens that may not come where they would stand. q is what is left.
    """
    if limits is not None:
        root_logits, run_level = limits.at_root(root_logits), _limited(run_level, limits)
    if warp_if_drawn is not None:
        if isinstance(tree, DynamicTree):
            return grow_budgeted(tree, root_logits, run_level, warp_if_drawn, depth, noise)
        return grow_drawn(tree, root_logits, run_level, warp_if_drawn, noise)
    if isinstance(tree, DynamicTree):

        def expand(nodes: LevelNodes) -> BestTokens:
            return best_tokens(run_level(nodes), tree.top_k)

        return grow_dynamic(tree, best_tokens(root_logits, tree.top_k), expand, depth)
    return grow_static(tree, root_logits, run_level)


def _limited(run_level: RunLevel, limits: TokenLimits) -> RunLevel:
    return lambda nodes: limits.below(nodes, run_level(nodes))
