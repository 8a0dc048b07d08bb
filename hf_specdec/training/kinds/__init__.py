"""What is particular to each kind of model that is trained; a run (`recipe`) and its trainer are the same for all."""

from .base import Kind
from .block import DFlash, DSpark
from .draft import Draft
from .eagle import Eagle1, Eagle3


KINDS: dict[str, type[Kind]] = {
    "eagle3": Eagle3,
    "eagle1": Eagle1,
    "draft": Draft,
    "dflash": DFlash,
    "dspark": DSpark,
}

__all__ = ["KINDS", "DFlash", "DSpark", "Draft", "Eagle1", "Eagle3", "Kind"]
