"""Random numbers that belong to positions of a text, so that the text is the same whatever was drafted."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch


class PositionNoise:
    """
    Random numbers of one row by the position of a token, from a seed.

    The token at a position is the argmax of log p + Gumbel noise, which is a draw from p (the Gumbel-max trick). The
    noise depends on the seed and the position alone, so that the text does too: neither a tree nor the batch changes
    it. Draft tokens are the best of log q + the same noise, and therefore often the same token: q close to p is
    accepted about as often as by rejection sampling (arXiv 2408.07978).

    Args:
        seed (`int` or `str`): names the text.
        device (`torch.device`): device of the noise.
    """

    KEPT = 16
    """Positions whose noise is kept: those of the present step's levels, which target and draft read."""

    def __init__(self, seed: int | str, device: torch.device):
        self._seed, self._generator = seed, torch.Generator(device=device)
        self._known: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    @staticmethod
    def new_seed() -> int:
        """A seed drawn from torch's generator of the CPU."""
        return int(torch.randint(2**62, (), device="cpu"))

    def at(self, position: int, vocab_size: int) -> torch.Tensor:
        """Minus Gumbel noise of a position, `[vocab_size]` float32: the logarithm of exponential random numbers."""
        key = position, vocab_size
        if key not in self._known:
            digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            noise = torch.empty(vocab_size, dtype=torch.float32, device=self._generator.device)
            self._known[key] = noise.exponential_(generator=self._generator).log_()
            while len(self._known) > self.KEPT:
                self._known.popitem(last=False)
        return self._known[key]

    def take(self, position: int, vocab_size: int) -> torch.Tensor:
        """As `at`, for the token that the target draws: nothing is asked of this position again."""
        noise = self.at(position, vocab_size)
        for key in [key for key in self._known if key[0] <= position]:
            del self._known[key]
        return noise


class BatchNoise:
    """
    The noise of the rows for which a draft is grown.

    Args:
        rows (`list[PositionNoise]`): the rows' noise.
        lengths (`list[int]`): tokens of every row, root included: the position of the first draft token.
        vocab_size (`int`): size of the target's vocabulary.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token of each of the
            draft's.
    """

    def __init__(
        self,
        rows: Sequence[PositionNoise],
        lengths: Sequence[int],
        vocab_size: int,
        token_ids: torch.Tensor | None = None,
    ):
        self._rows, self._lengths, self._vocab_size, self._token_ids = rows, lengths, vocab_size, token_ids

    def at(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        """Minus the Gumbel noise of a level (from 0), `[batch, 1, draft vocab]`, like `scores` in width and device."""
        noise = torch.stack(
            [row.at(length + level, self._vocab_size) for row, length in zip(self._rows, self._lengths, strict=True)]
        ).to(scores.device)
        if self._token_ids is not None:
            noise = noise.index_select(1, self._token_ids.to(noise.device))
        missing = scores.shape[-1] - noise.shape[1]
        # Tokens that the target does not have are drawn last.
        noise = torch.nn.functional.pad(noise, (0, missing), value=torch.inf) if missing > 0 else noise
        return noise[:, None, : scores.shape[-1]]


def draw_by_position(scores: torch.Tensor, noise: list[torch.Tensor]) -> torch.Tensor:
    """
    Draws tokens `[rows]` from softmax(scores) (`[rows, vocab]`) with the noise of their positions (`[vocab]` each).
    """
    # Relative to the best: float32 would round the noise away beside scores of 1e6, as at a temperature near zero.
    relative = scores.float() - scores.float().amax(dim=-1, keepdim=True)
    return (relative - torch.stack(noise).to(scores.device)).argmax(dim=-1)
