"""Public sets of questions, in files of their formats with questions of our own; HumanEval's come from its package."""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.benchmarking import last_line, on_tiny_target
from support.goldens import trained_target, trained_tokenizer

from hf_specdec import SpeculationMetrics
from hf_specdec.benchmarking.comparison import Call
from hf_specdec.benchmarking.figures import figures
from hf_specdec.benchmarking.prompts import Prompt, encode, encode_messages
from hf_specdec.benchmarking.suites import SUITES, questions, with_later_turns


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["t5 t6 t7 t9", "t8 t9"]},
    {"question_id": 101, "category": "math", "turns": ["t9 t9 t8", "t5 t6 t7"], "reference": ["t5", "t6"]},
    {"question_id": 161, "category": "translation", "turns": ["t8 t9 t5 t4 t8 t9 t5 t4"]},
]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_formats(tmp_path: Path) -> None:
    file = write(tmp_path / "question.jsonl", SPEC_BENCH)
    assert [prompt.task for prompt in questions("spec-bench", file)] == ["mt_bench", "mt_bench", "translation"]
    assert questions("mt-bench", file)[0] == Prompt("writing", "t5 t6 t7 t9", ("t8 t9",))
    on_hub = write(tmp_path / "hub.jsonl", [{"prompt_id": 1, "category": "math", "prompt": ["a", "b"]}])
    assert questions("mt-bench", on_hub) == [Prompt("math", "a", ("b",))]
    gsm8k = write(tmp_path / "test.jsonl", [{"question": "How many?", "answer": "#### 3"}])
    assert questions("gsm8k", gsm8k) == [Prompt("gsm8k", "How many?")]
    packed = write(tmp_path / "HumanEval.jsonl.gz", [{"task_id": "x/0", "prompt": "def f():\n", "test": ""}])
    assert questions("humaneval", packed)[0].text.endswith("```python\ndef f():\n```")


def test_humaneval_from_its_package() -> None:
    found = questions("humaneval")
    assert len(found) == 164 and "def has_close_elements" in found[0].text


def test_fetched_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets`, or a server, is asked for what the suite names; without `datasets`, the error says so."""
    asked = []

    def load_dataset(**source: Any) -> list[dict[str, Any]]:
        asked.append(source)
        return SPEC_BENCH

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __spec__=object()))
    assert len(questions("mt-bench")) == 3 and asked == [SUITES["mt-bench"].source]
    file = write(tmp_path / "question.jsonl", SPEC_BENCH)
    monkeypatch.setattr("urllib.request.urlopen", lambda address, timeout: asked.append(address) or file.open("rb"))
    assert len(questions("spec-bench")) == 3 and asked[1] == SUITES["spec-bench"].source
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install datasets"):
        questions("gsm8k")


@pytest.mark.parametrize(
    "name, record, message",
    [
        ("spec-bench", {"category": "qa", "turns": "one"}, 'question 2: .*"category" and "turns"'),
        ("gsm8k", {"answer": "4"}, "question 2: 'question' is missing"),
        ("gsm8k", ["x"], "question 2"),
        ("arc", {}, "'arc' is no suite. There are spec-bench, mt-bench"),
    ],
)
def test_files_of_another_format(name: str, record: Any, message: str, tmp_path: Path) -> None:
    first = {"question": "x", "category": "qa", "turns": ["x"]}
    with pytest.raises(ValueError, match=message):
        questions(name, write(tmp_path / "q.jsonl", [first, record]))


def test_means_as_spec_bench_has_them() -> None:
    """Of questions whose turns count together, and of steps, of which some had no draft."""

    def call(contender: str, question: int, prompt: int, tokens: int, seconds: float, accepted: list[int]) -> Call:
        metrics = SpeculationMetrics(num_drafts=2, num_accepted_tokens=sum(accepted), accepted_per_step=[accepted])
        return Call(
            contender=contender,
            task="mt_bench",
            prompt=prompt,
            question=question,
            round=0,
            tokens=[1] * tokens,
            seconds=seconds,
            metrics=metrics if contender == "tree" else None,
        )

    calls = [
        call("generate", 0, 0, 10, 5.0, []),
        call("generate", 0, 1, 10, 5.0, []),
        call("generate", 1, 2, 8, 2.0, []),
        call("tree", 0, 0, 10, 2.0, [3, 1, 0]),
        call("tree", 0, 1, 10, 3.0, [2, 2]),
        call("tree", 1, 2, 8, 1.0, [4]),
    ]
    plain, ours = figures(calls, temperature=0.0, reference="generate")
    assert plain.mean_speed == statistics.fmean([20 / 10, 8 / 2]) and plain.mean_accepted_tokens is None
    assert ours.mean_speed == statistics.fmean([20 / 5, 8 / 1])
    assert ours.mean_speed_up == ours.mean_speed / plain.mean_speed
    assert ours.mean_accepted_tokens == statistics.fmean([4, 2, 1, 3, 3, 5])
    assert ours.mean_acceptance_length == 1 + 12 / 6


def test_later_turns() -> None:
    """A later turn's prompt is the whole conversation, with what plain `generate` answered; questions keep numbers."""
    model, tokenizer = trained_target(), trained_tokenizer()
    texts = [Prompt("a", "t5 t6 t7", ("t9", "t4")), Prompt("b", "t8")]
    prompts = with_later_turns(model, tokenizer, texts, encode(tokenizer, texts, "cpu"), 4)
    assert [prompt.question for prompt in prompts] == [0, 0, 0, 1]
    messages = [{"role": "user", "content": "t5 t6 t7"}]
    for turn, prompt in zip(("t9", "t4"), prompts[1:3], strict=True):
        inputs = encode_messages(tokenizer, [messages])
        answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        messages += [{"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}]
        messages += [{"role": "user", "content": turn}]
        assert torch.equal(prompt.inputs["input_ids"], encode_messages(tokenizer, [messages])["input_ids"])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """Second turns follow plain answers; the table has every task, and all of them."""
    file = write(tmp_path / "question.jsonl", SPEC_BENCH)
    options = ("--prompts", file, "--max-new-tokens", 8, "--rounds", 1)
    result = on_tiny_target("bench", "--suite", "spec-bench", *options)
    assert result.exit_code == 0, result.output
    assert "mean accepted tokens" in result.output and "overall" in result.output
    found = last_line(result)
    assert found["suite"] == "spec-bench" and found["prompts"] == {"mt_bench": 2, "translation": 1}
    texts = {(row["task"], row["contender"]): row["texts"] for row in found["results"]}
    assert texts["mt_bench", "generate"] == 4 and texts["translation", "generate"] == 1
    assert all(row["mean_accepted_tokens"] >= 1 for row in found["results"] if row["contender"] != "generate")
    both = on_tiny_target("bench", "--suite", "gsm8k", "--task", "chat")
    assert both.exit_code == 2 and "not both" in both.output
