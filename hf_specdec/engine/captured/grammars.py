"""
Grammars of rows in captured steps.

A step chooses tokens from p without the mask, and the host takes them up to the first that the grammar does not allow,
in place of which it chooses one with the mask. That is a draw from the masked distribution, by rejection: a token of p
is kept if it is allowed, and else drawn again among those that are.

Where a grammar asks for one token alone, the host knows those that follow a root before the step begins: with the
mask, p is 1 for the first of them at the root, and for each other one below the one before it. So the draft's logits
are masked along this chain while its tree grows, and the target's before the walks, which accept the chain as far as
the tree has it. What comes below it is drafted and verified like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...drafters.growth import LevelNodes
from ...trees import Topology
from ...verification import draw_by_position
from ...verification.choosing import NOTHING_TO_CHOOSE, choose
from ..request import Request


class ForcedLimits:
    """
    Hides all other tokens along the chain that is asked for from a draft's logits; see `TokenLimits`. The chain's
    nodes come first in their levels, since no others are as likely.

    Args:
        forced (`torch.Tensor` of shape `[rows, levels + 1]`, int64): the tokens, padded with -1.
        columns (`torch.Tensor` of shape `[vocab]`, int64, *optional*): the draft's column of every token, -1 for none.
    """

    def __init__(self, forced: torch.Tensor, columns: torch.Tensor | None = None):
        if columns is not None:
            forced = torch.where(forced < 0, -1, columns[forced.clamp(min=0)])
            forced = forced.masked_fill((forced < 0).cumsum(dim=1) > 0, -1)  # no node, and so none below it
        self._forced, self._level = forced, 0

    def at_root(self, logits: torch.Tensor) -> torch.Tensor:
        return _hide_others(logits, self._forced[:, 0])

    def below(self, nodes: LevelNodes, logits: torch.Tensor) -> torch.Tensor:
        self._level += 1
        first = _hide_others(logits[:, 0], self._forced[:, self._level])
        return torch.cat([first[:, None], logits[:, 1:]], dim=1)


def _hide_others(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[…, vocab]` with -inf for all but one token; as they are where that token (`[…]`) is negative."""
    others = torch.arange(logits.shape[-1], device=logits.device) != tokens[..., None]
    return logits.masked_fill(others & (tokens >= 0)[..., None], -torch.inf)


def force(
    logits: torch.Tensor, highest: torch.Tensor, forced: torch.Tensor, tokens: torch.Tensor, topology: Topology
) -> torch.Tensor:
    """
    Hides all tokens but the one that is asked for from the target's logits, in place, at the nodes where one is.
    Returns the largest logits of all nodes, of which those nodes have the logit of their token.

    Args:
        logits (`torch.Tensor` of shape `[rows, nodes, vocab]`): the target's logits.
        highest (`torch.Tensor` of shape `[rows, nodes]`): the largest of every node.
        forced (`torch.Tensor` of shape `[rows, levels + 1]`, int64): see `ForcedLimits`.
        tokens (`torch.Tensor` of shape `[rows, nodes]`, int64): tokens of the nodes, -1 for those that do not count.
        topology (`Topology`): the trees' shape.
    """
    depths = topology.depths.expand(tokens.shape)
    fits = (tokens >= 0) & (tokens == forced.gather(1, (depths - 1).clamp(min=0))) | (depths == 0)
    is_on_chain = ~(~fits[:, None] & topology.ancestors).any(dim=2)
    # The chain's node of every level, or the root once more where there is none: it is written twice, alike.
    levels = torch.arange(forced.shape[1], device=forced.device)
    is_there = is_on_chain[:, None] & (depths[:, None] == levels[:, None])
    nodes = is_there.int().argmax(dim=2)
    wanted = forced.gather(1, depths.gather(1, nodes))
    places = nodes[:, :, None].expand(-1, -1, logits.shape[2])
    found = _hide_others(logits.gather(1, places), wanted)
    logits.scatter_(1, places, found)
    return highest.scatter(1, nodes, found.amax(dim=-1))


def has_grammar(requests: Iterable[Request]) -> bool:
    """Whether any of these requests has a grammar."""
    return any(request.options.grammar is not None for request in requests)


def constrained(
    request: Request, tokens: list[int], logits_at: Callable[[int], torch.Tensor]
) -> tuple[list[int], ValueError | None]:
    """
    The new tokens that a request takes from a captured step; and an error after them, if no token of the vocabulary
    continues the text, or none that does has a score.

    Args:
        request (`Request`): before the step.
        tokens (`list[int]`): the tokens that the step has chosen.
        logits_at (`Callable[[int], torch.Tensor]`): logits from which a token was chosen, `[vocab]`, by its number.
    """
    mask = request.options.grammar
    assert mask is not None  # who calls this has seen it
    kept = list[int]()
    try:
        count = mask.num_allowed(request.new_tokens, tokens)
        if count == len(tokens):
            return tokens, None
        kept, logits = tokens[:count], logits_at(count)[None].float()
        scores = request.options.processors(torch.tensor([request.tokens + kept], device=logits.device), logits)
        if not scores.amax().isfinite():
            raise ValueError(NOTHING_TO_CHOOSE)
    except ValueError as unsatisfied:
        return kept, unsatisfied
    if request.noise is None:
        return [*kept, int(choose(scores, request.options.do_sample))], None
    # The best of the allowed tokens, by the same noise: the host, which draws with the mask, would draw it, too.
    noise = request.noise.take(request.length + count, scores.shape[-1])
    return [*kept, int(draw_by_position(scores, [noise]))], None
