"""
The engine: a manager with its models in a process of its own. In a single process, HTTP handling and text decoding
would compete with the steps for Python's global interpreter lock.

    client.py     the HTTP server's side of the pipe
    messages.py   messages between the two processes
    server.py     the manager's side of the pipe
    process.py    the engine's process: loading, start and end
    stalls.py     whether forwards end
    parent.py     the end of the engine's process with the server's
"""

from .client import EngineClient
from .process import EngineOptions, StartError, running_engine
from .server import EngineServer


__all__ = ["EngineClient", "EngineOptions", "EngineServer", "StartError", "running_engine"]
