"""Models with fused layers, and without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from hf_specdec.fusing import fused_layers
from hf_specdec.fusing.modules import fused_forwards
from support.models import prompts


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(**prompts(2, 9)).logits


def fused_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode(), fused_layers(model):
        return model(**prompts(2, 9)).logits


def fused_kinds(model: nn.Module) -> dict[str, int]:
    with torch.no_grad():
        return dict(Counter(type(module).__name__ for module, _ in fused_forwards(model)))
