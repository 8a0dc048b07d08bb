"""The modules of examples/space, which import each other as a Space does: by their bare names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


SPACE = Path(__file__).parent.parent.parent / "examples" / "space"
MODULES = ("decoding", "text", "drawing", "draws", "histogram")


@pytest.fixture(scope="session")
def space() -> SimpleNamespace:
    """Those that need no gradio."""
    sys.path.insert(0, str(SPACE))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(SPACE))
