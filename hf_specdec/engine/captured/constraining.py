"""
Grammars of rows in captured steps. A step chooses tokens from p without the mask, and the host takes them up to the
first that the grammar does not allow, in place of which it chooses one with the mask. That is a draw from the masked
distribution, by rejection: a token of p is kept if it is allowed, and else drawn again among those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...verification import draw_by_position
from ...verification.choosing import NOTHING_TO_CHOOSE, choose
from ..request import Request


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
    if mask is None:
        return tokens, None
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
