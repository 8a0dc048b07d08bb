"""
Forwards of a head over whole texts, as training runs them: the attention function that the head gets for each, and the
heads that they would compute wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .models.rope import LENGTH_DEPENDENT


@contextmanager
def attention_lent(head: Any, name: str) -> Iterator[None]:
    """Switches a head's layers to the attention that is registered with transformers as `name`, and back."""
    config = head.config.text_config
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def check_trainable(head: Any) -> None:
    """
    Refuses heads that training over whole texts would compute incorrectly.

    Raises:
        ValueError: for rotary embeddings that depend on the length of the text, or attention dropout.
    """
    check_rope(head)
    dropout = getattr(head.config.text_config, "attention_dropout", 0.0)
    if dropout:
        raise ValueError(f"`text_config.attention_dropout`={dropout}: training over texts has no dropout. Set 0.")


def check_rope(head: Any) -> None:
    """
    Refuses heads whose rows would be rotated otherwise in drafting.

    Raises:
        ValueError: for rotary embeddings that depend on the length of the text.
    """
    config = head.config.text_config
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in LENGTH_DEPENDENT:
        raise ValueError(
            f"`text_config.rope_parameters` of the head has rope_type={rope_type!r}, whose frequencies depend on the "
            "length of the text: it cannot be run over whole texts. Take a head with 'default', 'linear', "
            "'llama3' or 'yarn'."
        )
