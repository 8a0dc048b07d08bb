"""In-flight batching with speculation: many requests that start and end independently of each other."""

from ..engine.request import SpeculativeGenerationOutput
from .limits import Limits
from .manager import SpeculativeBatchingManager
from .state import ManagerState


__all__ = ["Limits", "ManagerState", "SpeculativeBatchingManager", "SpeculativeGenerationOutput"]
