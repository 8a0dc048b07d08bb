"""Runs the suite: gates first, then one target after the other; what fails says so and does not stop the rest."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..equality import Gate
from . import heads, kernels, steps
from .pair import TREE, Calibration, Pair, calibrate
from .sizes import LLAMA_8B, TINY, Sizes


logger = logging.get_logger(__name__)

TARGETS = {
    "P1": "verify 64 nodes over the matmuls alone",
    "P2": "part of a step besides forwards",
    "P3": "8B shape, 4.5 tokens a step, over generate",
    "P4": "trained head, over generate",
    "P6": "tree attention",
    "P7": "rejection sampling",
    "P8": "tokens a step at T = 1, drawn over best",
}
REACH: dict[str, dict[str, float]] = {
    "P1": {"ratio": 1.25},
    "P2": {"share": 0.05},
    "P3": {"eager": 12.0, "static": 4.0, "assisted": 5.0},
    "P4": {"eager": 20.0, "static": 3.0},
    "P8": {"ratio": 1.10},
}
AT_MOST = ("P1", "P2")
"""Those whose figures are to be small."""

FIRST_EPSILON = 0.05
"""That of the pair until it is calibrated."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """
    Args:
        only (`tuple[str, …]`): which of `TARGETS`.
        target (`str`, *optional*): of P4 and P8; None: SmolLM2.
        head (`str`, *optional*): of P4 and P8, which are skipped without.
        device (`str`): where to run.
        tiny (`bool`): a trial on tiny models in float32; its figures say nothing.
        rounds (`int`): timed calls of P3 and P4.
        traces (`Path`, *optional*): a folder for profiler traces of P1's forward and of steps of P2 and P4.
    """

    only: tuple[str, ...]
    target: str | None = None
    head: str | None = None
    device: str = "cuda"
    tiny: bool = False
    rounds: int = 3
    traces: Path | None = None

    @property
    def sizes(self) -> Sizes:
        """Of the models."""
        return TINY if self.tiny else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        """Of what is timed."""
        return torch.float32 if self.tiny else torch.bfloat16


@dataclass(kw_only=True)
class Entry:
    """
    What came of one target.

    Args:
        name (`str`): "P1" …
        status (`str`): "measured", "failed" or "skipped".
        values (`dict[str, float]`): the figures to be judged, by what they are over.
        figures (`dict`): all that was measured.
        note (`str`): why it failed or was skipped, or what to know about the figures.
        seconds (`float`): that it took.
        is_trial (`bool`): whether its figures say nothing.
    """

    name: str
    status: str
    values: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    is_trial: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the figures reach the target; None where nothing can be said."""
        if self.is_trial:
            return None
        reach = REACH.get(self.name)
        if self.status != "measured" or not reach or self.values.keys() != reach.keys():
            return self.figures.get("is_met") if self.status == "measured" else None
        if self.name in AT_MOST:
            return all(self.values[key] <= reach[key] for key in reach)
        return all(self.values[key] >= reach[key] for key in reach) and self.figures.get("is_calibrated", True)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"what": TARGETS[self.name], "to_reach": REACH.get(self.name), "is_met": self.is_met}


class Skipped(Exception):
    """Raised by a target that cannot be measured here; its text says why."""


class Suite:
    """
    Models and texts that targets share are made when first asked for. Where a gate is red, none of its targets is
    measured.
    """

    def __init__(self, options: Options):
        self.options = options

    @cached_property
    def pair(self) -> Pair:
        sizes = self.options.sizes
        pair = Pair(sizes, self.options.dtype, self.options.device)
        pair.scale(FIRST_EPSILON)
        if pair.metrics(TREE, sizes.gate_tokens).mean_acceptance_length < 1.5:
            calibrate(pair)  # where nothing is accepted, the gate would not see a fault
        _check("random weights", steps.gate(pair))
        return pair

    @cached_property
    def calibration(self) -> Calibration:
        found = calibrate(self.pair)
        _check("the calibrated pair", steps.gate(self.pair))
        return found

    @cached_property
    def trained(self) -> heads.Trained:
        options, sizes = self.options, self.options.sizes
        if options.head is None:
            raise Skipped("needs a head: give --draft.")
        trained = heads.Trained(
            target=options.target,
            draft=options.head,
            dtype=options.dtype,
            device=options.device,
            max_new_tokens=sizes.max_new_tokens,
            gate_tokens=sizes.gate_tokens,
            rounds=options.rounds,
            num_prompts=1 if options.tiny else None,
        )
        _check("trained head", heads.gate(trained))
        return trained

    def p1(self) -> Entry:
        found = steps.verify_over_matmuls(self.pair, self._trace_of("P1"))
        return Entry(name="P1", status="measured", values={"ratio": found["ratio"]}, figures=found)

    def p2(self) -> Entry:
        found = steps.step_besides_forwards(self.pair, self.calibration, self._trace_of("P2"))
        launches = found["graph_launches_per_step"]
        note = "" if launches is None else f"{launches:.1f} graph launches a step"
        return Entry(name="P2", status="measured", values={"share": found["share"]}, figures=found, note=note)

    def p3(self) -> Entry:
        found = steps.speed_of_pair(self.pair, self.calibration, self.options.rounds)
        note = f"{found['acceptance_length']:.2f} tokens a step"
        if not found["is_calibrated"]:
            note += " (the calibration missed 4.5 ± 0.1)"
        return Entry(name="P3", status="measured", values=found["over"], figures=found, note=note)

    def p4(self) -> Entry:
        found = heads.speed_of_head(self.trained, self._trace_of("P4"))
        note = f"{found['acceptance_length']:.2f} tokens a step"
        return Entry(name="P4", status="measured", values=found["over"], figures=found, note=note)

    def p6(self) -> Entry:
        return self._kernel("P6", "tree_attention")

    def p7(self) -> Entry:
        return self._kernel("P7", "rejection_sampling")

    def _kernel(self, name: str, kernel: str) -> Entry:
        if not self.options.device.startswith("cuda"):
            raise Skipped("its kernel needs a CUDA device.")
        script = kernels.find_script(kernel)
        if script is None:
            raise Skipped(f"there is no benchmark of {kernel} in {kernels.FOLDER.name}/ of this installation.")
        found = kernels.run_script(script)
        return Entry(name=name, status="measured", figures=found, note=str(found.get("summary", "see the JSON")))

    def p8(self) -> Entry:
        found = heads.drawn_over_best(self.trained)
        note = ", ".join(f"{name}: {length:.2f}" for name, length in found["acceptance_length"].items())
        return Entry(name="P8", status="measured", values={"ratio": found["ratio"]}, figures=found, note=note)

    def _trace_of(self, name: str) -> Path | None:
        return None if self.options.traces is None else self.options.traces / f"{name}.json.gz"

    def forget(self, name: str) -> None:
        """Frees what only targets before this one needed."""
        if name in ("P4", "P6", "P7", "P8") and "pair" in vars(self):
            del self.pair
            torch.compiler.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _check(what: str, gate: Gate) -> None:
    if not gate.is_passed:
        first = gate.differences[0]
        raise ValueError(
            f"{what}: {len(gate.differences)} text(s) are not plain generate's in float32; {first.contender} first "
            f"differs at token {first.position}, where the gap of the two best logits is {first.gap:.3g}."
        )


def run(options: Options, begins: Callable[[str], None] = lambda name: None) -> Iterator[Entry]:
    """
    Measures one target after the other.

    Args:
        begins (`Callable[[str], None]`): told the name of the next.
    """
    suite = Suite(options)
    for name in options.only:
        begins(name)
        suite.forget(name)
        start = time.perf_counter()
        try:
            entry = getattr(suite, name.lower())()
        except Skipped as reason:
            entry = Entry(name=name, status="skipped", note=str(reason))
        except Exception as error:  # the others are to be measured nevertheless
            logger.warning(f"{name} failed.", exc_info=True)
            entry = Entry(name=name, status="failed", note=f"{type(error).__name__}: {error}")
        entry.seconds, entry.is_trial = time.perf_counter() - start, options.tiny
        yield entry
