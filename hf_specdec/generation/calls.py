"""Entry point of a speculative `generate` call, behind the hook."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import SpeculativeConfig
from ..drafters import as_drafter
from ..graphs import obstacle_to_graphs
from ..models.asked_once import asking_once
from ..models.structure import execution_device
from ..plan import SpeculationPlan
from ..random_generators import draws_undone_on_error
from .arguments import CallArguments
from .loop import speculative_decoding
from .model_refusals import check_rows
from .recording import SpeculativeGenerateOutput
from .refusals import check_encoder, check_inputs, check_padding
from .state_refusals import check_states
from .static_batch import StaticBatch


def decode(
    model: PreTrainedModel, input_ids: torch.Tensor, assistant_model: Any, *, model_kwargs: dict[str, Any], **call: Any
) -> torch.Tensor | SpeculativeGenerateOutput:
    """
    Decodes a `generate` call with the draft that the user passed as `assistant_model`; `call` holds the other
    arguments that `generate` passes to a decoding method.

    Raises:
        ValueError, TypeError: for inputs, drafts and options that do not fit together, before any forward.
    """
    with asking_once():
        arguments = _checked(model, input_ids, assistant_model, model_kwargs, call)
        batch = StaticBatch(arguments)
        obstacle = batch.obstacle()
    with draws_undone_on_error(*map(execution_device, (model, *arguments.drafter.models))):
        outputs = batch.run() if obstacle is None else None
        if outputs is not None:
            return outputs
        if obstacle is not None and arguments.plan.compile:
            warnings.warn(
                f"`compile=True` has no effect: the steps of this call do not run whole on a CUDA device, since "
                f"{obstacle}.",
                stacklevel=2,
            )
        if batch.num_streamed:
            arguments = replace(arguments, streamer=_RestOfStream(arguments.streamer, batch.num_streamed))
        return speculative_decoding(arguments)


def _checked(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    assistant_model: Any,
    model_kwargs: dict[str, Any],
    call: dict[str, Any],
) -> CallArguments:
    """The arguments of a call, see `decode`, which can be served."""
    generation_config = call["generation_config"]
    check_inputs(model, generation_config, input_ids, model_kwargs)
    drafter = as_drafter(assistant_model)
    check_rows(model, drafter, len(input_ids))
    config = SpeculativeConfig.from_generation_config(generation_config)
    plan = SpeculationPlan.of_call(generation_config, config, drafter, model)
    if plan.cuda_graphs is True:
        for part in (model, *drafter.models):
            obstacle_to_graphs(part, wanted=True)
    arguments = CallArguments(model, input_ids, drafter, plan, model_kwargs=model_kwargs, **call)
    check_states(arguments)
    check_encoder(arguments)
    check_padding(arguments)
    return arguments


class _RestOfStream:
    """A streamer that has had the first columns of a call, which begins again."""

    def __init__(self, streamer: Any, num_had: int):
        self._streamer, self._num_had = streamer, num_had

    def put(self, tokens: torch.Tensor) -> None:
        """Passes a column on, unless it is one of the first."""
        if self._num_had:
            self._num_had -= 1
        else:
            self._streamer.put(tokens)

    def end(self) -> None:
        """Ends the stream."""
        self._streamer.end()
