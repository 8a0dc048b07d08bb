"""Captured steps without a model: their times and what they accept are given, and a clock of their own runs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec import DynamicTree, TokenTree
from hf_specdec.engine.captured import device_steps, outcome, step
from hf_specdec.engine.captured.captured import CapturedStep
from hf_specdec.engine.captured.keys import StepKind
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.engine import Engine
from hf_specdec.trees.auto_tables import likeliest_paths
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.verification import Verifier

from .graphs import install_stand_in


@dataclass(frozen=True)
class Device:
    """
    Times in ms, by the number of rows of a captured step.

    Args:
        plain (`dict`): a step without a tree.
        draft, level, node (`dict`): what a tree adds: once, for every level, and for every draft node of a row.
        capture (`float`): a capture.
        host (`float`): what the host does for a step, and a hundredth of it for every row.
        launch (`float`): from a launch to the step's begin on an idle device.
        noise (`float`): largest relative error of a step.
    """

    plain: dict[int, float]
    draft: dict[int, float]
    level: dict[int, float]
    node: dict[int, float]
    capture: float = 300.0
    host: float = 0.15
    launch: float = 0.1
    noise: float = 0.03

    def step(self, tree: TokenTree | DynamicTree | None, rows: int, reads: int = 0) -> float:
        """A step of so many rows; a head that reads adds as much as a level."""
        time = self.plain[rows]
        if reads:
            time += self.draft[rows] + self.level[rows] + self.node[rows] * reads / 8
        if tree is not None:
            time += self.draft[rows] + self.level[rows] * tree.depth + self.node[rows] * tree.num_nodes
        return time


def between(of_few: dict[int, float]) -> dict[int, float]:
    """What is given for 1, 8 and 64 rows, linear between them."""
    known = sorted(of_few.items())
    found = {}
    for (low, start), (high, end) in zip(known, known[1:], strict=False):
        found |= {rows: start + (end - start) * (rows - low) / (high - low) for rows in range(low, high + 1)}
    return found


def device(plain: Sequence[float], draft: Sequence[float], level: Sequence[float], node: Sequence[float]) -> Device:
    """A device of which times for 1, 8 and 64 rows are known."""
    return Device(*(between(dict(zip((1, 8, 64), times, strict=True))) for times in (plain, draft, level, node)))


DEVICES = {
    # SmolLM2 and its head on an H100: plain 1.25, 1.6, 2.3; 9 nodes in 4 levels 1.6, 2.8, 7.0.
    "compiled": device((1.25, 1.6, 2.3), (0.05, 0.2, 0.5), (0.06, 0.1, 0.3), (0.007, 0.067, 0.33)),
    # The same as captured alone.
    "captured": device((2.9, 3.1, 3.4), (0.35, 0.35, 0.5), (0.17, 0.19, 0.18), (0.006, 0.03, 0.07)),
}
CHANCES = {0.0: (0.7, 0.1, 0.05, 0.03), 1.0: (0.46, 0.12, 0.06, 0.03)}
"""By temperature, the chance of the child of each rank, as with SmolLM2's head."""


@dataclass
class SimulatedStep:
    """
    A step that has run.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): its tree.
        rows (`int`): requests in it.
        tokens (`int`): new tokens of all of them.
        seconds (`float`): from the end of the step before it to its own.
        explores (`bool`): whether "auto" tried something.
        captures (`int`): captures before it.
        capturing (`float`): seconds of these.
    """

    tree: TokenTree | DynamicTree | None
    rows: int
    tokens: int
    seconds: float
    explores: bool
    captures: int
    capturing: float


@dataclass
class Simulation:
    """What the captured steps of a process do: `device` and `chances` may be changed between calls."""

    device: Device
    chances: Sequence[float]
    seed: int = 0
    advantage: float = 0.1
    """How often a dynamic tree has the right child where the likeliest static tree lacks it."""
    now: float = 1.0
    steps: list[SimulatedStep] = field(default_factory=list)
    captured: list[StepKind | None] = field(default_factory=list)
    """The kinds of steps that were captured; None for prompts."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._free_at = self._taken_at = 0.0
        self._ends: dict[InFlightStep, deque[float]] = {}
        self._new_captures, self._capturing = 0, 0.0

    def capture(self, one: CapturedStep) -> None:
        self.now += self.device.capture / 1e3
        self.captured.append(one.kind if isinstance(one, InFlightStep) else None)
        if isinstance(one, InFlightStep):
            self._new_captures += 1
        self._capturing += self.device.capture / 1e3

    def launch(self, one: InFlightStep) -> None:
        begin = max(self.now + self.device.launch / 1e3, self._free_at)
        reads = one.rows.size.lag if one.kind.reads else 0
        tree: Any = one.kind.tree
        took = self.device.step(tree, one.rows.size.rows, reads) / 1e3
        self._free_at = begin + took * (1.0 + self.device.noise * self.random.uniform(-1.0, 1.0))
        self._ends.setdefault(one, deque()).append(self._free_at)

    def wait(self, one: InFlightStep) -> None:
        self.now = max(self.now, self._ends[one].popleft())

    def end(self, tree: Any, rows: int, tokens: int, explores: bool) -> None:
        self.now += self.device.host * (1 + rows / 100) / 1e3
        took = self.now - self._taken_at
        self.steps.append(SimulatedStep(tree, rows, tokens, took, explores, self._new_captures, self._capturing))
        self._taken_at, self._new_captures, self._capturing = self.now, 0, 0.0

    def begin_call(self) -> None:
        """Leaves out whatever has passed since the last step."""
        self.steps.clear()
        self.captured.clear()
        self._taken_at, self._new_captures, self._capturing = self.now, 0, 0.0

    def static(self, tree: TokenTree | DynamicTree | None) -> TokenTree | None:
        """The nodes of a tree; those of a dynamic one are the likeliest."""
        if not isinstance(tree, DynamicTree):
            return tree
        table = [[max(chance, 1e-9) for chance in self.chances[: tree.top_k]]] * tree.depth
        return TokenTree([path for _, path in likeliest_paths(table, tree.num_nodes, tree.depth)])

    def path(self, of: TokenTree | DynamicTree | None, room: int) -> list[int]:
        """The accepted nodes of a row."""
        found, node, tree = [], 0, self.static(of)
        while tree is not None and len(found) < room and tree.children[node]:
            draw, places = self.random.random(), {tree.ranks[child]: child for child in tree.children[node]}
            rank = next((rank for rank, most in enumerate(accumulate(self.chances)) if draw < most), None)
            if rank not in places and isinstance(of, DynamicTree) and self.random.random() < self.advantage:
                rank = 0
            if rank not in places:
                break
            node = places[rank]
            found.append(node)
        return found


def simulate(monkeypatch: pytest.MonkeyPatch, of: Device, chances: Sequence[float], seed: int = 0) -> Simulation:
    """Lets captured decoding steps run by the times of a device and accept by these chances, whatever the models."""
    install_stand_in(monkeypatch, with_kernel=True, counts=False)
    found = Simulation(of, chances, seed)
    clock = SimpleNamespace(perf_counter=lambda: found.now)
    for module in (step, outcome, device_steps):
        monkeypatch.setattr(module, "time", clock, raising=False)
    capture, launch, report = CapturedStep.capture, InFlightStep.launch, InFlightStep.report

    def captured(self: CapturedStep, *args: Any) -> None:
        found.capture(self)
        capture(self, *args)

    def launched(self: InFlightStep) -> None:
        found.launch(self)
        launch(self)

    def reported(self: InFlightStep) -> list[list[int]]:
        found.wait(self)
        return report(self)

    give = outcome.Outcome.give

    def given(self: outcome.Outcome, engine: Engine, requests: Any, groups: Any) -> None:
        give(self, engine, requests, groups)
        drafted = [group.draft_request.plan.tree for group in groups if any(row in self.drafted for row in group.rows)]
        rows = [row for row in range(len(requests)) if row not in self.left_out]
        tokens = sum(len(self.walk.tokens[row]) for row in rows)
        explores = any(
            choice.explores
            for tree in engine.choices._rows_of
            if isinstance(choice := engine.choices.autos.of(tree), CandidateChoice)
        )
        found.end(drafted[0] if drafted else None, len(rows), tokens, explores)

    monkeypatch.setattr(CapturedStep, "capture", captured)
    monkeypatch.setattr(InFlightStep, "launch", launched)
    monkeypatch.setattr(InFlightStep, "report", reported)
    monkeypatch.setattr(InFlightStep, "_run", lambda self: _run(self, found))
    monkeypatch.setattr(outcome.Outcome, "give", given)
    return found


def _run(self: InFlightStep, simulation: Simulation) -> list[torch.Tensor]:
    """In place of `InFlightStep._run`: reports accepted paths, and moves the rows on."""
    rows, depth, asked = self.rows, self.rows.size.depth, self.kind.tree
    tree = simulation.static(asked)
    reports, accepted, new = [], [], []
    width = self._report.shape[1]
    for kind, room in zip(rows.kinds.tolist(), rows.room.tolist(), strict=True):
        path = [] if kind == Verifier.RESTS else simulation.path(asked, room)
        accepted.append(-1 if kind == Verifier.RESTS else len(path))
        nodes = [0, *path] + [0] * (depth - len(path))
        new.append([5] * (len(path) + 1) + [-1] * (depth - len(path)))
        drafted = 0 if tree is None else sum(level <= room for level in tree.depths[1:])
        reports.append([accepted[-1], drafted, 0, *nodes, *new[-1]])
        if self.kind.reports_ranks and tree is not None:
            reports[-1] += [len(tree.children[node]) for node in nodes] + [tree.ranks[node] for node in nodes[1:]]
        reports[-1] += [1 << 18] * (width - len(reports[-1]))
    self._report.copy_(torch.tensor(reports))
    if self.can_repeat:
        rows.advance(torch.tensor(accepted), torch.tensor(new))
    return [self._report]
