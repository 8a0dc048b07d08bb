"""Gemma 4's assistants: their configuration, arithmetic and checkpoints."""

from typing import TYPE_CHECKING, Any

from .configuration_gemma import GemmaAssistantConfig


if TYPE_CHECKING:
    from .modeling_gemma import GemmaAssistant

__all__ = ["GemmaAssistant", "GemmaAssistantConfig"]


def __getattr__(name: str) -> Any:
    """The model, loaded when it is needed."""
    if name != "GemmaAssistant":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .modeling_gemma import GemmaAssistant

    return GemmaAssistant
