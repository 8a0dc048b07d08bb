"""Medusa heads: their configuration, arithmetic and checkpoints."""

from typing import TYPE_CHECKING

from ..on_first_use import on_first_use
from .configuration_medusa import MedusaConfig


if TYPE_CHECKING:
    from .modeling_medusa import MedusaHeads

__all__ = ["MedusaConfig", "MedusaHeads"]

__getattr__ = on_first_use(__name__, "modeling_medusa", "MedusaHeads")
