"""What a model reads beside the tokens of a prompt, such as images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class PromptInputs:
    """
    Inputs of one prompt beside its tokens. The model reads such a prompt as in plain `generate`: whole, and alone.

    Args:
        values (`dict[str, Any]`): keyword arguments of the model's forward. Their tensors lie on the host: many
            requests may wait.
        prepare (`Callable`): called with `values` when the prompt is read; returns the generation config and keyword
            arguments that `generate` hands to a decoding method.
    """

    values: dict[str, Any]
    prepare: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]
    position_shift: torch.Tensor | None = field(default=None, init=False)
    """
    Position of a token of the text after the prompt minus its slot, `[…, 1]` int64 on the host; with leading
    dimensions where positions have several. None before the prompt is read, and if the shift is that of texts.
    """
