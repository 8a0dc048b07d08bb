"""Which dtype a CPU runs a model fastest in, measured: few CPUs multiply bfloat16 faster than float32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..loading import DTYPES, load_target
from .environment import cpu


MEASURED = ("bfloat16", "float32")
"""Names of the dtypes that are compared. float32 is last: the checkpoint has been read by then."""
NODES = 10
"""Tokens of a forward that checks a tree of the usual size on a CPU."""
TOKENS_A_STEP = 2.5
"""Tokens that such a step is taken to keep."""
MARGIN = 1.1
"""How much faster half precision must be: in float32 texts are those of plain `generate`, token for token."""
SECONDS = 0.4
"""For the forwards of one size; at least `FEWEST` are timed."""
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class ForwardTimes:
    """
    What forwards take in a dtype.

    Attributes:
        dtype (`str`): its name.
        one (`float`): seconds for one token, the shortest of several forwards: other work on the machine only adds.
        several (`float`): seconds for `NODES` tokens.
    """

    dtype: str
    one: float
    several: float

    @property
    def seconds_per_token(self) -> float:
        """Seconds by the faster way: a token a step, or `TOKENS_A_STEP` for a step that checks a tree."""
        return min(self.one, self.several / TOKENS_A_STEP)


def measure(target: str | None) -> list[ForwardTimes]:
    """
    Times a model's forwards on the CPU in each of `MEASURED`. It is in memory in one dtype at a time.

    Args:
        target (`str`, *optional*): Hub id or folder; SmolLM2-135M-Instruct if None.

    Raises:
        ImportError, OSError, ValueError: if no model can be read.
    """
    return [times_of(load_target(target, DTYPES[name], "cpu"), name) for name in MEASURED]


@torch.inference_mode()
def times_of(model: PreTrainedModel, dtype: str) -> ForwardTimes:
    """Times forwards of a model that is in this dtype."""
    one, several = (_shortest(model, num_tokens) for num_tokens in (1, NODES))
    return ForwardTimes(dtype=dtype, one=one, several=several)


def _shortest(model: PreTrainedModel, num_tokens: int) -> float:
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device=model.device)
    model(ids, use_cache=False)
    times: list[float] = []
    while len(times) < FEWEST or sum(times) < SECONDS:
        start = time.perf_counter()
        model(ids, use_cache=False)
        times.append(time.perf_counter() - start)
    return min(times)


def fastest(times: Sequence[ForwardTimes]) -> str:
    """The name of the dtype to take: the fastest, or float32 if it is nearly so."""
    exact = {one.dtype: one.seconds_per_token / MARGIN for one in times if one.dtype == "float32"}
    return min(times, key=lambda one: exact.get(one.dtype, one.seconds_per_token)).dtype


def describe(times: Sequence[ForwardTimes]) -> str:
    """The CPU, the times and the dtype to take, in words."""
    texts = (f"{one.one * 1e3:.0f} and {one.several * 1e3:.0f} ms in {one.dtype}" for one in times)
    threads = "one thread" if (number := torch.get_num_threads()) == 1 else f"{number} threads"
    return f"{cpu()}, {threads}: forwards of 1 and {NODES} tokens take {', '.join(texts)}. Taken: {fastest(times)}."
