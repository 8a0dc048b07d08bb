"""
What `tree="auto"` loses in captured steps, and by what, on simulated devices: no GPU is needed.

    python benchmarks/auto_simulated.py [--device compiled] [--paths generate] [--rows 64 8 1] [--temperatures 0 1]

The engine runs as it is, with a stand-in for CUDA graphs; step times, captures and what is accepted are given (see
`tests/support/simulated_device.py`). In one process, calls of every number of rows follow one another, for each
temperature. A line for every call of "auto": tokens per second over the best of plain steps and fixed trees; captures;
steps spent on trials; changes of tree; and the share of the call's time that was lost by captures, trials, steps of
other trees than the best, and all else. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # `support`

from support.heads import tiny_head  # noqa: E402
from support.models import prompts, tiny_model  # noqa: E402
from support.simulated_device import CHANCES, DEVICES, SimulatedStep, Simulation, simulate  # noqa: E402

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree  # noqa: E402
from hf_specdec.trees.auto_tables import likeliest_paths  # noqa: E402


FIXED: dict[str, Any] = {
    "plain": None,
    **{f"chain:{length}": TokenTree.chain(length) for length in (1, 2, 3, 5)},
    "branching:4,2,1": TokenTree.from_branching((4, 2, 1)),
    "dynamic:4,3,9": DynamicTree(depth=4, top_k=3, num_nodes=9),
    "9 nodes": TokenTree([path for _, path in likeliest_paths([[0.6, 0.12, 0.05, 0.03]] * 4, 9, 4)]),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--paths", nargs="+", default=["generate"], choices=["generate", "generate_batch"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 8, 1])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    return parser.parse_args()


class Process:
    """A target and its head, which are new; a `GPU` that has run nothing."""

    def __init__(self, path: str, temperature: float, max_new_tokens: int):
        self.target, self.path, self.max_new_tokens = tiny_model(dtype=torch.float32), path, max_new_tokens
        self.head = tiny_head(self.target)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **sampling}

    def call(self, tree: Any, rows: int) -> None:
        off = SpeculativeConfig(tree="chain:1", disable_by_batch_size=0)
        config = off if tree is None else SpeculativeConfig(tree=tree)
        options = self.options | {"assistant_model": self.head, "speculative_config": config}
        if self.path == "generate":
            self.target.generate(**prompts(rows, 9), **options)
        else:
            texts = prompts(rows, 9)["input_ids"].tolist()
            self.target.generate_batch(texts, persistent_manager=True, **options)


def seconds_of(steps: list[SimulatedStep]) -> float:
    return sum(step.seconds for step in steps)


def best_fixed(process: Callable[[], Process], simulation: Simulation, rows: int) -> dict[str, float]:
    """Tokens per second of each fixed tree after its second call."""
    found = {}
    for name, tree in FIXED.items():
        one, steps = process(), []
        for call in range(2 + calls_of(rows)):
            simulation.begin_call()
            one.call(tree, rows)
            steps += simulation.steps if call > 1 else []
        found[name] = rate_of(steps)
    return found


def calls_of(rows: int) -> int:
    """Calls whose texts are enough for a mean."""
    return max(24 // rows, 4)


def rate_of(steps: list[SimulatedStep]) -> float:
    return sum(step.tokens for step in steps) / seconds_of(steps)


def losses(steps: list[SimulatedStep], best: float) -> dict[str, float]:
    """Shares of a call's time by which it is longer than with `best` tokens per second."""
    total, found = seconds_of(steps), {}
    found["captures"] = sum(step.capturing for step in steps)
    kinds: dict[str, list[SimulatedStep]] = {"trials": [], "other trees": []}
    for step in steps:
        kinds["trials" if step.explores else "other trees"].append(step)
    for name, some in kinds.items():
        found[name] = sum(step.seconds - step.capturing - step.tokens / best for step in some)
    return {name: lost / total for name, lost in found.items()}


def name_of(tree: Any) -> str:
    """Nodes and levels of a tree."""
    return "-" if tree is None else f"{tree.num_nodes}/{tree.depth}"


def report(steps: list[SimulatedStep], best: float, captures: list[str], prints: bool) -> dict[str, Any]:
    of = losses(steps, best)
    switches = sum(one.tree != other.tree for one, other in zip(steps, steps[1:], strict=False))
    taken: dict[str, int] = {}
    for step in steps:
        taken[name_of(step.tree)] = taken.get(name_of(step.tree), 0) + 1
    found = {
        "over_best": rate_of(steps) / best,
        "captures": captures,
        "trials": sum(step.explores for step in steps),
        "switches": switches,
        "steps": len(steps),
        **{f"lost by {name}": share for name, share in of.items()},
        "trees": dict(sorted(taken.items(), key=lambda item: -item[1])),
    }
    if not prints:
        return found
    what = " ".join(captures)
    trees = ", ".join(f"{name}: {count}" for name, count in list(found["trees"].items())[:6])
    lost = "  ".join(f"{name} {share:6.3f}" for name, share in of.items())
    print(
        f"    {found['over_best']:.3f}  captures {len(captures)} ({what})  trials {found['trials']:3}  "
        f"switches {switches:3} of {len(steps)}  lost: {lost}  [{trees}]",
        flush=True,
    )
    return found


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in arguments.devices:
            simulation: Any = None
            for path in arguments.paths:
                for temperature in arguments.temperatures:
                    with patch.context() as inner:
                        simulation = simulate(inner, DEVICES[name], CHANCES[temperature])
                        new = lambda: Process(path, temperature, arguments.max_new_tokens)  # noqa: E731, B023
                        process = new()
                        for rows in arguments.rows:
                            rates = best_fixed(new, simulation, rows)
                            best = max(rates.values())
                            over = "  ".join(f"{tree} {rate / best:.2f}" for tree, rate in rates.items())
                            print(f"{name}, {path}, temperature {temperature:g}, {rows} rows: {over}", flush=True)
                            calls = []
                            for number in range(max(arguments.calls, 1 + calls_of(rows))):
                                simulation.begin_call()
                                process.call("auto", rows)
                                captures = [
                                    "prompt" if kind is None else "reads" if kind.reads else name_of(kind.tree)
                                    for kind in simulation.captured
                                ]
                                calls.append(report(simulation.steps, best, captures, number < arguments.calls))
                            later = statistics.mean(call["over_best"] for call in calls[2:])
                            late = sum(len(call["captures"]) for call in calls[1:])
                            print(
                                f"  after the second call: {later:.3f}; captures after the first: {late}", flush=True
                            )
                            results[f"{name}, {path}, {temperature:g}, {rows}"] = {"fixed": rates, "calls": calls}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
