"""EAGLE-3 and EAGLE-1 heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...eagle import EagleConfig, EagleHead
from ...models.structure import num_logits_of
from ..data import Text
from ..eagle1 import Eagle1Objective
from ..heads import new_head, new_head_config
from ..ttt import TttObjective
from .base import Kind


class Eagle(Kind):
    """A head of either version."""

    version: int

    def check(self) -> None:
        self._config()

    def new(self, texts: list[Text]) -> tuple[EagleHead, torch.Tensor | None]:
        token_ids = self.vocabulary(texts, self.draft_vocab_size)
        config = self._config(None if token_ids is None else len(token_ids))
        return new_head(self.target, config, token_ids), token_ids

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that a new head can propose; 0: all."""
        return 0

    def _config(self, draft_vocab_size: int | None = None) -> EagleConfig:
        options = self.options
        return new_head_config(
            self.target,
            version=self.version,
            target_name=self.target_name,
            draft_vocab_size=draft_vocab_size,
            shares_lm_head=options.shares_lm_head,
            num_layers=options.num_layers or 1,
            intermediate_size=options.intermediate_size,
            aux_layer_ids=None if options.aux_layer_ids is None else list(options.aux_layer_ids),
            depth=options.unroll_steps,
        )

    def start(self, name: str) -> tuple[EagleHead, torch.Tensor | None]:
        head = EagleHead.from_pretrained(name, dtype=torch.float32)
        version = head.config.eagle_version
        if version != self.version:
            raise ValueError(
                f"`start_from`={name!r} is a head of EAGLE version {version}: use "
                f"`kind='eagle{3 if version == 3 else 1}'`."
            )
        self.check_head(name, head)
        if head.embed_tokens is not None:
            raise ValueError(
                f"`start_from`={name!r} has token embeddings of its own, which training does not reach. Use a head "
                "that reads the target's."
            )
        head.config.target_name = self.target_name  # it may name another target
        head = head.to(self.target.device)
        return head, head.target_ids


class Eagle3(Eagle):
    """An EAGLE-3 head."""

    method, version = "EAGLE-3", 3
    rate_times_width = 0.7

    @property
    def draft_vocab_size(self) -> int:
        if self.options.draft_vocab_size is not None:
            return self.options.draft_vocab_size
        vocab_size = num_logits_of(self.target)
        size = 32000 if vocab_size >= 65536 else 8192
        return 0 if size >= vocab_size else size

    def objective(self, model: Any, packed: bool) -> nn.Module:
        options = self.options
        return TttObjective(model, options.unroll_steps, options.decay, options.recompute)

    def recipe(self, objective: Any) -> dict[str, Any]:
        return {"unroll_steps": self.options.unroll_steps, "decay": self.options.decay}


class Eagle1(Eagle):
    """An EAGLE-1 head."""

    method, version = "EAGLE-1", 1
    rate_times_width = 0.12

    def objective(self, model: Any, packed: bool) -> nn.Module:
        return Eagle1Objective(model, self.options.unroll_steps)
