"""Whole runs on the tiny trained target."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.chat import chat_tokenizer
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.models import tiny_model
from support.training import SMALL as OF_RUNS
from support.training import log_of, losses_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import build_app
from hf_specdec.eagle import EagleHead
from hf_specdec.training import TrainOptions, recipe, train
from hf_specdec.training.checkpoints import check_identity, mark_complete, newest_complete, write_identity
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.data import Text


SMALL = OF_RUNS | {"unroll_steps": 3}


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_learns_and_drafts(tmp_path: Path, data: Path, kind: str) -> None:
    options = {"draft_vocab_size": 256} if kind == "eagle3" else {}
    result = train(
        TrainOptions(output=str(tmp_path), kind=kind, data=str(data), epochs=4, learning_rate=2e-3, **SMALL, **options)
    )
    assert result.finished and result.step == result.total_steps
    assert result.after["eval_loss"] < 0.95 * result.before["eval_loss"]
    head = EagleHead.from_pretrained(tmp_path)
    assert head.config.target_name == str(TINY_TARGET)
    target, prompt = trained_target(), torch.tensor([trained_prompts()["prompts"][0]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=head), plain)
    assert hf_specdec.last_metrics().num_drafts > 0
    records = log_of(tmp_path)
    depths = 3 if kind == "eagle3" else 1
    assert all(f"top1_{depth}" in record for record in records if "loss" in record for depth in range(1, depths + 1))
    assert any("eval_acceptance_length" in record and "eval_top1_3" in record for record in records)


@pytest.mark.parametrize("hidden_size", [pytest.param(None, marks=pytest.mark.slow), 32])
def test_a_draft_model_learns_and_loads(tmp_path: Path, data: Path, hidden_size: int | None) -> None:
    options = TrainOptions(
        output=str(tmp_path), kind="draft", data=str(data), num_layers=1, hidden_size=hidden_size, epochs=2, **SMALL
    )
    result = train(options)
    assert result.after["eval_loss"] < result.before["eval_loss"]
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert draft.config.hidden_size == (hidden_size or 64)
    assert AutoTokenizer.from_pretrained(tmp_path)("t5 t6")["input_ids"][-2:] == [5, 6]
    target, prompt = trained_target(), torch.tensor([trained_prompts()["prompts"][0]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft, tree="[(0,), (1,)]")
    assert torch.equal(output, plain)


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle1", "draft"))]
)
def test_what_was_trained_is_trained_further(tmp_path: Path, data: Path, kind: str) -> None:
    """The second run begins where the first ended, at its own learning rate, with the sizes of what it starts from."""
    sizes = {"eagle3": {"draft_vocab_size": 100, "intermediate_size": 96}, "eagle1": {}, "draft": {"num_layers": 1}}
    options = {"kind": kind, "data": str(data), "epochs": 2, **SMALL}
    first = train(TrainOptions(output=str(tmp_path / "first"), learning_rate=2e-3, **options, **sizes[kind]))
    if kind != "draft":
        other = EagleHead.from_pretrained(tmp_path / "first")
        other.config.target_name = "another target"
        other.save_pretrained(tmp_path / "first")
    more = {"start_from": str(tmp_path / "first"), "learning_rate": 1e-5}
    second = train(TrainOptions(output=str(tmp_path / "second"), **options, **more))
    assert second.before["eval_loss"] == pytest.approx(first.after["eval_loss"], rel=0.02)
    assert second.before["eval_loss"] < 0.95 * first.before["eval_loss"]
    with open(tmp_path / "second" / "config.json") as file:
        config = json.load(file)
    assert config["recipe"]["start_from"] == "first"
    assert kind == "draft" or config["target_name"] == str(TINY_TARGET)
    assert kind != "eagle3" or (config["draft_vocab_size"], config["text_config"]["intermediate_size"]) == (100, 96)


def test_what_cannot_be_trained_further(tmp_path: Path, data: Path) -> None:
    start = str(Path(__file__).parents[1] / "goldens" / "specforge_eagle3")
    options = {"output": str(tmp_path), "data": str(data), "start_from": start, **SMALL}
    with pytest.raises(ValueError, match="version 3: use `kind='eagle3'`"):
        train(TrainOptions(kind="eagle1", **options))
    with pytest.raises(ValueError, match="`num_layers` is what `start_from`="):
        TrainOptions(num_layers=1, **options)
    writes = options | {"output": str(tmp_path / "writes"), "data": None, "self_generate": 4}
    with pytest.raises(ValueError, match="version 3: use `kind='eagle3'`"):
        train(TrainOptions(kind="eagle1", **writes))
    assert not list((tmp_path / "writes").glob("data/*.jsonl")), "the target has written before it was looked at"
    tiny_model("llama", vocab_size=64).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="vocabulary of 64"):
        train(
            TrainOptions(
                kind="draft", **options | {"start_from": str(tmp_path / "other"), "output": str(tmp_path / "b")}
            )
        )


def test_a_run_that_stops_in_time_continues_as_if_it_had_not(tmp_path: Path, data: Path) -> None:
    """The limit is over at once: every run takes one step. Losses and weights are those of one run."""
    options = {"data": str(data), "epochs": 1.0, "eval_steps": 100, **SMALL}
    whole = train(TrainOptions(output=str(tmp_path / "whole"), **options))
    assert whole.total_steps >= 3
    steps = []
    for _ in range(whole.total_steps):
        result = train(TrainOptions(output=str(tmp_path / "parts"), max_seconds=1e-3, **options))
        steps.append(result.step)
    assert steps == list(range(1, whole.total_steps + 1)) and result.finished
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    weights = [EagleHead.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    again = train(TrainOptions(output=str(tmp_path / "parts"), **options))
    assert again.finished and again.after == result.after


def test_a_resumed_run_says_from_where(tmp_path: Path, data: Path) -> None:
    options = TrainOptions(output=str(tmp_path), data=str(data), epochs=1.0, eval_steps=100, **SMALL)
    lines: list[str] = []
    stopped = train(replace(options, max_seconds=1e-3), report=lines.append)
    assert stopped.step == 1 and not any("continues" in line for line in lines)
    finished = train(options, report=lines.append)
    (line,) = (line for line in lines if "continues" in line)
    assert line == f"The run continues after step 1 of {finished.total_steps}, from {tmp_path}/checkpoint-1."
    train(options, report=lines.append)
    assert lines[-1] == f"{tmp_path} holds a finished run: nothing is left to do."


def test_writing_that_continues_says_from_where(tmp_path: Path) -> None:
    options = TrainOptions(output=str(tmp_path), self_generate=3, generation_batch_size=2, **SMALL)
    lines: list[str] = []
    text = Text([1, 9, 9, 4], [(1, 4)], 1)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "written-00000.jsonl").write_text(text.to_json() + "\n")
    Corpus(options, tmp_path, trained_target(), chat_tokenizer(), report=lines.append).texts(time.monotonic())
    assert lines == [f"Writing continues: 1 of 3 texts are in {tmp_path}."]


@pytest.mark.parametrize(
    ("epochs", "batch_tokens", "rows"), [(3.0, None, 1), (100.0, None, 4), (1000.0, None, 256), (3.0, 512, 8)]
)
def test_steps_from_little_data(
    epochs: float, batch_tokens: int | None, rows: int, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `batch_tokens` a step has so few rows that there are 100 steps, at least one row and at most 16384."""
    made: list[tuple[Any, int]] = []

    def note(self: Any, num_rows: int) -> Any:
        made.append((arguments_of(self, num_rows), num_rows))
        raise KeyboardInterrupt

    arguments_of = recipe._Run._arguments
    monkeypatch.setattr(recipe._Run, "_arguments", note)
    lines: list[str] = []
    options = SMALL | {"batch_tokens": batch_tokens, "rows_at_once": 256}
    with pytest.raises(KeyboardInterrupt):
        train(TrainOptions(output=str(tmp_path), data=str(data), epochs=epochs, **options), report=lines.append)
    ((arguments, num_rows),) = made
    found = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    if batch_tokens is None:
        rows = min(16384 // 64, max(1, int(epochs * num_rows / 100)))
        assert any("--batch-tokens" in line for line in lines) == (rows < 256)
    assert found == rows


def test_questions_are_learned_on_demand(tmp_path: Path, written: list[Text]) -> None:
    """Of texts without any answer, nothing is learned, or everything."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(Text(text.input_ids, []).to_json() + "\n" for text in written))
    options = {"data": str(path), "epochs": 0.1, **SMALL}
    with pytest.raises(ValueError, match="something to predict is 0;"):
        train(TrainOptions(output=str(tmp_path / "answers"), **options))
    assert train(TrainOptions(output=str(tmp_path / "all"), loss_on_everything=True, **options)).finished


def test_what_fails_before_there_are_texts_may_be_corrected(tmp_path: Path, data: Path) -> None:
    """The folder belongs to the run that has its first texts."""
    options = {"output": str(tmp_path), "epochs": 0.5, **SMALL}
    for wrong, error, message in (
        ({"data": "missing.jsonl"}, FileNotFoundError, "`data`='missing.jsonl'"),
        ({"prompts": "missing.jsonl"}, FileNotFoundError, "`prompts`='missing.jsonl': there is no such file"),
        ({"data": str(data), "target": str(tmp_path / "none")}, OSError, "There is no folder"),
        ({"data": str(data), "max_length": 4096}, ValueError, "2048 positions"),
        ({"data": str(data), "aux_layer_ids": (1, 3, 60)}, ValueError, "does not have"),
    ):
        with pytest.raises(error, match=message):
            train(TrainOptions(**options | wrong))
    assert not train(TrainOptions(**options, data=str(data), max_seconds=1e-3)).finished
    with pytest.raises(ValueError, match="`data` was "):
        train(TrainOptions(**options, data="other.jsonl"))


def test_a_run_that_has_begun_to_write_keeps_its_options(tmp_path: Path) -> None:
    options = {"output": str(tmp_path), "max_seconds": 1e-6, **SMALL}
    train(TrainOptions(**options, self_generate=24))
    with pytest.raises(ValueError, match="`self_generate` was 24 and is 25"):
        train(TrainOptions(**options, self_generate=25))


def long_texts(path: Path) -> Path:
    """Six texts of 160 tokens, each of one token throughout."""
    texts = [Text([10 + number] * 160, [(0, 160)]) for number in range(6)]
    path.write_text("".join(text.to_json() + "\n" for text in texts))
    return path


def test_no_piece_of_a_held_out_text_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[set[int]] = []
    original = recipe.Rows

    def noting(texts: list[Text], *arguments: Any) -> Any:
        sides.append({text.input_ids[0] for text in texts})
        return original(texts, *arguments)

    monkeypatch.setattr(recipe, "Rows", noting)
    data = long_texts(tmp_path / "texts.jsonl")
    options = SMALL | {"eval_texts": 2}
    train(TrainOptions(output=str(tmp_path / "out"), data=str(data), max_seconds=1e-3, **options))
    trained_on, held_out = sides
    assert (len(trained_on), len(held_out)) == (5, 1) and not trained_on & held_out


def test_runs_of_earlier_versions_go_on_if_no_text_was_cut(tmp_path: Path, data: Path) -> None:
    """Their checkpoints have empty marks. The split of texts that fit is the same; that of longer ones is not."""
    for source, is_refused in ((data, False), (long_texts(tmp_path / "long.jsonl"), True)):
        output = tmp_path / source.stem
        options = {"output": str(output), "data": str(source), "epochs": 3.0, **SMALL}
        train(TrainOptions(max_seconds=1e-3, **options))
        checkpoint = newest_complete(output)
        assert checkpoint is not None
        (checkpoint / "complete").write_text("")
        if not is_refused:
            assert train(TrainOptions(**options)).finished
            continue
        with pytest.raises(ValueError, match="run of an earlier version"):
            train(TrainOptions(**options))


def test_one_text_is_enough_if_none_is_held_out(tmp_path: Path) -> None:
    data = tmp_path / "book.jsonl"
    data.write_text(Text(list(range(5, 245)), [(0, 240)]).to_json() + "\n")
    options = {"output": str(tmp_path / "out"), "data": str(data), "epochs": 1.0, **SMALL}
    with pytest.raises(ValueError, match="something to predict is 1;.*With `eval_texts=0`"):
        train(TrainOptions(**options))
    assert train(TrainOptions(**options | {"eval_texts": 0})).finished


def test_texts_longer_than_the_target_can_read_are_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="`max_length`=4096: the target has 2048 positions"):
        train(TrainOptions(output=str(tmp_path), data=str(data), **SMALL | {"max_length": 4096}))


def test_writing_continues_too(tmp_path: Path) -> None:
    """No time at all: nothing is written. Then all is; a third run only reads."""
    options = {"output": str(tmp_path), "self_generate": 24, "epochs": 0.5, "generation_batch_size": 8, **SMALL}
    first = train(TrainOptions(max_seconds=1e-6, **options))
    assert not first.finished and first.total_steps == 0
    second = train(TrainOptions(**options))
    assert second.finished
    lines = (tmp_path / "data" / "written-00000.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["job"] for line in lines) == list(range(24))


def test_what_was_written_twice_counts_once(tmp_path: Path) -> None:
    """As greedy answers to the same question are; the order is that of the conversations, whoever wrote them."""
    options = TrainOptions(output=str(tmp_path), self_generate=5, **SMALL)
    texts = [Text([1, 9, 9, 4], [(1, 4)], 0), Text([1, 8, 7, 5], [(1, 4)], 1), Text([1, 9, 9, 4], [(1, 4)], 3)]
    for rank, written in enumerate(([texts[2], texts[1]], [texts[0]])):
        (tmp_path / f"written-{rank:05d}.jsonl").write_text("".join(text.to_json() + "\n" for text in written))
    (tmp_path / "complete").touch()
    found = Corpus(options, tmp_path, trained_target(), chat_tokenizer()).texts()
    assert found is not None
    assert [[list(piece.input_ids) for piece in text] for text in found] == [[[1, 9, 9, 4]], [[1, 8, 7, 5]]]


def test_what_the_data_repeats_counts_once(tmp_path: Path, data: Path) -> None:
    """Else a text that is held out may be trained on."""
    twice = tmp_path / "twice.jsonl"
    twice.write_text(data.read_text() * 2)
    counts = []
    for path in (data, twice):
        options = TrainOptions(output=str(tmp_path), data=str(path), **SMALL)
        texts = Corpus(options, tmp_path / path.stem, trained_target(), chat_tokenizer()).texts()
        counts.append(len(texts or ()))
    assert counts[0] == counts[1] > 8


@pytest.mark.parametrize("rows_at_once, expected", [(3, (3, 3)), (5, (4, 2)), (99, (8, 1))])
def test_a_step_has_its_rows(
    rows_at_once: int, expected: tuple[int, int], tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 of 64 tokens, or few more, however many fit at once."""
    made: list[Any] = []
    original = recipe._Run._arguments

    def noting(self: Any, num_rows: int) -> Any:
        made.append(original(self, num_rows))
        return made[-1]

    monkeypatch.setattr(recipe._Run, "_arguments", noting)
    options = SMALL | {"rows_at_once": rows_at_once}
    train(TrainOptions(output=str(tmp_path), kind="eagle3", data=str(data), epochs=0.2, **options))
    (arguments,) = made
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == expected


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("draft", marks=pytest.mark.slow)])
def test_a_target_in_half_precision_on_the_cpu(kind: str, tmp_path: Path, data: Path) -> None:
    options = {"num_layers": 1} if kind == "draft" else {}
    result = train(
        TrainOptions(output=str(tmp_path), kind=kind, data=str(data), dtype="bfloat16", epochs=0.3, **SMALL, **options)
    )
    assert result.finished


def test_writing_for_so_long(tmp_path: Path) -> None:
    """What had begun is finished, and that is the data: the next run writes no more."""
    options = {"output": str(tmp_path), "self_generate": 10**9, "write_seconds": 0.5, "epochs": 0.1, **SMALL}
    first = train(TrainOptions(max_seconds=30.0, generation_batch_size=8, **options))
    written = (tmp_path / "data" / "written-00000.jsonl").read_text()
    assert first.total_steps and len(written.splitlines()) >= 8
    assert train(TrainOptions(**options)).finished
    assert (tmp_path / "data" / "written-00000.jsonl").read_text() == written


def test_a_head_that_shares_the_lm_head(tmp_path: Path, data: Path) -> None:
    """It is not stored, and serves in generate."""
    options = SMALL | {"draft_vocab_size": 100, "shares_lm_head": True, "intermediate_size": 48}
    assert train(TrainOptions(output=str(tmp_path), data=str(data), **options)).finished
    head = EagleHead.from_pretrained(tmp_path)
    assert head.lm_head is None and len(head.target_ids) == 100
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys() and "d2t" in weights.keys()
    target, prompt = trained_target(), torch.tensor([[5, 8, 11, 9]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=head), plain)


@pytest.mark.parametrize(
    "kind, hidden_size",
    [
        ("draft", 16),
        ("eagle3", None),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in ("draft", "eagle1")),
    ],
)
def test_a_chat_target_with_tied_embeddings(tmp_path: Path, kind: str, hidden_size: int | None) -> None:
    """It writes both sides; the run goes through three checkpoints; the head learns answers alone."""
    tokenizer = chat_tokenizer()
    target = tiny_model(tie_word_embeddings=True, dtype=torch.float32, sharpness=1.5, num_hidden_layers=3)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    changes = {"target": str(tmp_path / "target"), "kind": kind, "hidden_size": hidden_size, "turns": 2}
    options = SMALL | changes | {"output": str(tmp_path / "out"), "self_generate": 30, "epochs": 4}
    train(TrainOptions(**options, max_seconds=1e-6))  # no time to write
    Corpus(TrainOptions(**options), tmp_path / "out" / "data", target, tokenizer).texts()
    stops = [train(TrainOptions(**options, max_seconds=1e-3)).step for _ in range(3)]
    assert stops == [1, 2, 3]
    assert train(TrainOptions(**options)).finished
    output = tmp_path / "out"
    draft = AutoModelForCausalLM.from_pretrained(output) if kind == "draft" else EagleHead.from_pretrained(output)
    prompt = torch.tensor([[1, 4, 9, 10]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft, tree="[(0,), (0, 0)]")
    assert torch.equal(output, plain)


def test_prompts_are_answered(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"t1 t{5 + i}"}) + "\n" for i in range(12)))
    result = train(
        TrainOptions(output=str(tmp_path / "out"), prompts=str(tmp_path / "prompts.jsonl"), epochs=0.5, **SMALL)
    )
    assert result.finished
    lines = (tmp_path / "out" / "data" / "written-00000.jsonl").read_text().splitlines()
    texts = {record["job"]: record["input_ids"] for record in map(json.loads, lines)}
    assert all(texts[index][:2] == [1, 5 + index] for index in range(12))


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path, data: Path) -> None:
    options = {"output": str(tmp_path), "data": str(data), "epochs": 0.5, **SMALL}
    train(TrainOptions(max_seconds=1e-3, **options))
    with pytest.raises(ValueError, match="`epochs` was 0.5 and is 1.0, `seed` was 0 and is 3"):
        train(TrainOptions(**options | {"epochs": 1.0, "seed": 3}))


def test_folders_of_earlier_versions(tmp_path: Path) -> None:
    """They do not name the options of later ones: those had their defaults."""
    options = TrainOptions(output=str(tmp_path), self_generate=9)
    check_identity(tmp_path, options.identity(), TrainOptions.default_identity())
    assert not list(tmp_path.iterdir())
    later = ("subjects", "openings_share", "greedy_share", "cool_share")
    early = {name: value for name, value in options.identity().items() if name not in later}
    write_identity(tmp_path, early)
    check_identity(tmp_path, options.identity(), TrainOptions.default_identity())
    other = replace(options, openings_share=0.8, greedy_share=0.5)
    with pytest.raises(ValueError, match="`openings_share` was 0.5 and is 0.8, `greedy_share` was 0.3 and is 0.5"):
        check_identity(tmp_path, other.identity(), TrainOptions.default_identity())


def test_checkpoints_that_were_not_written_to_their_end_are_passed_over(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-new").mkdir()
    mark_complete(tmp_path / "checkpoint-5")
    mark_complete(tmp_path / "checkpoint-10")
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-20").exists() and (tmp_path / "checkpoint-new").exists()
    assert newest_complete(tmp_path / "none") is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "Give one of"),
        ({"data": "x", "self_generate": 5}, "`data` and `self_generate`"),
        ({"self_generate": 0}, "`self_generate`=0"),
        ({"self_generate": 5, "kind": "eagle2"}, "`kind`='eagle2'"),
        ({"self_generate": 5, "hidden_size": 32}, "as wide as its target"),
        ({"self_generate": 5, "kind": "draft", "draft_vocab_size": 32}, "alone"),
        ({"self_generate": 5, "max_length": 8}, "max_length"),
        ({"self_generate": 5, "learning_rate": -1.0}, "learning_rate"),
        ({"self_generate": 5, "eval_texts": -1}, "eval_texts"),
        ({"data": "x", "openings": "y"}, "openings.*for `self_generate`"),
        ({"self_generate": 5, "subjects": "y"}, "`subjects`='y' fills places in `openings`"),
        ({"self_generate": 5, "openings_share": 1.5}, "`openings_share`=1.5 is a share"),
        ({"self_generate": 5, "cool_share": -0.1}, "`cool_share`=-0.1 is a share"),
        ({"self_generate": 5, "greedy_share": 0.9}, "more than all answers"),
        ({"self_generate": 5, "dtype": "int8"}, "`dtype`='int8' is not one of 'float32', 'bfloat16', 'float16'"),
        ({"self_generate": 5, "kind": "eagle1", "decay": 0.7}, "`decay` is for `kind='eagle3'` alone, not for"),
        ({"self_generate": 5, "kind": "draft", "recompute": True}, "`recompute` is for `kind='eagle3'` alone"),
        ({"data": "x", "greedy_share": 0.4}, "`greedy_share`=0.4 is for `prompts` and `self_generate` alone"),
        ({"data": "x", "cool_share": 0.1}, "`cool_share`"),
        ({"data": "x", "write_seconds": 9.0}, "`write_seconds`"),
        ({"data": "x", "generation_batch_size": 8}, "`generation_batch_size`"),
        ({"data": "x", "turns": 2}, "`turns`=2 is for `self_generate` alone, not for `data`"),
        ({"prompts": "x", "turns": 2}, "`turns`=2 is for `self_generate` alone, not for `prompts`"),
        ({"prompts": "x", "openings_share": 0.4}, "`openings_share`"),
        ({"self_generate": 5, "data_limit": 9}, "`data_limit`=9 is for `data` and `prompts` alone"),
        ({"self_generate": 5, "data_split": "test"}, "`data_split`"),
        ({"self_generate": 5, "strict_data": True}, "`strict_data`=True is for `data` and `prompts` alone"),
    ],
)
def test_options_that_make_no_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(output="x", **fields)


# --------------------------------------------------------------------------------------------------- the command line


def arguments(output: Path, data: Path, *more: str) -> list[str]:
    values = ["train", "--output", str(output), "--data", str(data), "--target", str(TINY_TARGET), "--no-progress"]
    values += "--max-length 64 --batch-tokens 512 --rows-at-once 8 --eval-texts 8 --unroll-steps 3 --cpu".split()
    return [*values, "--logging-steps", "1", *more]


def test_the_command(tmp_path: Path, data: Path) -> None:
    command = arguments(tmp_path / "out", data, "--epochs", "0.5", "--aux-layer-ids", "1,3,6")
    result = CliRunner().invoke(build_app(), command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "simulated acceptance length" in result.output
    assert "EagleHead.from_pretrained" in result.output
    assert EagleHead.from_pretrained(tmp_path / "out").config.aux_layer_ids == [1, 3, 6]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--kind", "eagle9"], "eagle9"),
        (["--aux-layer-ids", "1,x"], "give numbers"),
        (["--aux-layer-ids", "1,3,60"], "does not have"),
        (["--self-generate", "5"], "Give one of"),
        (["--draft-vocab-size", "999"], "draft_vocab_size"),
        (["--dtype", "int8"], "dtype"),
        (["--target", "/no/such/folder"], "There is no folder '/no/such/folder'"),
    ],
)
def test_bad_options_are_explained(tmp_path: Path, data: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(build_app(), arguments(tmp_path / "out", data, *more), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_a_killed_run_continues_as_if_it_had_not_been(tmp_path: Path, data: Path) -> None:
    """SIGKILL in the middle, twice; checkpoints every half second. Losses and weights are those of one run."""
    more = ["--epochs", "12", "--save-minutes", "0.008", "--eval-steps", "1000"]

    def start(name: str) -> subprocess.Popen:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "hf_specdec.cli", *arguments(tmp_path / name, data, *more)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("whole").wait(timeout=300) == 0
    seen = []
    for least in (12, 30):
        process = start("killed")
        until = time.monotonic() + 200
        while time.monotonic() < until and process.poll() is None:
            path = newest_complete(tmp_path / "killed", clean=False)
            if path is not None and int(path.name.split("-")[1]) >= least:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.append(int(newest_complete(tmp_path / "killed", clean=False).name.split("-")[1]))
    assert seen[1] > seen[0] >= 12
    assert start("killed").wait(timeout=300) == 0
    whole, killed = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed"))
    assert killed["finished"] and killed["step"] == whole["step"]
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")
    weights = [EagleHead.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """
    `accelerate launch`, both on the CPU with gloo: they write, train on halves of a batch, stop at a limit, continue.
    (accelerate's own `--cpu` starts one process where there is no MPI; ours keeps its `--multi_gpu` on the CPU.)
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(port)]
    command += ["--module", "hf_specdec.cli", "train", "--output", str(tmp_path / "out"), "--self-generate", "40"]
    command += ["--target", str(TINY_TARGET), "--no-progress", "--cpu", "--max-length", "64", "--batch-tokens", "512"]
    command += ["--eval-texts", "9", "--unroll-steps", "3", "--epochs", "60", "--logging-steps", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    steps, path = [], tmp_path / "out" / "result.json"
    for _ in range(20):
        process = subprocess.run(
            [*command, "--max-seconds", "6"], env=environment, capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0, process.stdout + process.stderr
        result = json.loads(path.read_text()) if path.is_file() else {"step": 0, "finished": False}
        steps.append(result["step"])
        if result["finished"]:
            break
    assert result["finished"] and len(steps) > 1 and steps == sorted(steps)
    assert result["after"]["eval_acceptance_length"] > result["before"]["eval_acceptance_length"] + 0.1
    files = sorted((tmp_path / "out" / "data").glob("written-*.jsonl"))
    jobs = [[json.loads(line)["job"] for line in file.read_text().splitlines()] for file in files]
    assert len(jobs) == 2 and sorted(jobs[0] + jobs[1]) == list(range(40)) and min(map(len, jobs)) >= 10
    assert sorted(losses_of(tmp_path / "out")) == list(range(1, result["total_steps"] + 1))
