"""A package's name that is imported on first use: `AutoConfig` needs the configuration of a head alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_first_use(package: str, module: str, name: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has `name` in one of its modules."""

    def imported(wanted: str) -> Any:
        if wanted != name:
            raise AttributeError(f"module {package!r} has no attribute {wanted!r}")
        return getattr(import_module(f".{module}", package), name)

    return imported
