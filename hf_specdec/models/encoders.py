"""What decoders read of an encoder: a draft of the target's kind attends to the target's, or runs its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .structure import execution_device, forward_parameters


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """
    What the encoder of a target has read in a call, and what it has made of it.

    Args:
        target (`PreTrainedModel`): the target.
        inputs (`torch.Tensor`, *optional*): sound or tokens, one per row of the call, or one per several rows.
        outputs (`ModelOutput`): what the encoder has returned, its states `[batch, states, hidden]` first.
        mask (`torch.Tensor` of shape `[batch, inputs]`, *optional*): which inputs are no padding.
    """

    target: PreTrainedModel
    inputs: torch.Tensor | None
    outputs: Any
    mask: torch.Tensor | None = None

    @property
    def are_known(self) -> bool:
        """
        Whether there are inputs that another encoder can read: sound, or tokens. `generate` puts embeddings in the
        place of these if it is given `inputs_embeds`, and tokens of -100 if it is given `encoder_outputs`.
        """
        inputs = self.inputs
        if inputs is None:
            return False
        if inputs.is_floating_point():
            return self.target.main_input_name != "input_ids"
        return not bool((inputs == -100).all())


def runs_own_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether a draft has an encoder of its own, rather than the target's or none."""
    return draft.config.is_encoder_decoder and draft.get_encoder() is not target.get_encoder()


def attends_to_encoder_of(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether a draft attends to the states of the target's encoder: a decoder of its kind, as DistilWhisper's."""
    is_of_kind = target.config.is_encoder_decoder and draft.config.model_type == target.config.model_type
    return is_of_kind and not runs_own_encoder(draft, target)


@torch.no_grad()
def encoder_arguments(draft: PreTrainedModel, given: EncoderInputs | None) -> dict[str, Any]:
    """
    Keyword arguments by which every forward of a draft reads an encoder, on the draft's device and in its dtype; none
    for a draft that reads the text alone.
    """
    if given is None:
        return {}
    device, mask = execution_device(draft), given.mask
    if runs_own_encoder(draft, given.target):
        outputs = _own_outputs(draft, given)
    elif attends_to_encoder_of(draft, given.target):
        outputs = _mapped(given.outputs, lambda tensor: _like(draft, tensor))
    else:
        return {}
    mask = None if mask is None else mask.to(device)
    if draft.config.is_encoder_decoder:
        return {"encoder_outputs": outputs, "attention_mask": mask}
    parameters, states = forward_parameters(draft), outputs[0]
    arguments = {"encoder_outputs": states, "encoder_hidden_states": states, "encoder_attention_mask": mask}
    return {name: value for name, value in arguments.items() if name in parameters}


def _own_outputs(draft: PreTrainedModel, given: EncoderInputs) -> Any:
    """What the draft's own encoder returns, a row of the call each."""
    assert given.inputs is not None  # else the call is refused
    encoder, inputs = draft.get_encoder(), _like(draft, given.inputs)
    repeats = len(given.outputs[0]) // len(inputs)
    arguments: dict[str, Any] = {_name_of_inputs(encoder, draft): inputs, "return_dict": True}
    if given.mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
        arguments["attention_mask"] = given.mask[::repeats].to(inputs.device)
    outputs = encoder(**arguments)
    return outputs if repeats == 1 else _mapped(outputs, lambda tensor: tensor.repeat_interleave(repeats, dim=0))


def _name_of_inputs(encoder: Any, draft: PreTrainedModel) -> str:
    return getattr(encoder, "main_input_name", draft.main_input_name)  # FSMT's is a bare module


def _like(draft: PreTrainedModel, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the draft's device, and in its dtype if it holds numbers rather than tokens."""
    return tensor.to(execution_device(draft), draft.dtype if tensor.is_floating_point() else None)


def _mapped(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Outputs of an encoder with changed tensors; what is no tensor stays out, as losses of experts."""
    if not isinstance(outputs, ModelOutput):
        return tuple(change(one) if isinstance(one, torch.Tensor) else one for one in outputs)
    return type(outputs)(**{name: change(one) for name, one in outputs.items() if isinstance(one, torch.Tensor)})
