"""EAGLE heads: their configuration, their arithmetic, and the formats they are published in."""

from typing import TYPE_CHECKING

from ..on_first_use import on_first_use
from .configuration_eagle import EagleConfig


if TYPE_CHECKING:
    from .modeling_eagle import EagleHead

__all__ = ["EagleConfig", "EagleHead"]

__getattr__ = on_first_use(__name__, "modeling_eagle", "EagleHead")
