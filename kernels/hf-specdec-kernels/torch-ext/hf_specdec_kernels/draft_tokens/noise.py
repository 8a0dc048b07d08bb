"""The random numbers by which tokens are drawn, in plain PyTorch, bit by bit those of the Triton kernels."""

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
    words = torch.broadcast_tensors(*counter, seeds)[:4]
    c0, c1, c2, c3 = (word.clone(memory_format=torch.contiguous_format) for word in words)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(ROUNDS):  # in place: on a CPU the memory of new tensors costs as much as the arithmetic
        c0.mul_(MULTIPLIERS[0])  # 64 bits; the sign is one of them
        c2.mul_(MULTIPLIERS[1])
        c1.bitwise_xor_(k0).bitwise_xor_((c2 >> 32).bitwise_and_(_LOW))
        c3.bitwise_xor_(k1).bitwise_xor_((c0 >> 32).bitwise_and_(_LOW))
        c0, c1, c2, c3 = c1, c2.bitwise_and_(_LOW), c3, c0.bitwise_and_(_LOW)
        k0, k1 = (k0 + KEYS[0]) & _LOW, (k1 + KEYS[1]) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def exponential_noise_naive(seeds: torch.Tensor, numbers: torch.Tensor, vocab: int) -> torch.Tensor:
    """See `hf_specdec_kernels.exponential_noise`."""
    groups = torch.arange(-(-vocab // 4), device=seeds.device)
    zero = torch.zeros_like(groups[:1])
    bits = philox(seeds[:, None, None], groups, numbers[:, :, None], zero, zero)
    return _exponential(bits.flatten(2)[..., :vocab])


def noise_of_tokens(seeds: torch.Tensor, numbers: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The `exponential_noise` of some tokens (`[columns]`, int64), `[batch, queries, columns]` float32."""
    zero = torch.zeros_like(token_ids[:1])
    bits = philox(seeds[:, None, None], token_ids // 4, numbers[:, :, None], zero, zero)
    return _exponential(bits.gather(-1, (token_ids % 4)[:, None].expand(*bits.shape[:-1], 1))[..., 0])


def _exponential(bits: torch.Tensor) -> torch.Tensor:
    """
    Exponential random numbers from bits: a number u in (0, 1) gives -log(1 - u), which is exact to float32 for small
    u, too. Among many tokens those with the smallest numbers are drawn, and torch's `exponential_` knows these to 2⁻²⁴
    only.
    """
    uniforms = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    # log(1 - u), with the rounding of 1 - u made up for (Kahan).
    rest = 1.0 - uniforms
    return torch.where(rest == 1.0, uniforms, -rest.log() * (uniforms / (1.0 - rest)))
