"""Random numbers by position for requests that draw by them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..verification import NoiseSeed, PositionNoise
from .request import Request


class Noises:
    """
    Gives every request that draws by position random numbers of its own. They depend on the seed and on the order in
    which requests begin, but not on what any step has drawn.

    Args:
        device (`torch.device`): device of the noise.
        seed (`NoiseSeed`, *optional*): of all requests; by default one of their own.
    """

    def __init__(self, device: torch.device, seed: NoiseSeed | None = None):
        self._device, self._seed, self._number = device, NoiseSeed() if seed is None else seed, 0

    def give(self, requests: Iterable[Request]) -> None:
        """Gives noise to those of these requests that need it."""
        for request in requests:
            if request.needs_noise:
                request.noise = PositionNoise(self._seed.of_row(self._number), self._device)
                self._number += 1
