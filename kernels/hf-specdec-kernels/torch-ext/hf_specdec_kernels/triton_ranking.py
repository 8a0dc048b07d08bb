"""
Selection of the largest of some numbers in Triton. A float32 key and a place make one int64 number, which is larger
for a larger key, and among equal keys for a lower place: one reduction finds both.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nothing():
    """Key -inf at the last place: less than anything that is packed."""
    return tl.full([], -9187343244130779136, tl.int64)


@triton.jit
def pack(keys, places):
    """int64 numbers for float32 `keys` (without NaN) at int32 `places` in [0, 2³¹ - 1)."""
    bits = (keys + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def key_of(packed):
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
