"""Prompts with more than tokens, as a processor returns them: what the model reads of them, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import CACHE_NAMES
from ..forwards.tree_forward import TreeForward
from ..models.reasons import Reason
from ..models.structure import attends_to_images_apart, forward_parameters, inputs_of_every_step


_WITHOUT_PLACES = ("git",)
"""Model types that cache the features of an image in front of the text, where no token stands for them."""
_OF_CALLS = frozenset(
    {
        "attention_mask",
        "inputs_embeds",
        "position_ids",
        "labels",
        "logits_to_keep",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "mm_encoder_outputs",
        *CACHE_NAMES,
    }
)
"""Arguments of a forward that say nothing of a prompt, or that requests see to themselves."""


def split_prompt(prompt: Any, model_inputs: Any) -> tuple[Any, dict[str, Any]]:
    """
    The tokens of a prompt, and what the model reads beside them, from the `input_ids` and `model_inputs` of a request;
    either may be what a processor returns for one prompt.

    Raises:
        ValueError, TypeError: if there are no tokens, or several prompts, or padding.
    """
    if not isinstance(prompt, Mapping):
        if model_inputs is None:
            return prompt, {}
        if not isinstance(model_inputs, Mapping):
            raise TypeError(
                f"`model_inputs` must be a dict of the model's inputs, such as `pixel_values`, but is "
                f"{type(model_inputs).__name__}."
            )
        if "input_ids" in model_inputs:
            raise ValueError("`model_inputs` holds `input_ids`, too. Give the tokens once, as `input_ids`.")
        prompt = {"input_ids": prompt, **model_inputs}
    elif model_inputs is not None:
        raise ValueError("`model_inputs` beside a dict of inputs. Give all inputs of the prompt in one of them.")
    if "input_ids" not in prompt:
        raise ValueError(f"`input_ids` is missing among the inputs of a prompt: {', '.join(map(str, prompt))}.")
    values = {name: value for name, value in prompt.items() if value is not None}
    tokens = _only_row("input_ids", values.pop("input_ids"))
    mask = values.pop("attention_mask", None)
    if mask is not None and not all(_only_row("attention_mask", mask)):
        raise ValueError("`attention_mask` hides tokens of the prompt. Give each request its tokens without padding.")
    return tokens, values


def _only_row(name: str, value: Any) -> Any:
    """A row of integers, which may be the only one of a batch."""
    rows = value.tolist() if hasattr(value, "tolist") else list(value)
    if rows and isinstance(rows[0], list | tuple):
        if len(rows) > 1:
            raise ValueError(f"`{name}` has {len(rows)} rows, but a request has one prompt. Add one for each.")
        return rows[0]
    return rows


def checked_inputs(model: PreTrainedModel, num_tokens: int, values: dict[str, Any]) -> dict[str, Any]:
    """
    The inputs beside the tokens of a prompt, as tensors on the host; none, if they say only that all is text.

    Raises:
        ValueError, TypeError: for an input that the model does not take, or not here.
    """
    name, takes = type(model).__name__, _arguments(model)
    for given in values:
        if given in _OF_CALLS:
            raise ValueError(f"`{given}` among the inputs of a prompt: requests see to it themselves. Leave it out.")
        if given not in takes:
            raise ValueError(f"`{given}` among the inputs of a prompt: {name} takes none. Leave it out.")
    found = {given: _on_host(given, value) for given, value in values.items()}
    types = {given: found[given] for given in TreeForward.TOKEN_TYPES if given in found}
    for given, value in types.items():
        if value.numel() != num_tokens:
            raise ValueError(f"`{given}` has {value.numel()} entries, but the prompt {num_tokens} tokens.")
        found[given] = value.view(1, -1)
    if len(types) == len(found):
        if found and ("pixel_values" not in takes or any(bool(value.any()) for value in types.values())):
            given = next(iter(types))
            raise ValueError(f"`{given}` without images: a request without them is all text. Leave it out.")
        return {}
    if model.config.model_type in _WITHOUT_PLACES:
        raise ValueError(
            f"`pixel_values`: the target {name} {Reason.OTHER_TOKENS}: it caches an image before the prompt, and "
            "`generate_batch` and its manager need a token for each position. Use `generate`."
        )
    if attends_to_images_apart(model):
        raise ValueError(
            f"`{next(iter(found))}`: the target {name} {Reason.CROSS_ATTENTION}. Give the text alone, or call "
            "`generate` without `assistant_model`."
        )
    of_steps = inputs_of_every_step(model, found)
    if of_steps:
        raise ValueError(
            f"`{of_steps[0]}` among the inputs of a prompt: {name} reads it with every new token, and "
            "steps of requests do not have it. Use `generate`."
        )
    return found


def _arguments(model: PreTrainedModel) -> set[str]:
    return forward_parameters(model) | set(inspect.signature(model.prepare_inputs_for_generation).parameters)


def _on_host(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"`{name}` among the inputs of a prompt must be a tensor, but is {type(value).__name__}. Call the "
            'processor with `return_tensors="pt"`.'
        ) from error
