"""Progress of a training run: a bar, and a short line per log record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class ShortLines(ProgressCallback):
    """
    Trainer's progress bars, with a short line per log record; `log.jsonl` has all metrics.

    Args:
        report (callable): receives each line when there are no bars, and where a resumed run continues.
        bars (`bool`): whether to show progress bars.
    """

    def __init__(self, report: Callable[[str], None], bars: bool):
        super().__init__()
        self.report, self.bars = report, bars

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:
            where = f"{args.output_dir}/checkpoint-{state.global_step}"
            self.report(f"The run continues after step {state.global_step} of {state.max_steps}, from {where}.")
        if self.bars:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.bars:
            super().on_step_end(*args, **kwargs)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if self.bars:
            super().on_prediction_step(*args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.bars:
            super().on_train_end(*args, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs and (line := log_line(logs, state)):
            tqdm.write(line) if self.bars else self.report(line)


def log_line(logs: dict[str, float], state: TrainerState) -> str | None:
    """The line for a log record of loss and acceptance length, or None for any other record."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs or f"{prefix}acceptance_length" not in logs:
        return None
    shares = [value for name, value in logs.items() if name.startswith(f"{prefix}top1_")]
    rate = "" if prefix else f"  lr {logs.get('learning_rate', 0.0):.1e}"
    return (
        f"{'held out' if prefix else 'training'}  step {state.global_step}/{state.max_steps or '?'}  "
        f"loss {logs[f'{prefix}loss']:.3f}  top-1 {' '.join(f'{share:.2f}' for share in shares)}  "
        f"acceptance length {logs[f'{prefix}acceptance_length']:.2f}{rate}"
    )
