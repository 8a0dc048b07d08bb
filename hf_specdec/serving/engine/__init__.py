"""
The engine: a manager with its models in a process of its own. In a single process, HTTP handling and text decoding
would compete with the steps for Python's global interpreter lock.

    start.py      the start and the end of the engine's process
    options.py    what it is started with
    process.py    what it does: loading, start and end
    client.py     the HTTP server's side of the pipe
    messages.py   messages between the two processes
    server.py     the manager's side of the pipe
    stalls.py     whether forwards end
    parent.py     the end of the engine's process with the server's
"""

from .options import EngineOptions, StartError
from .start import EngineProcess, running_engine


__all__ = ["EngineOptions", "EngineProcess", "StartError", "running_engine"]
