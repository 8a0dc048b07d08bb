"""Folders of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/hf_specdec`, or `~/.cache/hf_specdec`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_specdec"
