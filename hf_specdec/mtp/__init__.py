"""
MTP modules: what predicts further tokens inside a target's own checkpoint, as a head.

- `configuration_mtp`, `modeling_mtp`: `MtpHead`.
- `layouts`: the names of the modules' tensors, family by family.
- `reading`: the tensors from the target's files.
- `building`: the decoder layer of a module, by the target's own class; `longcat`: half of one.
"""

from typing import TYPE_CHECKING, Any

from .configuration_mtp import MtpConfig


if TYPE_CHECKING:
    from .modeling_mtp import MtpHead

__all__ = ["MtpConfig", "MtpHead"]


def __getattr__(name: str) -> Any:
    """Imports the model on first use."""
    if name != "MtpHead":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import modeling_mtp

    return modeling_mtp.MtpHead
