"""Gemma 4's assistants: their configuration, arithmetic and checkpoints."""

from typing import TYPE_CHECKING

from ..on_first_use import on_first_use
from .configuration_gemma import GemmaAssistantConfig


if TYPE_CHECKING:
    from .modeling_gemma import GemmaAssistant

__all__ = ["GemmaAssistant", "GemmaAssistantConfig"]

__getattr__ = on_first_use(__name__, "modeling_gemma", "GemmaAssistant")
