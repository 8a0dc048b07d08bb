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

_MARK = "complete"
_LOG = "log.jsonl"
_STEPS_BETWEEN_AGREEMENTS = 4  # each waits for the device


def mark_complete(checkpoint: Path) -> None:
    """Says that everything is in the checkpoint; a kill while it is written leaves none of these."""
    (checkpoint / _MARK).touch()


def newest_complete(output: Path, clean: bool = True) -> Path | None:
    """
    The newest checkpoint that was written to its end, or None.

    Args:
        clean (`bool`, *optional*, defaults to `True`): delete those that were not.
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
    Saves every so many seconds, and stops with a checkpoint at a deadline. With several processes the first decides.

    Args:
        save_seconds (`float`): between checkpoints.
        deadline (`float`, *optional*): in `time.monotonic()`.
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
    """Appends everything that is logged to `log.jsonl`, one line each."""

    def __init__(self, output: Path):
        self.path = output / _LOG

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if not state.is_world_process_zero or not self.path.is_file():
            return
        # Steps after the checkpoint that a killed run had logged come once more.
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
    Keeps what the held-out texts gave before the first step. That evaluation must be part of the training
    (`eval_on_start`): one before it would hand the model to accelerate without its wrapper for several processes,
    which training would then leave off, and every process would train on its own.

    Args:
        path (`Path`): where it is kept.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, float]:
        """It; empty if there is none."""
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
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return float("inf")


def check_identity(output: Path, identity: dict[str, Any], defaults: dict[str, Any]) -> None:
    """
    Records what a run is, or compares it with what the folder holds. A run that did not know an option yet had its
    default.

    Raises:
        ValueError: if the folder is that of another run, naming what differs.
    """
    path = output / "training_options.json"
    if not path.is_file():
        path.write_text(json.dumps(identity, indent=2) + "\n")
        return
    before = defaults | json.loads(path.read_text())
    changed = [name for name in identity if before[name] != identity[name]]
    if changed:
        raise ValueError(
            f"`output`={str(output)!r} holds a run with other options: "
            + ", ".join(f"`{name}` was {before[name]!r} and is {identity[name]!r}" for name in changed)
            + ". Use the same to continue it, or another folder."
        )
