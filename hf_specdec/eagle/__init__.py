"""EAGLE heads: their configuration, their arithmetic, and the formats they are published in."""

from typing import TYPE_CHECKING, Any

from .configuration_eagle import EagleConfig


if TYPE_CHECKING:
    from .modeling_eagle import EagleHead, EagleOutput

__all__ = ["EagleConfig", "EagleHead", "EagleOutput"]


def __getattr__(name: str) -> Any:
    """Imports the models on first use: `AutoConfig` needs the configuration alone."""
    if name not in ("EagleHead", "EagleOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import modeling_eagle

    return getattr(modeling_eagle, name)
