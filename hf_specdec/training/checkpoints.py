"""Checkpoints that survive a kill, and time limits."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging


logger = logging.get_logger(__name__)

_MARK, _HELD_OUT = "complete", "whole texts held out\n"
_LOG = "log.jsonl"
_OPTIONS = "training_options.json"
_STEPS_BETWEEN_AGREEMENTS = 4  # each broadcast waits for the device


def mark_complete(checkpoint: Path) -> None:
    """Marks a checkpoint as completely written; a process killed while writing leaves no mark."""
    (checkpoint / _MARK).write_text(_HELD_OUT)


def holds_out_whole_texts(checkpoint: Path) -> bool:
    """Whether whole texts were held out from the run of a checkpoint; earlier versions held out pieces of texts."""
    return (checkpoint / _MARK).read_text() == _HELD_OUT


def newest_complete(output: Path, clean: bool = True) -> Path | None:
    """
    The newest checkpoint that was completely written, or None.

    Args:
        output (`Path`): folder of the run.
        clean (`bool`, *optional*, defaults to `True`): delete incomplete checkpoints.
    """
    found = []
    for folder in output.glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        if not number.isdigit():
            continue
        if (folder / _MARK).is_file():
            found.append((int(number), folder))
        elif clean:
            logger.warning(f"{folder.name} was not written to its end: deleted.")
            shutil.rmtree(folder)
    return max(found)[1] if found else None


class TimeLimits(TrainerCallback):
    """
    Saves at a time interval, and stops with a checkpoint at a deadline. With several processes, rank 0 decides.

    Args:
        save_seconds (`float`): seconds between checkpoints.
        deadline (`float`, *optional*): time of `time.monotonic()` at which training stops.
    """

    def __init__(self, save_seconds: float, deadline: float | None):
        self.save_seconds, self.deadline = save_seconds, deadline
        self._saved_at = time.monotonic()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._saved_at = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        stop = self.deadline is not None and now >= self.deadline
        save = stop or now - self._saved_at >= self.save_seconds
        if args.world_size > 1:
            if state.global_step % _STEPS_BETWEEN_AGREEMENTS:
                return
            verdict = torch.tensor([int(save), int(stop)], device=args.device)
            torch.distributed.broadcast(verdict, src=0)
            save, stop = map(bool, verdict.tolist())
        if save:
            control.should_save = True
        if stop:
            control.should_training_stop = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self._saved_at = time.monotonic()


class LogFile(TrainerCallback):
    """Appends every log record to `log.jsonl`, one line each."""

    def __init__(self, output: Path):
        self.path = output / _LOG

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if not state.is_world_process_zero or not self.path.is_file():
            return
        # A killed run may have logged steps after its last checkpoint; they are run and logged again.
        kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= state.global_step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any
    ) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step} | logs) + "\n")


class FirstEvaluation(TrainerCallback):
    """
    Stores the metrics of the held-out texts before the first step.

    This evaluation must be part of the training (`eval_on_start`): an earlier one would give accelerate the model
    without its wrapper for several processes, training would then omit the wrapper, and every process would train on
    its own.

    Args:
        path (`Path`): file of the metrics.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, float]:
        """The stored metrics by name; empty if there are none."""
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step == 0 and args.should_save and not self.path.is_file():
            self.path.write_text(json.dumps(metrics, indent=2) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # an incomplete line of a killed run
        return float("inf")


def write_identity(output: Path, identity: dict[str, Any]) -> None:
    """Records the options of a run (see `TrainOptions.identity`) in `training_options.json`, unless it is there."""
    path = output / _OPTIONS
    if not path.is_file():
        path.write_text(json.dumps(identity, indent=2) + "\n")


def check_identity(output: Path, identity: dict[str, Any], defaults: dict[str, Any]) -> None:
    """
    Compares the options of a run with those that `write_identity` recorded in its folder, if there are any.

    Args:
        output (`Path`): folder of the run.
        identity (`dict[str, Any]`): see `TrainOptions.identity`.
        defaults (`dict[str, Any]`): values of options that an older version did not record.

    Raises:
        ValueError: if the folder holds another run, naming the options that differ.
    """
    path = output / _OPTIONS
    if not path.is_file():
        return
    before = defaults | json.loads(path.read_text())
    changed = [name for name in identity if before[name] != identity[name]]
    if changed:
        raise ValueError(
            f"`output`={str(output)!r} holds a run with other options: "
            + ", ".join(f"`{name}` was {before[name]!r} and is {identity[name]!r}" for name in changed)
            + ". Use the same to continue it, or another folder."
        )
