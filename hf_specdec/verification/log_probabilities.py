"""Log-probabilities of a text's tokens, and of the best tokens in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch


MOST_BEST = 20
"""Most best tokens of a place, as in OpenAI's API."""
Mode = Literal["raw", "processed"]


@dataclass(frozen=True)
class LogprobOptions:
    """
    The log-probabilities that a request asks for.

    Args:
        best (`int`): number of best tokens in the place of every token.
        mode (`str`): whether they are those of the model's own output (`"raw"`), or of p (`"processed"`): what
            all logits processors make of it.
    """

    best: int = 0
    mode: Mode = "processed"

    @classmethod
    def of(cls, top_logprobs: Any, mode: Any, by_default: bool) -> LogprobOptions | None:
        """
        What the arguments of a request ask for; None for nothing. Without `top_logprobs` and mode the request has
        those of its tokens alone, if that is so `by_default`.

        Raises:
            ValueError, TypeError: for arguments that ask for nothing known.
        """
        if mode is not None and mode not in get_args(Mode):
            raise ValueError(f'`logprobs_mode` must be "raw" or "processed", but is {mode!r}.')
        if top_logprobs is None:
            return cls(mode=mode or "processed") if by_default or mode is not None else None
        if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, int):
            raise TypeError(
                f"`top_logprobs` must be an integer, but is {type(top_logprobs).__name__}: {top_logprobs!r}. Give the "
                "number of best tokens, or 0 for the log-probabilities of the text's own."
            )
        if not 0 <= top_logprobs <= MOST_BEST:
            raise ValueError(f"`top_logprobs` must be from 0 to {MOST_BEST}, but is {top_logprobs}.")
        return cls(top_logprobs, mode or "processed")


class TokenLogprob(NamedTuple):
    """
    The log-probability of a token.

    Args:
        value (`float`): its natural logarithm.
        best (`list[tuple[int, float]]`): the best tokens in its place with theirs, the best first.
    """

    value: float
    best: list[tuple[int, float]]


def log_probabilities(scores: torch.Tensor, tokens: torch.Tensor, best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of tokens, and of the best ones in their places, in float32.

    Args:
        scores (`torch.Tensor` of shape `[places, vocab]`): logits, or what processors make of them.
        tokens (`torch.Tensor` of shape `[places]`, int64): the token of every place.
        best (`int`): number of best tokens.

    Returns:
        `tuple`: log-probabilities, `[places, 1 + best]` float32, those of `tokens` first; and the best tokens,
        `[places, best]` int64. Where the vocabulary has fewer, -inf and 0 stand for the rest.
    """
    logs = scores.float().log_softmax(dim=-1)
    found = logs.topk(min(best, logs.shape[1]), dim=-1)
    missing = best - found.values.shape[1]
    values = torch.cat([logs.gather(1, tokens[:, None]), found.values], dim=1)
    return (
        torch.nn.functional.pad(values, (0, missing), value=-torch.inf),
        torch.nn.functional.pad(found.indices, (0, missing)),
    )


def token_logprobs(values: list[list[float]], tokens: list[list[int]], best: int) -> list[TokenLogprob]:
    """
    What `log_probabilities` found, on the host, with at most `best` best tokens: those that cannot be drawn are left
    out.
    """
    return [
        TokenLogprob(own, [pair for pair in zip(of, others[:best], strict=False) if pair[1] > -torch.inf])
        for (own, *others), of in zip(values, tokens, strict=True)
    ]
