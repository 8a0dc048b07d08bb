"""Small draft language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...models.structure import num_logits_of
from ..data import Text
from ..distill import DistillObjective, new_draft_model
from .base import HIGHEST_RATE, Kind, check_size


class Draft(Kind):
    """A small language model that is distilled from the target."""

    method = "distillation of the target's logits"
    rate_times_width = 0.5

    def check(self) -> None:
        """A draft model is made of any target."""

    def new(self, texts: list[Text]) -> tuple[Any, None]:
        options, target = self.options, self.target
        model = new_draft_model(
            target,
            num_layers=options.num_layers or 2,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
        )
        return model.to(target.device), None

    def start(self, name: str) -> tuple[Any, None]:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        check_size("vocabulary", num_logits_of(model), num_logits_of(self.target), name)
        return model.to(self.target.device), None

    def objective(self, model: Any, packed: bool) -> nn.Module:
        return DistillObjective(model, self.options.unroll_steps, packed=packed)

    def boundaries(self, model: Any) -> None:
        return None

    def learning_rate(self, model: Any) -> float:
        return min(self.rate_times_width / model.get_input_embeddings().weight.shape[1], HIGHEST_RATE)
