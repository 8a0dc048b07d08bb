"""transformers' `Trainer`, with a frozen target beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments

from .checkpoints import mark_complete
from .metrics import summarise
from .optimizers import MuonAndAdamW
from .reading import TargetReader


class DraftArguments(TrainingArguments):
    """`TrainingArguments` whose CPU device has no index: transformers 5.17 cannot load optimizer state to "cpu:0"."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


class DraftTrainer(Trainer):
    """
    Trains an objective, such as `TttObjective` or `BlockObjective`, on the target's outputs for every batch.

    The target is not part of the model: it has no gradients and no optimizer state, is not saved in checkpoints, and
    is not wrapped for several processes. A checkpoint holds the head or draft model as `save_pretrained` writes it,
    and the state that `Trainer` needs to continue.

    Args:
        reader (`TargetReader`): reader of the frozen target, on this process's device.
        with_muon (`bool`, *optional*, defaults to `False`): whether matrices of layers are trained by Muon.
        kwargs: arguments of `Trainer`, except `compute_metrics`.
    """

    loss_is_scaled_for_ga = False  # the loss is a mean over a batch

    def __init__(self, *, reader: TargetReader, with_muon: bool = False, **kwargs: Any):
        super().__init__(compute_metrics=_metrics, **kwargs)
        self.reader, self.with_muon = reader, with_muon
        self.model_accepts_loss_kwargs = False
        self._sums: torch.Tensor | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, made once: AdamW, or `MuonAndAdamW`."""
        if not self.with_muon:
            return super().create_optimizer()
        if getattr(self, "optimizer", None) is None:
            args = self.args
            betas = args.adam_beta1, args.adam_beta2
            self.optimizer = MuonAndAdamW(self.model, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The objective's loss; its counts are summed on the device until the next log record."""
        output = model(outputs=self.reader(inputs["input_ids"], inputs["position_ids"]), **inputs)
        if model.training:
            sums = output["counts"].sum(dim=0)
            self._sums = sums if self._sums is None else self._sums + sums
        return (output["loss"], output) if return_outputs else output["loss"]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The loss, the counts `[rows, 4, depths]` as predictions, and `counts[:, 0]` in place of labels."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), output["counts"], output["counts"][:, 0]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds top-1 and loss per depth and the simulated acceptance length since the last log record."""
        if "loss" in logs and self._sums is not None:
            logs = logs | summarise(self.accelerator.reduce(self._sums, reduction="sum"))
            self._sums = None
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            self.accelerator.unwrap_model(self.model).model.save_pretrained(output_dir or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        trained = self.accelerator.unwrap_model(model or self.model).model
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(Path(resume_from_checkpoint).glob("*.safetensors")):
            weights |= load_file(file)
        result = trained.load_state_dict(weights, strict=False)
        # A tied lm_head is saved only as the embeddings, so its absence is no error.
        tied = (trained._tied_weights_keys or ()) if getattr(trained.config, "tie_word_embeddings", False) else ()
        missing = [name for name in result.missing_keys if name not in tied]
        if missing or result.unexpected_keys:
            raise ValueError(
                f"{resume_from_checkpoint} is of another model: missing {missing}, not known "
                f"{result.unexpected_keys}. Train into another folder."
            )


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    return summarise(torch.as_tensor(prediction.predictions, device="cpu").sum(dim=0))
