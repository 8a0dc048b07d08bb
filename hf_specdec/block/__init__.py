"""Heads that draft a block of tokens in one forward: DFlash, JetSpec, DSpark, DFlash 2 and P-EAGLE."""

from typing import TYPE_CHECKING

from ..on_first_use import on_first_use
from .configuration_block import BlockConfig


if TYPE_CHECKING:
    from .modeling_block import BlockHead

__all__ = ["BlockConfig", "BlockHead"]

__getattr__ = on_first_use(__name__, "modeling_block", "BlockHead")
