"""Medusa heads: their configuration, arithmetic and checkpoints."""

from typing import TYPE_CHECKING, Any

from .configuration_medusa import MedusaConfig


if TYPE_CHECKING:
    from .modeling_medusa import MedusaHeads

__all__ = ["MedusaConfig", "MedusaHeads"]


def __getattr__(name: str) -> Any:
    """The model, loaded when it is needed."""
    if name != "MedusaHeads":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .modeling_medusa import MedusaHeads

    return MedusaHeads
