"""Which dtype a CPU runs a model fastest in, measured: few CPUs multiply bfloat16 faster than float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..loading import DTYPES
from .environment import cpu


MEASURED = ("bfloat16", "float32")
"""Names of the dtypes that are compared. float32 is last: in it the model is at hand for a comparison of texts."""
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


Load = Callable[[torch.dtype], PreTrainedModel]
"""Loads a model on the CPU in a dtype."""


def measure(load: Load) -> tuple[PreTrainedModel, list[ForwardTimes]]:
    """
    Times a model's forwards in each of `MEASURED`, and returns it in the last. It is in memory in one dtype at a time.
    """
    times: list[ForwardTimes] = []
    for name in MEASURED:
        model = None  # frees its memory
        model = load(DTYPES[name])
        times.append(times_of(model, name))
    return model, times


def load_fastest(load: Load, tell: Callable[[str], None]) -> tuple[PreTrainedModel, str]:
    """
    A model in the dtype that its forwards are fastest in, and that dtype's name. It is loaded once for each dtype, and
    once more only for another than the last. `tell` is called with a line about the times.
    """
    model, times = measure(load)
    tell(describe(times))
    name = fastest(times)
    if name != MEASURED[-1]:
        del model
        model = load(DTYPES[name])
    return model, name


@torch.no_grad()  # and not in inference mode: the model keeps what it computes once
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
