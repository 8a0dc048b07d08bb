"""Many requests that come and go: in-flight batching with speculation."""

from .limits import Limits
from .manager import ManagerState, SpeculativeBatchingManager
from .request import SpeculativeGenerationOutput


__all__ = ["Limits", "ManagerState", "SpeculativeBatchingManager", "SpeculativeGenerationOutput"]
