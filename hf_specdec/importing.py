"""
Waiting for modules of transformers, which loads them when they are needed: `import hf_specdec` itself loads nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Acts once a module has been executed: now, if it has been already."""
    if name in sys.modules:
        action()
        return
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.actions.setdefault(name, []).append(action)


class _Waiting(MetaPathFinder):
    """Finds what others find; modules that somebody waits for get a loader that acts behind their own."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ActingLoader(spec.loader, self)
                return spec
        return None


class _ActingLoader(Loader):
    """A module's own loader, and what is to be done behind it."""

    def __init__(self, loader: Loader, waiting: _Waiting):
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for action in self._waiting.actions.pop(module.__name__, ()):  # only now: a module may be found and not loaded
            action()
