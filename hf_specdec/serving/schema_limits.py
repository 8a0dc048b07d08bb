"""How large and how deep JSON schemas of requests may be."""

from __future__ import annotations

import json
from typing import Any

from ..grammar import depths


MOST_CHARACTERS = 2**19
"""Most characters of a JSON schema: it is compiled at some 2 MB a second, which holds up other requests."""


def check_schema(schema: Any) -> None:
    """
    Checks that a JSON schema is neither too large nor too deep to be compiled.

    Raises:
        ValueError: if it is.
    """
    length = len(json.dumps(schema))
    if length > MOST_CHARACTERS:
        raise ValueError(f"it has {length} characters, but may have {MOST_CHARACTERS}. Use a smaller one")
    depths.check_schema(schema)
