"""Python's threads and garbage collector in a process that others wait for. Needs no other part of the server."""

from __future__ import annotations

import atexit
import gc
import sys


SWITCH_INTERVAL = 0.0005
"""
Switch interval of Python threads in the engine's process, in seconds. In Python's default of 0.005 a small model on a
GPU runs a whole step, for which its thread would have to wait for the thread that takes requests.
"""


def never_search_again() -> None:
    """
    Keeps the garbage collector from what has been loaded so far, which lives as long as the process. (A search through
    everything that torch and transformers keep takes 0.3 to 0.5 seconds, in which nothing else of the process runs.)
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries tell of what is still kept as the process ends as leaked


def let_steps_go_first() -> None:
    """Sets Python up so that the thread that runs the steps waits little for others, and for the garbage collector."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    never_search_again()
