"""`hf-specdec bench`, as a user runs it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.benchmarking import HEAD, invoke, last_line, on_tiny_target
from support.goldens import TINY_TARGET, trained_target, trained_tokenizer
from transformers import BatchEncoding, PreTrainedModel

from hf_specdec import NgramDraft, SpeculationMetrics
from hf_specdec.benchmarking import bench as benchmark
from hf_specdec.benchmarking import equality, phases
from hf_specdec.benchmarking.bench import Method, Report, measure
from hf_specdec.benchmarking.contenders import baseline, speculative
from hf_specdec.benchmarking.equality import Difference, Gate
from hf_specdec.benchmarking.prompts import EncodedPrompt, Prompt, encode
from hf_specdec.cache import TreeCache


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"task": "short", "prompt": "t5 t6 t7 t9"}, {"task": "long", "prompt": "t8 t9 t5 t4 " * 8}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def bench(prompts: Path, *arguments: Any) -> Any:
    return on_tiny_target("bench", "--prompts", prompts, "--max-new-tokens", 12, "--rounds", 2, *arguments)


@pytest.mark.slow
def test_figures_and_files(prompts: Path, tmp_path: Path) -> None:
    trees = ("--tree", "default", "--tree", "chain:3")
    files = ("--plot", tmp_path / "bench.png", "--profile", tmp_path / "trace")
    result = bench(prompts, *trees, *files, "--baseline", "lookup", "--threads", 1)
    assert result.exit_code == 0, result.output
    found = last_line(result)
    rows = {(row["task"], row["contender"]): row for row in found["results"]}
    names = ["generate", "prompt lookup", "tree default", "tree chain:3"]
    assert list(rows) == [(task, name) for task in ("short", "long", "all") for name in names]
    for (task, name), row in rows.items():
        plain = rows[task, "generate"]
        assert row["tokens"] == plain["tokens"] and row["identical"] == row["texts"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        assert row["p20"] <= row["p50"] <= row["p80"]
        assert (row["mean_acceptance_length"] is None) == (not name.startswith("tree"))
    for name in names:
        assert rows["all", name]["tokens"] == rows["short", name]["tokens"] + rows["long", name]["tokens"]
    ours = rows["all", "tree default"]
    assert ours["mean_acceptance_length"] == pytest.approx(1 + sum(ours["acceptance_per_position"]))
    assert ours["mean_acceptance_length"] > 1
    assert min(ours["step_ms"][phase] for phase in ("draft", "verify", "rest")) > 0
    assert found["gate"]["identical"] == {"tree default": 2, "tree chain:3": 2}
    assert found["threads"] == 1 and found["dtype"] == "float32" and found["prompts"] == {"short": 1, "long": 1}
    assert "speed-up" in result.stdout and "all tasks" in result.stdout
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.slow
def test_temperatures_in_half_precision(prompts: Path, tmp_path: Path) -> None:
    """Sampled texts are not compared; greedy ones show where they part, and how close the logits were."""
    options = ("--temperature", 0, "--temperature", 1, "--dtype", "bfloat16", "--plot", tmp_path / "bench.svg")
    result = bench(prompts, *options)
    assert result.exit_code == 0, result.output
    found = last_line(result)
    assert found["gate"]["dtype"] == "float32" and found["dtype"] == "bfloat16"
    sampled = [row for row in found["results"] if row["temperature"] == 1]
    assert sampled and all(row["identical"] is None for row in sampled)
    assert "sampled" in result.stdout
    greedy = [row for row in found["results"] if row["temperature"] == 0 and row["task"] == "all"]
    assert sum(row["texts"] - row["identical"] for row in greedy) == len(found["differences"])
    assert "<svg" in (tmp_path / "bench.svg").read_text()


@pytest.mark.slow
def test_a_draft_model_and_all_baselines(prompts: Path) -> None:
    options = ("--device", "cpu", "--prompts", prompts, "--max-new-tokens", 12, "--rounds", 1, "--tree", "chain:2")
    baselines = ("--baseline", "static", "--baseline", "assisted", "--baseline", "lookup")
    result = invoke("bench", TINY_TARGET, "--draft", TINY_TARGET, *options, *baselines, "--no-gate")
    assert result.exit_code == 0, result.output
    found = last_line(result)
    assert found["gate"] is None and "not compared in float32" in result.stdout
    rows = {row["contender"]: row for row in found["results"] if row["task"] == "all"}
    assert list(rows) == [
        "generate",
        "generate, static cache",
        "assisted, chain of 5",
        "prompt lookup",
        "tree chain:2",
    ]
    assert {row["identical"] for row in rows.values()} == {2}
    # The target is its own draft: all is accepted but where a text ends. 11 tokens behind the first: 3, 3, 3 and 2.
    assert rows["tree chain:2"]["mean_acceptance_length"] == pytest.approx(11 / 4)


def test_a_wrong_text_is_not_timed(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted keys and values that stay where they were written make other texts: red, and no speed-up is shown."""
    monkeypatch.setattr(TreeCache, "_move", lambda cache, kept: None)
    result = bench(prompts, "--tree", "branching:4,3,2")
    assert result.exit_code == 1, result.output
    found = last_line(result)
    assert found["results"] == [] and found["gate"]["differences"]
    assert "Not timed" in result.stdout and "tok/s" not in result.stdout
    assert "first differing token" in result.stdout


def test_figures_for_a_model_card(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ids = torch.tensor([[3, 5, 7]])
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    prompts = [EncodedPrompt("chat", inputs), EncodedPrompt("code", inputs)]
    calls = [baseline("eager", draft), speculative(draft, "chain:2")]
    report = Report(setting={"dtype": "float64", "device": "a machine"}, gate=None)
    measure(report, target, prompts, calls, Method(max_new_tokens=8, rounds=1))
    found = report.measurements("tree chain:2")
    ours = [row for row in report.figures if row.contender == "tree chain:2"]
    assert {measurement.tree for measurement in found} == {"chain:2"}
    assert [measurement.dataset for measurement in found] == ["chat", "code", "all"]
    for measurement, row in zip(found, ours, strict=True):
        assert measurement.mean_acceptance_length == row.mean_acceptance_length
        assert list(measurement.acceptance_per_position) == row.acceptance_per_position
        assert measurement.speed_up == pytest.approx(row.speed_up)
        assert (measurement.dtype, measurement.hardware) == ("float64", "a machine")
    assert report.measurements("generate") == []


def test_a_tokenizer_that_returns_token_types() -> None:
    tokenizer = trained_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    prompts = encode(tokenizer, [Prompt("chat", "t5 t6 t7")], "cpu")
    found = benchmark.gate(trained_target(), prompts, [speculative(NgramDraft(), "chain:2")], Method(max_new_tokens=6))
    assert found.is_passed and found.num_prompts == 1


def difference(contender: str, gap: float) -> Difference:
    return Difference(contender=contender, task="chat", prompt=0, position=3, gap=gap, rounding=0.1)


@pytest.mark.parametrize(
    "gate, differences, expected",
    [
        (None, [], None),
        (None, [difference("tree chain:3", 0.09)], None),
        (None, [difference("tree chain:3", 0.11)], False),
        (None, [difference("prompt lookup", 0.11)], None),
        (Gate({}, 1, []), [], True),
        (Gate({}, 1, []), [difference("tree chain:3", 0.09)], True),
        (Gate({}, 1, []), [difference("tree chain:3", 0.11)], False),
        (Gate({}, 1, [difference("tree chain:3", 0.0)]), [], False),
    ],
)
def test_a_report_says_lossless_if_that_was_checked(
    gate: Gate | None, differences: list[Difference], expected: bool | None
) -> None:
    assert Report(setting={}, gate=gate, differences=differences).is_lossless is expected


def test_a_difference_that_is_no_tie_is_not_called_one(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeCache, "_move", lambda cache, kept: None)
    result = bench(prompts, "--tree", "branching:4,3,2", "--no-gate")
    assert result.exit_code == 1, result.output
    assert "all but tie" not in result.stdout and "first differing token" in result.stdout
    assert last_line(result)["differences"]


def test_near_ties_are_named_as_such(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeCache, "_move", lambda cache, kept: None)
    monkeypatch.setattr(equality, "NEAR_TIE", {torch.float32: 1e9})
    result = bench(prompts, "--tree", "branching:4,3,2", "--no-gate")
    assert result.exit_code == 0, result.output
    assert "all but tie" in result.stdout and "first differing token" not in result.stdout


def test_the_time_of_a_step_is_that_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, one prompt of each task is measured apart."""
    asked: list[str] = []
    monkeypatch.setattr(benchmark, "compare", lambda *arguments, **options: [])
    monkeypatch.setattr(benchmark, "differences_of", lambda *arguments: [])
    monkeypatch.setattr(benchmark, "figures", lambda calls, *, step_ms, **options: made.append(step_ms) or [])
    monkeypatch.setattr(phases, "generate", lambda model, contender, prompt, **options: asked.append(prompt.task))

    def metrics() -> SpeculationMetrics:
        seconds = {"propose": 0.001 if asked[-1] == "chat" else 0.003}
        return SpeculationMetrics(accepted_per_step=[[1]], seconds=seconds)

    monkeypatch.setattr(phases, "metrics_of_last_call", metrics)
    made: list[Any] = []
    inputs = BatchEncoding({"input_ids": torch.tensor([[3]])})
    prompts = [EncodedPrompt(task, inputs) for task in ("chat", "chat", "code", "code")]
    contenders = [baseline("eager", None), speculative(NgramDraft(), "chain:2")]
    model: Any = SimpleNamespace(device=torch.device("meta"))
    measure(Report(setting={}, gate=None), model, prompts, contenders, Method())
    assert asked == ["chat", "code"]
    drafting = {key: value["draft"] for key, value in made[0].items()}
    expected = {"chat": 1.0, "code": 3.0, "all": 2.0}
    assert drafting == pytest.approx({(task, "tree chain:2"): value for task, value in expected.items()})


@pytest.mark.parametrize(
    "arguments, messages",
    [
        (("--tree", "[(0, 0)]"), ("--tree", "not its parent")),
        (("--tree", "bush:3"), ("--tree", "is no tree. Write auto")),
        (("--tree", "[(0,), (600,)]"), ("--draft", "rank 600")),
        (("--baseline", "vllm"), ("--baseline", "'vllm' is no baseline")),
        (("--baseline", "assisted"), ("--baseline", "needs a draft model")),
        (("--task", "poetry"), ("--task", "no built-in set")),
        (("--prompts", "nowhere.txt"), ("--prompts", "nowhere.txt")),
        (("--prompts", __file__, "--task", "chat"), ("--prompts", "not both")),
        (("--dtype", "int8"), ("--dtype", "'int8' is not one of float32")),
        (("--device", "gpu"), ("--device", "'gpu' is no device")),
        (("--plot", "bench.gif"), ("--plot", "must end in .png")),
        (("--plot", "no/such/folder/bench.png"), ("--plot", "is no folder")),
        (("--temperature", "-1"), ("--temperature",)),
        (("--tiny",), ("--tiny", "belongs to --suite gpu")),
        (("--suite", "tpu"), ("--suite", "'tpu' is no suite. There are spec-bench")),
        (("--suite", "gpu", "--tiny", "--tree", "auto"), ("--tree", "does not go with --suite")),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], messages: tuple[str, ...]) -> None:
    result = on_tiny_target("bench", *arguments)
    assert result.exit_code == 2
    for message in messages:
        assert message in result.output


def test_a_head_of_another_target(prompts: Path, tmp_path: Path) -> None:
    result = invoke("bench", tmp_path, "--draft", HEAD, "--device", "cpu")
    assert result.exit_code == 2 and "TARGET" in result.output
    result = invoke("bench", TINY_TARGET, "--draft", tmp_path, "--device", "cpu", "--prompts", prompts)
    assert result.exit_code == 2 and "--draft" in result.output and "config.json" in result.output
