"""Time of the phases of a step, and profiler traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ..metrics import SpeculationMetrics, metrics_of_last_call
from .comparison import generate, synchronize
from .contenders import Contender, sampling_options
from .figures import ALL_TASKS, milliseconds_of_step
from .prompts import EncodedPrompt


TRACED_TOKENS = 24


@contextmanager
def synchronized_phases(device: torch.device) -> Iterator[None]:
    """
    Makes every phase of `SpeculationMetrics.seconds` wait for the device before it ends, so that phases include device
    time. Nothing changes on a CPU.
    """
    original = SpeculationMetrics.phase

    @contextmanager
    def phase(self: SpeculationMetrics, name: str) -> Iterator[None]:
        with original(self, name):
            yield
            synchronize(device)

    if device.type == "cpu":
        yield
        return
    with patch.object(SpeculationMetrics, "phase", phase):
        yield


def split_of_steps(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    *,
    temperature: float,
    max_new_tokens: int,
) -> dict[tuple[str, str], dict[str, float]]:
    """
    Milliseconds per step by phase, for every task of the prompts (and all together) and contender, on an accelerator.

    Waiting at the end of every phase makes these steps a little slower than the timed ones. Returns nothing on a CPU,
    where the timed calls have the phases.
    """
    if model.device.type == "cpu":
        return {}
    options, found = sampling_options(temperature) | {"max_new_tokens": max_new_tokens}, {}
    tasks = [*dict.fromkeys(prompt.task for prompt in prompts), ALL_TASKS]
    with synchronized_phases(model.device):
        for contender in (contender for contender in contenders if contender.is_ours):
            measured = []
            for prompt in prompts:
                generate(model, contender, prompt, **options)
                measured.append((prompt.task, metrics_of_last_call()))
            for task in tasks:
                of_task = [metrics for own, metrics in measured if task in (own, ALL_TASKS)]
                found[task, contender.name] = milliseconds_of_step(of_task)
    return found


def trace_call(
    model: PreTrainedModel, prompt: EncodedPrompt, contender: Contender, path: Path, *, temperature: float = 0.0
) -> None:
    """Writes a profiler trace of a call with `TRACED_TOKENS` new tokens."""
    options = sampling_options(temperature) | {"max_new_tokens": TRACED_TOKENS}
    write_trace(lambda: generate(model, contender, prompt, **options), path, model.device)


def write_trace(function: Callable[[], object], path: Path, device: torch.device) -> None:
    """
    Calls a function once for warm-up, and once more under the torch profiler; chrome://tracing and Perfetto show the
    trace.

    Args:
        function (`Callable`): the function.
        path (`Path`): file of the trace, .json or .json.gz; its folder is created if it does not exist.
        device (`torch.device`): device to record.
    """
    function()
    synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities(device)) as profiler:
        function()
        synchronize(device)
    profiler.export_chrome_trace(str(path))


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Profiler activities to record on a device."""
    on_cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_cuda]
