"""What a model reads beside the tokens of prompts, such as images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(eq=False)
class PromptInputs:
    """
    Inputs of a prompt beside its tokens. The model reads such a prompt as in plain `generate`: whole, and alone, or
    together with others that have the same `PromptInputs`.

    Args:
        values (`dict[str, Any]`): keyword arguments of the model's forward. Their tensors lie on the host: many
            requests may wait.
        prepare (`Callable`): called with `values` when the prompt is read; returns the generation config and keyword
            arguments that `generate` hands to a decoding method.
        tokens (`torch.Tensor` of shape `[requests, columns]`, int64, *optional*): the prompts of all requests, padded
            on the left, as the model reads them. None for the one request's own.
    """

    values: dict[str, Any]
    prepare: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]
    tokens: torch.Tensor | None = None
