"""Runs that stop and go on: from where, with which options, and what they find in their folder."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.chat import chat_tokenizer
from support.goldens import trained_target
from support.training import RUN, losses_of

from hf_specdec.eagle import EagleHead
from hf_specdec.training import TrainOptions, train
from hf_specdec.training.checkpoints import check_identity, mark_complete, newest_complete, write_identity
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.data import Text


@pytest.mark.slow
def test_a_run_that_stops_in_time_continues_as_if_it_had_not(tmp_path: Path, data: Path) -> None:
    """The limit is over at once: every run takes one step. Losses and weights are those of one run."""
    options = {"data": str(data), "epochs": 1.0, "eval_steps": 100, **RUN}
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
    options = TrainOptions(output=str(tmp_path), data=str(data), epochs=1.0, eval_steps=100, **RUN)
    lines: list[str] = []
    stopped = train(replace(options, max_seconds=1e-3), report=lines.append)
    assert stopped.step == 1 and not any("continues" in line for line in lines)
    finished = train(options, report=lines.append)
    (line,) = (line for line in lines if "continues" in line)
    assert line == f"The run continues after step 1 of {finished.total_steps}, from {tmp_path}/checkpoint-1."
    train(options, report=lines.append)
    assert lines[-1] == f"{tmp_path} holds a finished run: nothing is left to do."


def test_writing_that_continues_says_from_where(tmp_path: Path) -> None:
    options = TrainOptions(output=str(tmp_path), self_generate=3, generation_batch_size=2, **RUN)
    lines: list[str] = []
    text = Text([1, 9, 9, 4], [(1, 4)], 1)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "written-00000.jsonl").write_text(text.to_json() + "\n")
    Corpus(options, tmp_path, trained_target(), chat_tokenizer(), report=lines.append).texts(time.monotonic())
    assert lines == [f"Writing continues: 1 of 3 texts are in {tmp_path}."]


def test_what_fails_before_there_are_texts_may_be_corrected(tmp_path: Path, data: Path) -> None:
    """The folder belongs to the run that has its first texts."""
    options = {"output": str(tmp_path), "epochs": 0.5, **RUN}
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
    options = {"output": str(tmp_path), "max_seconds": 1e-6, **RUN}
    train(TrainOptions(**options, self_generate=24))
    with pytest.raises(ValueError, match="`self_generate` was 24 and is 25"):
        train(TrainOptions(**options, self_generate=25))


@pytest.mark.slow
def test_writing_continues_too(tmp_path: Path) -> None:
    """No time at all: nothing is written. Then all is; a third run only reads."""
    options = {"output": str(tmp_path), "self_generate": 24, "epochs": 0.5, "generation_batch_size": 8, **RUN}
    first = train(TrainOptions(max_seconds=1e-6, **options))
    assert not first.finished and first.total_steps == 0
    second = train(TrainOptions(**options))
    assert second.finished
    lines = (tmp_path / "data" / "written-00000.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["job"] for line in lines) == list(range(24))


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path, data: Path) -> None:
    options = {"output": str(tmp_path), "data": str(data), "epochs": 0.5, **RUN}
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
