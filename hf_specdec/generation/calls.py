"""Entry point of a speculative `generate` call, behind the hook."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SpeculationPlan, SpeculativeConfig
from ..drafters import as_drafter
from ..graphs import obstacle_to_graphs
from .loop import speculative_decoding
from .recording import SpeculativeGenerateOutput
from .refusals import check_inputs


def decode(
    model: PreTrainedModel, input_ids: torch.Tensor, assistant_model: Any, *, model_kwargs: dict[str, Any], **call: Any
) -> torch.Tensor | SpeculativeGenerateOutput:
    """
    Decodes a `generate` call with the draft that the user passed as `assistant_model`; `call` holds the other
    arguments that `generate` passes to a decoding method.

    Raises:
        ValueError, TypeError: for inputs, drafts and options that do not fit together, before any forward.
    """
    generation_config = call["generation_config"]
    check_inputs(model, generation_config, input_ids, model_kwargs)
    drafter = as_drafter(assistant_model)
    config = SpeculativeConfig.from_generation_config(generation_config)
    plan = SpeculationPlan.of_call(generation_config, config, drafter, model)
    if plan.cuda_graphs is True:
        for part in (model, *drafter.models):
            obstacle_to_graphs(part, wanted=True)
    return speculative_decoding(model, input_ids, drafter, plan, model_kwargs=model_kwargs, **call)
