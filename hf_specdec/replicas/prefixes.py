"""Hashes of the first blocks of a request's text, and which replicas have lately had texts that begin so."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import lru_cache
from heapq import nsmallest
from typing import Any, Generic, TypeVar


BLOCK = 256
"""Characters of a block: about two blocks of K/V memory."""
MOST_BLOCKS = 64
"""Blocks of a text that count: beyond 16,000 characters in common, texts are taken for alike."""
MOST_KEYS = 200_000
"""Keys that are remembered: some 50 MB."""

FEW = 4
"""Replicas that are told as the next best ones."""
_MASK = 2**64 - 1

Name = TypeVar("Name", bound=Hashable)


def keys_of(content: bytes) -> list[str]:
    """
    A key for each of the first whole blocks of a request's text, which stands for the text up to its end. None for
    what is no request: to say so is up to the server.

    Args:
        content (`bytes`): the body of a request: of a chat, a completion or a response.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return []
    if not isinstance(body, dict):
        return []
    text, before, keys = _text_of(body), str(body.get("model")), []
    for end in range(BLOCK, min(len(text), BLOCK * MOST_BLOCKS) + 1, BLOCK):
        block = f"{before}\n{text[end - BLOCK : end]}".encode(errors="replace")
        before = hashlib.blake2b(block, digest_size=12).hexdigest()
        keys.append(before)
    return keys


def _text_of(body: dict[str, Any]) -> str:
    """What comes first in a prompt first: tools, then messages, each as a whole."""
    parts = [body.get("tools"), body.get("instructions")]
    for name in ("messages", "input", "prompt"):
        value = body.get(name)
        parts += value if isinstance(value, list) else [value]
    return "".join(part if isinstance(part, str) else f"{json.dumps(part)}\n" for part in parts if part is not None)


class PrefixTable(Generic[Name]):
    """
    Remembers which replicas have had which beginnings.

    Args:
        most_ahead (`int`, *optional*, defaults to 8): most open requests that a replica may have more than the idlest
            and still be preferred for what it knows.
        most_keys (`int`, *optional*): keys that are remembered; those not seen for longest are forgotten.
    """

    def __init__(self, most_ahead: int = 8, most_keys: int = MOST_KEYS):
        self._most_ahead, self._most_keys = most_ahead, most_keys
        self._known: OrderedDict[str, set[Name]] = OrderedDict()

    def add(self, keys: list[str], name: Name) -> None:
        """Notes that a replica has got a text with these keys."""
        for key in reversed(keys):  # so that the end of a text is forgotten before its beginning
            self._known.setdefault(key, set()).add(name)
            self._known.move_to_end(key)
        while len(self._known) > self._most_keys:
            self._known.popitem(last=False)

    def forget(self, name: Name) -> None:
        """Forgets a replica that is no more."""
        for key, names in list(self._known.items()):
            names.discard(name)
            if not names:
                del self._known[key]

    def depth(self, keys: list[str], name: Name) -> int:
        """Number of first keys that a replica knows."""
        for depth, key in enumerate(keys):
            if name not in self._known.get(key, ()):
                return depth
        return len(keys)

    def ranked(self, keys: list[str], loads: Mapping[Name, int]) -> list[Name]:
        """
        The best few replicas, best first: of those that are not much busier than the idlest, the one that knows most
        of the text, and then the idlest. Those that are alike come in an order that is the same at every front, and
        another one for each beginning.

        Args:
            keys (`list[str]`): of the text.
            loads (`Mapping`): open requests of each replica.
        """
        if not loads:
            return []
        least, draw = min(loads.values()), _number(keys[0] if keys else "") | 1
        most = least + self._most_ahead

        def badness(name: Name) -> tuple[int, int]:
            return loads[name], _number(str(name)) * draw & _MASK

        idlest = nsmallest(FEW, loads, key=badness)
        for key in reversed(keys):
            able = [name for name in self._known.get(key, ()) if loads.get(name, most + 1) <= most]
            if able:
                best = min(able, key=badness)
                return [best, *(name for name in idlest if name != best)]
        return idlest


@lru_cache(2**14)
def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
