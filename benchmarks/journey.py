"""
How many functions, files and packages of the library one step at batch 1 passes, on four paths: `generate` and
`generate_batch`, each by the host and by captured steps. Runs on a CPU, with a stand-in for CUDA graphs that runs the
captured function again.

    python benchmarks/journey.py [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec import graphs, kernels
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.engine import Engine
from hf_specdec.generation.loop import SpeculativeCall


ROOT = Path(hf_specdec.__file__).parent
TREE = "[(0,), (1,), (0, 0)]"
LAST_STEP = 3
"""The step that is followed: the first ones capture, and take memory."""


def tiny(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def record(run: Callable[[], list[torch.Tensor]], device: torch.device, pool: Any = None) -> tuple[Callable, Any]:
    """In place of a capture: the function itself, whose launch is all that a graph would leave of it."""
    tensors = run()

    def replay() -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        for tensor, new in zip(tensors, run(), strict=True):
            tensor.copy_(new)
        sys.setprofile(profile)

    return replay, tensors


class Journey:
    """
    The code of the library that runs from one call of `boundary` to the next.

    Args:
        boundary (`Callable`): the function that begins a step.
    """

    def __init__(self, boundary: Any):
        self._boundary, self._steps = getattr(boundary, "__wrapped__", boundary).__code__, 0
        self._first: int | None = None
        self.found: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code is self._boundary:
            self._first = frame.f_lasti if self._first is None else self._first
            self._steps += frame.f_lasti == self._first  # a generator that goes on is no new step
        is_function = not code.co_name.startswith("<")  # and no comprehension
        if self._steps == LAST_STEP and is_function and Path(code.co_filename).is_relative_to(ROOT):
            self.found.add(code)

    def counts(self) -> tuple[int, int, int]:
        """Functions, files and packages."""
        files = {code.co_filename for code in self.found}
        packages = {Path(file).relative_to(ROOT).parts[0] for file in files}
        return len(self.found), len(files), len(packages)


def follow(boundary: Any, call: Callable[[], Any]) -> Journey:
    """Follows one step of a call; calls before it have captured what there is to capture."""
    for _ in range(3):
        call()
    journey = Journey(boundary)
    sys.setprofile(journey)
    try:
        call()
    finally:
        sys.setprofile(None)
    return journey


def main() -> None:
    """Prints a row for each path."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the functions of each path, too")
    arguments = parser.parse_args()
    target, draft = tiny(0), tiny(1)
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_model": draft, "tree": TREE}
    ids = torch.tensor([[5, 9, 3, 7]])

    def generate() -> None:
        target.generate(ids, attention_mask=torch.ones_like(ids), **options)

    def generate_batch() -> None:
        target.generate_batch(ids.tolist(), persistent_manager=True, **options)

    paths = {
        "generate, host": follow(SpeculativeCall._step, generate),
        "generate_batch, host": follow(Engine.step, generate_batch),
    }
    target.destroy_cached_continuous_batching_manager()
    kernels.DEVICES["cpu"] = (torch.float64, torch.float32)
    graphs.RECORDERS["cpu"] = record
    paths |= {
        "generate, captured": follow(InFlightStep.launch, generate),
        "generate_batch, captured": follow(InFlightStep.launch, generate_batch),
    }
    print(f"{'path':26}functions  files  packages")
    for name, journey in paths.items():
        print("{:26}{:9}{:7}{:10}".format(name, *journey.counts()))
        for code in (
            sorted(journey.found, key=lambda one: (one.co_filename, one.co_firstlineno)) if arguments.list else ()
        ):
            print(f"    {Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}")


if __name__ == "__main__":
    main()
