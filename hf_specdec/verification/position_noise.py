"""Random numbers that belong to positions of a text, so that the text is the same whatever was drafted."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class PositionNoise:
    """
    Random numbers of one row by the position of a token, from a seed.

    The token at a position is the argmax of log p + Gumbel noise, which is a draw from p (the Gumbel-max trick). The
    noise depends on the seed and the position alone, so that the text does too: neither a tree nor the batch changes
    it. Draft tokens are the best of log q + the same noise, and therefore often the same token: q close to p is
    accepted about as often as by rejection sampling (arXiv 2408.07978). A captured step computes it within its graph;
    see `DeviceNoise`.

    Args:
        seed (`int` or `str`): names the text.
        device (`torch.device`): device of the noise.
        padding (`int`, *optional*, defaults to 0): positions before the text, which do not change its noise.
    """

    KEPT, KEPT_ON_GPU = 16, 2
    """
    Positions whose noise is kept: on a CPU those of the present step's levels, which target and draft read. On a GPU,
    where it is quickly computed again, the memory is worth more.
    """

    def __init__(self, seed: int | str, device: torch.device, padding: int = 0):
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8).digest()
        self.key = int.from_bytes(digest, "little") >> 1
        """The seed of `hf_specdec_kernels.exponential_noise`."""
        self._padding = padding
        self._keys = torch.tensor([self.key], device=device)
        self._most = self.KEPT if device.type == "cpu" else self.KEPT_ON_GPU
        self._known: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def at(self, position: int, vocab_size: int) -> torch.Tensor:
        """Minus Gumbel noise of a position, `[vocab_size]` float32: the logarithm of exponential random numbers."""
        key = position, vocab_size
        if key not in self._known:
            from hf_specdec_kernels import exponential_noise

            number = torch.tensor([[position - self._padding]], device=self._keys.device)
            self._known[key] = exponential_noise(self._keys, number, vocab_size)[0, 0].log_()
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return self._known[key]

    def take(self, position: int, vocab_size: int) -> torch.Tensor:
        """As `at`, for the token that the target draws: nothing is asked of this position again."""
        noise = self.at(position, vocab_size)
        for key in [key for key in self._known if key[0] <= position]:
            del self._known[key]
        return noise


class NoiseSeed:
    """
    A seed for the noise of several rows, of which each adds its number. It is drawn from torch's generator of the CPU
    when it is first asked for, and stays.
    """

    def __init__(self) -> None:
        self._value: int | None = None

    def of_row(self, number: int) -> str:
        """The seed of a row's `PositionNoise`."""
        if self._value is None:
            self._value = int(torch.randint(2**62, (), device="cpu"))
        return f"{self._value} {number}"


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


@dataclass(frozen=True, eq=False)
class DeviceNoise:
    """
    The noise of the rows of a captured step, from tensors that lie at fixed addresses: the same numbers as those of
    `PositionNoise`, computed where kernels draw.

    Args:
        keys (`torch.Tensor` of shape `[batch]`, int64): `PositionNoise.key` of every row.
        lengths (`torch.Tensor` of shape `[batch]`, int64): tokens of every row, root included.
        token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): see `BatchNoise`.
    """

    keys: torch.Tensor
    lengths: torch.Tensor
    token_ids: torch.Tensor | None = None

    def of_level(self, level: int) -> dict[str, Any]:
        """Arguments of `hf_specdec_kernels.draw_children` that draw a level's children (from 0)."""
        return {"seeds": self.keys, "positions": self.lengths[:, None] + level, "token_ids": self.token_ids}

    def draw_at_nodes(
        self, scores: torch.Tensor, depths: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Draws the next token at every node, `[batch, nodes]` int64; token 0 where there is no softmax.

        Args:
            scores (`torch.Tensor` of shape `[batch, nodes, vocab]`): log p up to a constant, before the temperature;
                -inf for hidden tokens.
            depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): 0 at the root.
            temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): divisor of the scores.
        """
        from hf_specdec_kernels import draw_children

        positions = self.lengths[:, None] + depths
        return draw_children(scores, 1, self.keys, positions=positions, temperature=temperature).tokens[:, :, 0]


def draw_by_position(scores: torch.Tensor, noise: list[torch.Tensor]) -> torch.Tensor:
    """
    Draws tokens `[rows]` from softmax(scores) (`[rows, vocab]`) with the noise of their positions (`[vocab]` each).
    """
    # Relative to the best: float32 would round the noise away beside scores of 1e6, as at a temperature near zero.
    relative = scores.float() - scores.float().amax(dim=-1, keepdim=True)
    return (relative - torch.stack(noise).to(scores.device)).argmax(dim=-1)
