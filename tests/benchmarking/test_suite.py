"""benchmarks/speed_targets.py, tried out on tiny models, and its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import speed_targets
import torch
from suite import GOALS, TARGETS, Entry, Options, kernels, steps
from suite.forwards import forward_after, matmuls
from suite.heads import mean_length
from suite.pair import TREE, Pair, bisect
from suite.run import Suite
from suite.sizes import TINY, random_llama
from support.benchmarking import HEAD, on_tiny_target
from support.goldens import TINY_TARGET
from torch.utils.flop_counter import FlopCounterMode

from hf_specdec import SpeculationMetrics, TokenTree
from hf_specdec.benchmarking.contenders import Contender
from hf_specdec.benchmarking.equality import Gate
from hf_specdec.cache import TreeCache
from hf_specdec.cli import bench


Measure = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(TINY, torch.float32, "cpu")


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Measure:
    """The trial's exit status, what it printed, and its results by target."""

    def measure(*options: Any, device: str = "cpu") -> tuple[int, str, dict[str, Any]]:
        words = ["--target", TINY_TARGET, "--draft", HEAD, "--device", device, "--tiny", *options]
        status = speed_targets.main([*map(str, words)])
        printed = capsys.readouterr().out
        return status, printed, json.loads(printed.splitlines()[-1])["targets"]

    return measure


@pytest.mark.slow
def test_all_targets_are_tried(measured: Measure, tmp_path: Path) -> None:
    status, printed, targets = measured("--profile", tmp_path)
    assert status == 0, printed
    assert json.loads(printed.splitlines()[-1])["trial"] and "A TRIAL" in printed
    assert list(targets) == list(TARGETS)
    assert {name for name, entry in targets.items() if entry["status"] == "skipped"} == {"P6", "P7"}
    assert all(entry["is_met"] is None for entry in targets.values())  # a trial reaches nothing
    ms = targets["P1"]["figures"]["ms"]
    assert targets["P1"]["values"]["over matmuls"] == pytest.approx(ms["forward"]["p50"] / ms["matmuls"]["p50"])
    ms = targets["P2"]["figures"]["ms"]
    assert targets["P2"]["values"]["share"] == pytest.approx(1 - (ms["target"] + ms["draft"]) / ms["step"]["p50"])
    calls = {call["contender"]: call for call in targets["P3"]["figures"]["calls"]}
    assert list(targets["P3"]["values"]) == ["eager", "static", "assisted"] and len(calls) == 5
    *others, lookup, ours = (call["tokens_per_second"] for call in calls.values())
    assert list(targets["P3"]["values"].values()) == pytest.approx([ours / other for other in others])
    assert list(calls)[3] == "prompt lookup" and lookup > 0
    assert targets["P3"]["figures"]["acceptance_length"] > 2
    rates = {
        call["contender"]: call["tokens_per_second"]
        for call in targets["P4"]["figures"]["calls"]
        if call["task"] == targets["P4"]["figures"]["calls"][-1]["task"]
    }
    eager, static, lookup, ours = rates.values()
    assert list(rates)[2] == "prompt lookup" and lookup > 0
    assert targets["P4"]["values"] == pytest.approx({"eager": ours / eager, "static": ours / static})
    lengths = targets["P8"]["figures"]["acceptance_length"]
    assert len(lengths) == 4 and all(length > 1 for length in lengths.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P1.json.gz", "P2.json.gz", "P4.json.gz"]
    best = max(lengths["best, static tree"], lengths["best, dynamic tree"])
    drawn = max(lengths["drawn, static tree"], lengths["drawn, dynamic tree"])
    assert targets["P8"]["values"]["drawn over best"] == pytest.approx(drawn / best)


@pytest.mark.slow
def test_a_failed_measurement_does_not_stop_the_others(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pair: Pair, trace: Path | None) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(steps, "verify_over_matmuls", fails)
    status, printed, targets = measured("--only", "p6,P2,P1")
    assert status == 1
    assert {name: entry["status"] for name, entry in targets.items()} == {
        "P1": "failed",
        "P2": "measured",
        "P6": "skipped",
    }
    assert "RuntimeError: out of luck" in printed


def test_a_red_gate(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeCache, "_move", lambda cache, kept: None)
    status, _, targets = measured("--only", "P1")
    assert status == 1 and "not plain generate's in float32" in targets["P1"]["note"]


@pytest.mark.parametrize("given, expected", [((), 1), (("--rounds", 2), 2)])
def test_rounds_of_a_trial(
    measured: Measure, monkeypatch: pytest.MonkeyPatch, given: tuple[Any, ...], expected: int
) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(speed_targets.suite, "run", lambda options, begins: seen.append(options) or iter(()))
    assert measured("--only", "P4", *given)[0] == 0
    assert [options.rounds for options in seen] == [expected]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without CUDA")
@pytest.mark.parametrize(
    "words, messages",
    [
        ((), ("the targets need a CUDA device", "--tiny")),
        (("--tiny", "--only", "P1,P5"), ("'P5' is no target of the suite",)),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], messages: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        speed_targets.main(words)
    printed = capsys.readouterr().err
    assert all(message in printed for message in messages)


def test_the_command_of_the_library_passes_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(bench.subprocess, "call", lambda command: calls.append(command[1:]) or 3)
    result = on_tiny_target("bench", "--suite", "gpu", "--tiny", "--only", "P1,P2")
    assert result.exit_code == 3, result.output
    names = ["--target", str(TINY_TARGET), "--draft", str(HEAD), "--device", "cpu", "--only", "P1,P2", "--tiny"]
    assert calls == [[str(Path(speed_targets.__file__)), *names]]
    monkeypatch.setattr(bench, "SPEED_TARGETS", Path("nowhere"))
    result = on_tiny_target("bench", "--suite", "gpu", "--tiny")
    assert result.exit_code == 2 and "in a checkout" in result.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forwards_can_be_captured(measured: Measure) -> None:
    status, printed, targets = measured("--only", "P1,P2,P8", device="cuda")
    assert status == 0, printed
    assert targets["P1"]["figures"]["ms"]["eager"]["p50"] > targets["P1"]["figures"]["ms"]["forward"]["p50"]
    assert targets["P2"]["figures"]["graph_launches_per_step"] is not None


# --------------------------------------------------------------------------------------------------------------- parts


def test_bisection() -> None:
    """τ = 6 - 40 ε is 4.5 ± 0.1 for ε from 0.035 to 0.04."""
    found = bisect(lambda epsilon, prompts: 6 - 40 * epsilon, wanted=4.5, tolerance=0.1)
    assert found.is_met and 0.035 <= found.epsilon <= 0.04 and found.prompts == 0
    assert found.acceptance_length == 6 - 40 * found.epsilon


@pytest.mark.parametrize("place", [1e-4, 3.0])
def test_bisection_far_from_the_first_guess(place: float) -> None:
    assert bisect(lambda epsilon, prompts: 4.5 * place / epsilon, wanted=4.5, tolerance=0.1).is_met


def test_bisection_of_what_jumps() -> None:
    """Where the acceptance jumps over what is wished, other prompts are tried, with the ε of the jump."""

    def jumps(epsilon: float, prompts: int) -> float:
        return (5.0 if epsilon < 0.05 else 4.0) - (0.45 if prompts == 3 else 0.0)

    found = bisect(jumps, wanted=4.5, tolerance=0.1)
    assert found.is_met and found.prompts == 3
    assert 0.047 < found.epsilon < 0.05 and found.acceptance_length == 4.55
    hopeless = bisect(lambda epsilon, prompts: 6.0 if epsilon < 0.1 else 1.0, wanted=4.5, tolerance=0.1, most=12)
    assert not hopeless.is_met and len(hopeless.tried) == 12 and hopeless.acceptance_length == 6.0


@pytest.mark.slow
def test_the_smaller_epsilon_the_more_they_agree(pair: Pair) -> None:
    lengths = []
    for epsilon in (1e-6, 0.3, 1.0):
        pair.scale(epsilon)
        metrics = pair.metrics(pair.contender(), 60)
        lengths.append(metrics.mean_acceptance_length)
    assert lengths[0] > 5.5 and lengths[0] > lengths[1] > lengths[2]
    pair.scale(1.0)
    fresh = random_llama(TINY.shape, torch.float32, "cpu")
    for name, weight in pair.target.state_dict().items():
        assert torch.allclose(weight, fresh.state_dict()[name], rtol=1e-5), name


def test_calibrated_are_the_steps_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps round differently: their texts, and what is accepted, are not those of uncompiled ones."""
    asked: list[Contender] = []

    def metrics(pair: Pair, contender: Contender, max_new_tokens: int) -> SpeculationMetrics:
        asked.append(contender)
        return SpeculationMetrics(num_drafts=2, num_accepted_tokens=7)

    monkeypatch.setattr(Pair, "metrics", metrics)
    monkeypatch.setattr(steps, "compiles_on", lambda device: True)
    monkeypatch.setattr(steps, "gate", lambda pair: Gate(identical={}, num_prompts=0, differences=[]))
    found = Suite(Options(only=("P3",), device="cpu", tiny=True))
    assert found.calibration.acceptance_length == 4.5
    timed = steps.ours(found.pair).options["speculative_config"]
    assert timed.compile and [one.options["speculative_config"].compile for one in asked] == [False, True]


def test_the_tree_of_the_pair() -> None:
    assert TREE.depth == 5 and TREE.num_nodes == 32 and not TREE.has_rank_gaps


def test_a_forward_may_be_repeated(pair: Pair) -> None:
    tree = TokenTree.from_branching((2, 2))
    ids = torch.tensor([[3, 5, 7, 9]])
    with forward_after(pair.target, ids, tree) as forward:
        first, second = forward().logits, forward().logits
    assert first.shape == (1, 7, TINY.shape["vocab_size"]) and torch.equal(first, second)
    assert pair.target.config._attn_implementation == "sdpa"


def test_the_matmuls_are_all_of_a_forward(pair: Pair) -> None:
    """Multiplications by weights, as FLOPs: 2 for each weight and token, embeddings aside."""
    run = matmuls(pair.target, 8)
    with FlopCounterMode(display=False) as counter:
        run()
    weights = sum(weight.numel() for name, weight in pair.target.named_parameters() if weight.dim() == 2)
    weights -= pair.target.get_input_embeddings().weight.numel()
    assert counter.get_total_flops() == 2 * 8 * weights


def test_the_levels_of_the_draft_are_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward that catches up, and one for each level with children: by the nodes that have some."""
    seen: list[int] = []
    original = steps.chain_of
    monkeypatch.setattr(steps, "chain_of", lambda count: (seen.append(count), original(count))[1])
    target, draft = steps.forwards_of_step(pair, 4)
    parents = {path[:-1] for path in TREE.paths if len(path) > 1}
    assert seen == [4, *(sum(len(path) == level for path in parents) for level in range(1, TREE.depth))]
    assert target > 0 and draft > 0


def test_mean_and_error_of_steps() -> None:
    """0, 1, 2, 3: mean 1.5, and a standard deviation of √(5 / 3), halved."""
    mean, error = mean_length(SpeculationMetrics(accepted_per_step=[[0, 1], [2, 3]]))
    assert mean == 2.5 and error == pytest.approx((5 / 3) ** 0.5 / 2)


@pytest.mark.parametrize(
    "name, values, caveat, met",
    [
        ("P1", {"over matmuls": 1.25}, "", True),
        ("P1", {"over matmuls": 1.26}, "", False),
        ("P2", {"share": 0.051}, "", False),
        ("P3", {"eager": 12.0, "static": 4.0, "assisted": 5.1}, "", True),
        ("P3", {"eager": 12.0, "static": 3.9, "assisted": 5.1}, "", False),
        ("P3", {"eager": 12.0, "static": 4.0, "assisted": 5.1}, "not calibrated", False),
    ],
)
def test_what_is_reached(name: str, values: dict[str, float], caveat: str, met: bool) -> None:
    assert Entry(name=name, status="measured", values=values, caveat=caveat).is_met is met
    assert Entry(name=name, status="measured", values=values, is_trial=True).is_met is None
    assert Entry(name=name, status="failed").is_met is None


def test_goals_in_words() -> None:
    assert [str(goal) for goal in GOALS["P6"].values()] == ["≥ 75.0 %", "≤ 1.60×", "≥ 3.00×", "≥ 2.00×"]
    assert GOALS.keys() == TARGETS.keys()


def test_figures_of_kernels() -> None:
    """The worst row counts; a peer that never ran is none that was beaten."""
    rows = [
        {"nodes": 16, "share_of_copy_bandwidth": 0.9, "over_floor": 1.1, "peers": {}},
        {"nodes": 16, "share_of_copy_bandwidth": 0.8, "over_floor": 1.2, "peers": {"sdpa, K/V repeated": over(5.0)}},
        {"nodes": 64, "share_of_copy_bandwidth": 0.3, "over_floor": 1.4, "peers": {"sdpa, K/V repeated": over(4.0)}},
        {"nodes": 64, "share_of_copy_bandwidth": 0.4, "over_floor": 1.5, "peers": {}},
    ]
    found = kernels.values_of_tree_attention({"rows": rows})
    assert found == {
        "bandwidth, 16 nodes": 0.8,
        "over floor, 64 nodes": 1.5,
        "over sdpa": 4.0,
        "over flex": 0.0,
    }
    assert Entry(name="P6", status="measured", values=found).is_met is False
    rows = [
        {"batch": 64, "walk": "greedy", "over_floor": 9.0},
        {"batch": 64, "walk": "rejection, top-p", "over_floor": 8.0},
        {"batch": 64, "walk": "rejection, temperature", "over_floor": 1.3},
        {"batch": 1, "walk": "rejection, temperature", "over_floor": 7.0},
        {"batch": 64, "peer": "argmax of all nodes", "over_floor": 2.0},
    ]
    assert kernels.values_of_rejection_sampling({"rows": rows}) == {"over floor": 1.3}


def over(times: float) -> dict[str, float]:
    return {"ms": 1.0, "over_ours": times}


@pytest.mark.parametrize(
    "code, expected",
    [
        ("print('table'); print('{\"is_met\": true}')", {"is_met": True}),
        ("print('table')", "its last line is no JSON: table"),
        ("print('[1]')", "no JSON object"),
        ("raise SystemExit('no GPU')", "ended with status 1: no GPU"),
    ],
)
def test_scripts_of_kernels(code: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "benchmark_tree_attention.py").write_text(code)
    script = kernels.find_script("tree_attention", tmp_path)
    assert script is not None and kernels.find_script("rejection", tmp_path) is None
    if isinstance(expected, dict):
        assert kernels.run_script(script) == expected
    else:
        with pytest.raises(RuntimeError, match=expected.replace("[", r"\[")):
            kernels.run_script(script)
