"""Many requests that come and go: in-flight batching with speculation."""

from .manager import ManagerState, SpeculativeBatchingManager
from .request import SpeculativeGenerationOutput


__all__ = ["ManagerState", "SpeculativeBatchingManager", "SpeculativeGenerationOutput"]
