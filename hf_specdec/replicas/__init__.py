"""
The server on many machines: replicas of it under Ray Serve, behind fronts that send a request where the beginning of
its text is known.

    prefixes.py      hashes of the first blocks of a request's text, and which replicas know them
    front.py         the HTTP side: passes requests on, and repeats those whose replica has died
    board.py         the metrics of all replicas on one page
    replica.py       an engine with the server's application, held by one actor
    application.py   the deployments together
    fronts.py        a front as an actor
    router.py        the choice of a replica, as Ray Serve asks for it

The last two import `ray[serve]`, and `application` needs it.
"""

from .application import application
from .replica import ReplicaOptions


__all__ = ["ReplicaOptions", "application"]
