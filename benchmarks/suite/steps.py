"""P1 to P3: verification, step overhead and speed of the 8B shape."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from hf_specdec.benchmarking.bench import REFERENCE
from hf_specdec.benchmarking.comparison import compare, generate
from hf_specdec.benchmarking.contenders import GREEDY, Contender, baseline, speculative
from hf_specdec.benchmarking.equality import Gate, check, differences_of
from hf_specdec.benchmarking.figures import figures, percentiles
from hf_specdec.benchmarking.phases import activities, trace_call, write_trace
from hf_specdec.metrics import metrics_of_last_call
from hf_specdec.trees import TokenTree

from .forwards import forward_after, matmuls
from .pair import TREE, Calibration, Pair
from .sizes import tree_of
from .timing import captured, milliseconds


VERIFIED_NODES = 64
"""Nodes of P1's forward, the root included."""


def gate(pair: Pair) -> Gate:
    """Compares the texts generated with the trees of P1 and P3 with plain `generate`'s, in float32."""
    target, draft = pair.in_float32()
    trees = [_verified_tree(), TREE]
    contenders = [speculative(draft, str(tree)) for tree in trees]
    return check(target, pair.prompts, contenders, max_new_tokens=pair.sizes.gate_tokens)


def verify_over_matmuls(pair: Pair, trace: Path | None = None) -> dict[str, Any]:
    """P1: time of the forward over 64 nodes divided by the time of the matmuls alone, both captured."""
    target, sizes, device = pair.target, pair.sizes, pair.target.device
    ids, tree = torch.randint(target.config.vocab_size, (1, sizes.context), device=device), _verified_tree()
    with (
        forward_after(target, ids, tree) as forward,
        forward_after(target, ids, tree, compiles=compiles_on(device)) as compiled,
    ):
        eager = milliseconds(forward, device, sizes.repeats)
        captures = {"forward": compiled, "forward, not compiled": forward, "matmuls": matmuls(target, VERIFIED_NODES)}
        replays = {name: captured(function, device) for name, function in captures.items()}
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(2):  # the replays are timed in turn
            for name, replay in replays.items():
                times[name] += milliseconds(replay, device, sizes.repeats)
        if trace is not None:
            write_trace(compiled, trace, device)
    found = {name: percentiles(values) for name, values in (times | {"eager": eager}).items()}
    return {"ratio": found["forward"]["p50"] / found["matmuls"]["p50"], "ms": found, "nodes": VERIFIED_NODES}


def _verified_tree() -> TokenTree:
    return tree_of(VERIFIED_NODES - 1, depth=5)


def compiles_on(device: torch.device) -> bool:
    """Whether the suite compiles steps on this device: on CUDA only."""
    return device.type == "cuda"


def ours(pair: Pair) -> Contender:
    """The speculative contender that P2 and P3 time."""
    return pair.contender(compiles_on(pair.target.device))


def step_besides_forwards(pair: Pair, calibration: Calibration, trace: Path | None = None) -> dict[str, Any]:
    """
    P2: the share of a step that is not spent in the forwards of target and draft, each captured alone.

    The time of a step is the difference in time of a call of full length and a call of half the length, divided by the
    difference in steps. The rest of a call, its beginning and end, is reported too.
    """
    contender, steps, rest = ours(pair), [], []
    lengths = pair.sizes.max_new_tokens // 2, pair.sizes.max_new_tokens
    for prompt in [*pair.prompts[:1], *pair.prompts * 3]:  # the first warms up
        (short, fewer), (whole, more) = (_decode(pair, contender, prompt, length) for length in lengths)
        steps.append((whole - short) / max(more - fewer, 1))
        rest.append(whole - more * steps[-1])
    if trace is not None:
        trace_call(pair.target, pair.prompts[0], contender, trace)
    step = percentiles(steps[1:])
    target, draft = forwards_of_step(pair, round(calibration.acceptance_length))
    return {
        "share": 1 - (target + draft) / step["p50"],
        "ms": {"step": step, "target": target, "draft": draft, "rest of a call": percentiles(rest[1:])},
        "graph_launches_per_step": graph_launches_per_step(pair),
        "tree": str(TREE),
    }


def _decode(pair: Pair, contender: Contender, prompt: Any, num_tokens: int) -> tuple[float, int]:
    """Milliseconds of a call without its prefill, and the call's number of steps."""
    _, seconds = generate(pair.target, contender, prompt, **GREEDY | {"max_new_tokens": num_tokens})
    metrics = metrics_of_last_call()
    return 1000 * (seconds - metrics.seconds["prefill"]), len(metrics.accepted_per_step[0])


def forwards_of_step(pair: Pair, num_new: int) -> tuple[float, float]:
    """
    Milliseconds of the target's forward, and of all the draft's forwards together, in one step, each captured alone.

    Args:
        pair (`Pair`): target and draft.
        num_new (`int`): tokens of the last step, which the draft's first forward takes.
    """
    sizes = pair.sizes
    ids = torch.randint(pair.target.config.vocab_size, (1, sizes.prompt), device=pair.target.device)

    def one(model: Any, tree: TokenTree | None) -> float:
        with forward_after(model, ids, tree, compiles=compiles_on(model.device)) as forward:
            return statistics.median(
                milliseconds(captured(forward, model.device), model.device, max(sizes.repeats // 2, 3))
            )

    # The draft's forward of a level has only the nodes with children.
    levels = [
        sum(1 for node, depth in enumerate(TREE.depths) if depth == level and TREE.children[node])
        for level in range(1, TREE.depth)
    ]
    draft = sum(one(pair.draft, chain_of(count)) for count in (num_new, *levels))
    return one(pair.target, TREE), draft


def chain_of(num_nodes: int) -> TokenTree | None:
    """The chain whose forward has `num_nodes` nodes, the root included; None for the root alone."""
    return TokenTree.chain(num_nodes - 1) if num_nodes > 1 else None


def graph_launches_per_step(pair: Pair) -> float | None:
    """CUDA graph launches per step; None without CUDA."""
    if pair.target.device.type != "cuda":
        return None
    options = GREEDY | {"max_new_tokens": 32}
    with profile(activities=activities(pair.target.device)) as profiler:
        generate(pair.target, ours(pair), pair.prompts[0], **options)
    launches = sum(event.count for event in profiler.key_averages() if event.key == "cudaGraphLaunch")
    return launches / max(len(metrics_of_last_call().accepted_per_step[0]), 1)


def speed_of_pair(pair: Pair, calibration: Calibration, rounds: int) -> dict[str, Any]:
    """
    P3: tokens per second over those of `generate` eager, with a static cache and compiled, and assisted. Prompt lookup
    runs beside them.
    """
    contenders = [baseline(name, pair.draft) for name in ("eager", "static", "assisted", "lookup")]
    contenders += [pair.contender(), ours(pair)] if compiles_on(pair.target.device) else [ours(pair)]
    calls = compare(
        pair.target,
        pair.prompts,
        contenders,
        temperature=0.0,
        max_new_tokens=pair.sizes.max_new_tokens,
        rounds=rounds,
    )
    found = figures(calls, temperature=0.0, reference=REFERENCE)
    rates = [row.tokens_per_second for row in found]
    names = ("eager", "static", "assisted")
    return {
        "over": {name: rates[-1] / rate for name, rate in zip(names, rates, strict=False)},
        "acceptance_length": found[-1].mean_acceptance_length,
        "calibration": asdict(calibration),
        "is_calibrated": calibration.is_met,
        "calls": [row.to_dict() for row in found],
        "differences": [d.to_dict() for d in differences_of(pair.target, pair.prompts, calls, REFERENCE)],
        "tree": str(TREE),
    }
