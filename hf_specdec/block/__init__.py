"""Heads that draft a block of tokens in one forward: DFlash, JetSpec, DSpark, DFlash 2 and P-EAGLE."""

from typing import TYPE_CHECKING, Any

from .configuration_block import BlockConfig


if TYPE_CHECKING:
    from .modeling_block import BlockHead, BlockOutput

__all__ = ["BlockConfig", "BlockHead", "BlockOutput"]


def __getattr__(name: str) -> Any:
    """Imports the models on first use: `AutoConfig` needs the configuration alone."""
    if name not in ("BlockHead", "BlockOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import modeling_block

    return getattr(modeling_block, name)
