"""The length of texts that a model has been trained for, its context, and requests that would exceed it."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from ..models.rope import ropes_of
from .decoding import beside
from .errors import RequestRefused


def context_of(config: PreTrainedConfig) -> int | None:
    """
    Most tokens of a text that a model has been made for; None if its config does not say, or sets no bound (ALiBi).

    Scaled RoPE counts: a linear one stretches `max_position_embeddings` by its `factor`, and YaRN
    (https://huggingface.co/papers/2309.00071) its `original_max_position_embeddings`, whether
    `max_position_embeddings` already says so or not.
    """
    text: Any = config.get_text_config(decoder=True)
    trained = getattr(text, "max_position_embeddings", None)
    if trained is None or getattr(text, "alibi", False):
        return None
    return max([trained, *(_reach(rope, trained) for rope in ropes_of(text))])


def _reach(rope: dict[str, Any], trained: int) -> int:
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if kind == "yarn":
        return int((rope.get("original_max_position_embeddings") or trained) * factor)
    return int(trained * factor) if kind == "linear" else trained


def check_length(prompt_length: int, config: GenerationConfig, context: int | None, most_tokens: int) -> None:
    """
    Checks that a text stays within the model's context and the memory.

    Args:
        prompt_length (`int`): tokens of the prompt.
        config (`GenerationConfig`): options, with the length.
        context (`int`, *optional*): see `context_of`.
        most_tokens (`int`): most tokens that there is memory for.

    Raises:
        RequestRefused: if the text may become longer.
    """
    new = config.max_new_tokens
    length = (config.max_length or 0) if new is None else prompt_length + new
    if context is not None and context <= most_tokens:
        most, bound = context, f"the model's context of {context}"
    else:
        most, bound = most_tokens, f"the {most_tokens} tokens that there is memory for"
    if prompt_length >= most:
        raise RequestRefused(
            f"The prompt has {prompt_length} tokens, and with an answer does not fit into {bound}. Shorten it."
        )
    if length > most:
        name, value = ("max_length", length) if new is None else ("max_new_tokens", new)
        field = beside(config).length_field or f"generation_config.{name}"
        raise RequestRefused(
            f"`{field}={value}` with a prompt of {prompt_length} tokens does not fit into {bound}. Ask for "
            f"{value - length + most} at most, or shorten the prompt."
        )
