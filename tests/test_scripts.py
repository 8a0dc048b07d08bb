"""Scripts beside the package find there what they import; most are run by nobody but their users."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
SCRIPTS = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).glob("**/*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_exist(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_specdec":
            module = import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    import_module(f"{node.module}.{name.name}")
