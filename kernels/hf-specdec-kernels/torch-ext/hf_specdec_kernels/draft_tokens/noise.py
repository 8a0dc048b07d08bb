"""The random numbers by which children are drawn, in plain PyTorch, bit by bit those of the Triton kernel."""

from __future__ import annotations

import torch


ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEYS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(seeds: torch.Tensor, *counter: torch.Tensor) -> torch.Tensor:
    """
    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which torch's own generator on
    CUDA and `triton.language.philox` use, too.

    Args:
        seeds (`torch.Tensor` of any shape, int64): the key.
        counter (four `torch.Tensor`, int64): the counter's words, in [0, 2³²); all tensors broadcast together.

    Returns:
        `torch.Tensor`: `[…, 4]` int64, random numbers in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits; the sign is one of them
        c0, c1 = ((second >> 32) & _LOW) ^ c1 ^ k0, second & _LOW
        c2, c3 = ((first >> 32) & _LOW) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + KEYS[0]) & _LOW, (k1 + KEYS[1]) & _LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def exponential_noise(seeds: torch.Tensor, queries: int, vocab: int, first_query: int = 0) -> torch.Tensor:
    """
    Exponential random numbers, `[batch, queries, vocab]` float32: those of token t at query i come from the counter
    (⌊t / 4⌋, `first_query` + i, 0, 0), of whose four numbers it takes number t mod 4.

    A random number u in (0, 1) gives -log(1 - u), which is exact to float32 for small u, too: among many tokens those
    with the smallest numbers are drawn, and torch's `exponential_` knows these to 2⁻²⁴ only.

    Args:
        seeds (`torch.Tensor` of shape `[batch]`, int64): seed of every row.
        first_query (`int`): number of the first query: those with other numbers draw other noise.
    """
    groups = torch.arange(-(-vocab // 4), device=seeds.device)
    numbers = torch.arange(first_query, first_query + queries, device=seeds.device)[:, None]
    zero = torch.zeros_like(groups[:1])
    bits = philox(seeds[:, None, None], groups, numbers, zero, zero).flatten(2)[..., :vocab]
    uniforms = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    # log(1 - u), with the rounding of 1 - u made up for (Kahan).
    rest = 1.0 - uniforms
    return torch.where(rest == 1.0, uniforms, -rest.log() * (uniforms / (1.0 - rest)))
