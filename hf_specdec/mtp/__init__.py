"""
MTP modules: what predicts further tokens inside a target's own checkpoint, as a head.

- `configuration_mtp`, `modeling_mtp`: `MtpHead`.
- `layouts`: the names of the modules' tensors, family by family.
- `reading`: the tensors from the target's files.
- `building`: the decoder layer of a module, by the target's own class; `longcat`: half of one.
"""

from typing import TYPE_CHECKING

from ..on_first_use import on_first_use
from .configuration_mtp import MtpConfig


if TYPE_CHECKING:
    from .modeling_mtp import MtpHead

__all__ = ["MtpConfig", "MtpHead"]

__getattr__ = on_first_use(__name__, "modeling_mtp", "MtpHead")
