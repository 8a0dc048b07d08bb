"""
LoRA adapters by request.

- `loaded`: the adapters of a model, and which of them requests can choose.
- `stacks`: their weights, stacked for rows with different adapters.
- `requests`: the adapters of requests in flight.
"""

from .loaded import Choice, LoadedAdapters
from .requests import RequestAdapters


__all__ = ["Choice", "LoadedAdapters", "RequestAdapters"]
