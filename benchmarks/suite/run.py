"""Runs the suite, one target after another; a target that fails is reported and does not stop the others."""

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

from hf_specdec.benchmarking.equality import Gate
from hf_specdec.compiling.layers import MOST_SHAPES

from . import heads, kernels, steps
from .pair import Calibration, Pair, calibrate
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


@dataclass(frozen=True)
class Goal:
    """
    Goal of a figure.

    Args:
        value (`float`): smallest figure that meets the goal.
        at_most (`bool`): whether `value` is the largest figure instead.
        is_share (`bool`): whether the figure is a share, shown in percent, rather than a multiple.
    """

    value: float
    at_most: bool = False
    is_share: bool = False

    def is_met(self, figure: float) -> bool:
        """Whether a figure meets the goal."""
        return figure <= self.value if self.at_most else figure >= self.value

    def show(self, figure: float) -> str:
        """A figure as text, in percent or as a multiple."""
        return f"{100 * figure:.1f} %" if self.is_share else f"{figure:.2f}×"

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.show(self.value)}"


GOALS: dict[str, dict[str, Goal]] = {
    "P1": {"over matmuls": Goal(1.25, at_most=True)},
    "P2": {"share": Goal(0.05, at_most=True, is_share=True)},
    "P3": {"eager": Goal(12.0), "static": Goal(4.0), "assisted": Goal(5.0)},
    "P4": {"eager": Goal(20.0), "static": Goal(3.0)},
    "P6": {
        "bandwidth, 16 nodes": Goal(0.75, is_share=True),
        "over floor, 64 nodes": Goal(1.6, at_most=True),
        "over sdpa": Goal(3.0),
        "over flex": Goal(2.0),
    },
    "P7": {"over floor": Goal(1.5, at_most=True)},
    "P8": {"drawn over best": Goal(1.10)},
}
"""Goals by target and figure."""

FIRST_EPSILON = 0.05
"""The pair's ε before calibration."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """
    Options of the suite.

    Args:
        only (`tuple[str, …]`): names from `TARGETS` to measure.
        target (`str`, *optional*): target model of P4 and P8; None for SmolLM2.
        head (`str`, *optional*): head of P4 and P8, which are skipped without one.
        device (`str`): device to run on.
        tiny (`bool`): whether to run a trial on tiny models in float32, with meaningless figures.
        rounds (`int`): timed calls of P3 and P4 with each prompt.
        traces (`Path`, *optional*): folder for profiler traces of P1's forward and of steps of P2 and P4.
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
        """Sizes of the models."""
        return TINY if self.tiny else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the timed models."""
        return torch.float32 if self.tiny else torch.bfloat16


@dataclass(kw_only=True)
class Entry:
    """
    Result of one target of the suite.

    Args:
        name (`str`): "P1" …
        status (`str`): "measured", "failed" or "skipped".
        values (`dict[str, float]`): figures to be judged, by the names in `GOALS`.
        figures (`dict`): everything that was measured.
        note (`str`): reason of a failure or skip, or a remark about the figures.
        caveat (`str`): reason why the figures do not count, however good they are.
        seconds (`float`): time of the measurement.
        is_trial (`bool`): whether the figures are meaningless, because tiny models were measured.
    """

    name: str
    status: str
    values: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    caveat: str = ""
    seconds: float = 0.0
    is_trial: bool = False

    @property
    def is_met(self) -> bool | None:
        """Whether the figures meet all goals; None for a trial, or if nothing was measured."""
        if self.is_trial or self.status != "measured":
            return None
        goals = GOALS[self.name]
        return all(goals[key].is_met(value) for key, value in self.values.items()) and not self.caveat

    def to_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        goals = {key: str(goal) for key, goal in GOALS[self.name].items()}
        return asdict(self) | {"what": TARGETS[self.name], "to_reach": goals, "is_met": self.is_met}


class Skipped(Exception):
    """Raised by a target that cannot be measured on this machine; the message gives the reason."""


class Suite:
    """
    Models and texts that the suite's targets share, created on first use.

    If the float32 comparison of a model fails, none of the targets that use it is measured.

    Args:
        options (`Options`): options of the suite.
    """

    def __init__(self, options: Options):
        self.options = options

    @cached_property
    def pair(self) -> Pair:
        sizes = self.options.sizes
        pair = Pair(sizes, self.options.dtype, self.options.device)
        pair.scale(FIRST_EPSILON)
        uncompiled = pair.contender()
        if pair.metrics(uncompiled, sizes.gate_tokens).mean_acceptance_length < 1.5:
            calibrate(pair, uncompiled)  # if nothing is accepted, the comparison of texts cannot find a fault
        _check("random weights", steps.gate(pair))
        return pair

    @cached_property
    def calibration(self) -> Calibration:
        found = calibrate(self.pair, steps.ours(self.pair))
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
        return Entry(name="P1", status="measured", values={"over matmuls": found["ratio"]}, figures=found)

    def p2(self) -> Entry:
        found = steps.step_besides_forwards(self.pair, self.calibration, self._trace_of("P2"))
        launches = found["graph_launches_per_step"]
        note = "" if launches is None else f"{launches:.1f} graph launches a step"
        return Entry(name="P2", status="measured", values={"share": found["share"]}, figures=found, note=note)

    def p3(self) -> Entry:
        found = steps.speed_of_pair(self.pair, self.calibration, self.options.rounds)
        note = f"{found['acceptance_length']:.2f} tokens a step"
        caveat = "" if found["is_calibrated"] else "the calibration missed 4.5 ± 0.1 tokens a step"
        return Entry(name="P3", status="measured", values=found["over"], figures=found, note=note, caveat=caveat)

    def p4(self) -> Entry:
        found = heads.speed_of_head(self.trained, self._trace_of("P4"))
        note = f"{found['acceptance_length']:.2f} tokens a step"
        return Entry(name="P4", status="measured", values=found["over"], figures=found, note=note)

    def p6(self) -> Entry:
        found = self._run_script("tree_attention")
        values = kernels.values_of_tree_attention(found)
        return Entry(name="P6", status="measured", values=values, figures=found, note=found["summary"])

    def p7(self) -> Entry:
        found = self._run_script("rejection_sampling")
        values = kernels.values_of_rejection_sampling(found)
        return Entry(name="P7", status="measured", values=values, figures=found, note=found["summary"])

    def _run_script(self, kernel: str) -> dict[str, Any]:
        if not self.options.device.startswith("cuda"):
            raise Skipped("its kernel needs a CUDA device.")
        script = kernels.find_script(kernel)
        if script is None:
            raise Skipped(f"there is no benchmark of {kernel} in {kernels.FOLDER.name}/.")
        return kernels.run_script(script)

    def p8(self) -> Entry:
        found = heads.drawn_over_best(self.trained)
        note = ", ".join(f"{name}: {length:.2f}" for name, length in found["acceptance_length"].items())
        return Entry(
            name="P8", status="measured", values={"drawn over best": found["ratio"]}, figures=found, note=note
        )

    def _trace_of(self, name: str) -> Path | None:
        return None if self.options.traces is None else self.options.traces / f"{name}.json.gz"

    def forget(self, name: str) -> None:
        """Frees the 8B pair before a target that does not need it."""
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
    Measures one target after another.

    Args:
        options (`Options`): options of the suite.
        begins (`Callable[[str], None]`): called with the name of each target before it is measured.

    Yields:
        `Entry`: the result of each target.
    """
    suite = Suite(options)
    for name in options.only:
        begins(name)
        suite.forget(name)
        start = time.perf_counter()
        try:
            # Compilations of one target must not exhaust the recompile limit for the peers of the next.
            with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
                entry = getattr(suite, name.lower())()
        except Skipped as reason:
            entry = Entry(name=name, status="skipped", note=str(reason))
        except Exception as error:  # the other targets are still measured
            logger.warning(f"{name} failed.", exc_info=True)
            entry = Entry(name=name, status="failed", note=f"{type(error).__name__}: {error}")
        entry.seconds, entry.is_trial = time.perf_counter() - start, options.tiny
        yield entry
