"""
The model in a process of its own. In one process Python would take turns between HTTP and texts on the one side, and
steps on the other.

    client.py     the manager, as the server sees it
    messages.py   what the two processes tell each other
    server.py     the manager's side
    process.py    the process: what it loads, and how it starts and ends
"""

from .client import EngineClient
from .process import EngineOptions, StartError, running_engine
from .server import EngineServer


__all__ = ["EngineClient", "EngineOptions", "EngineServer", "StartError", "running_engine"]
