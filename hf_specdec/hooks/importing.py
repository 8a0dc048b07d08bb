"""
Actions that run when a module of transformers is imported, so that `import hf_specdec` itself imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Runs `action` once the module `name` has been executed: at once if it already is in `sys.modules`."""
    if name in sys.modules:
        action()
        return
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.actions.setdefault(name, []).append(action)


class _Waiting(MetaPathFinder):
    """Delegates to the other finders; modules with waiting actions get a loader that runs the actions after import."""

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
    """Wraps a module's own loader and runs the waiting actions after it."""

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
        for action in self._waiting.actions.pop(module.__name__, ()):  # a module may be found but not loaded
            action()
