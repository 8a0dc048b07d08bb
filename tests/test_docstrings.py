"""Docstrings: their examples run, and their first words name what they are about."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import hf_specdec


ROOT = Path(__file__).parent.parent
WITHOUT_SUBJECT = re.compile(
    r"(The same|That|Those|These|Of|It|Its|They|So (many|often|much|far)|As (many|often|much)|Also|Such|Likewise"
    r"|One (of|that|who)|Some (of|that))\b"
)
"""How a docstring begins that cannot be understood on its own, as in `help()`."""

OPTIONAL = {"ray"}
"""Packages beside those of the extra `dev`, without which some modules cannot be imported."""
MODULES = [module.name for module in pkgutil.walk_packages(hf_specdec.__path__, "hf_specdec.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder()
    sources = {name: importlib.util.find_spec(name).origin for name in MODULES}
    modules = [name for name, file in sources.items() if ">>> " in Path(file).read_text(encoding="utf-8")]
    examples = [test for name in modules for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 2


def notes(file: Path) -> list[tuple[int, str]]:
    """The lines and texts of all docstrings of a file, those under attributes and constants included."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Expr)]
    values = [node.value for node in nodes if isinstance(node.value, ast.Constant)]
    return [(value.lineno, value.value.strip()) for value in values if isinstance(value.value, str)]


@pytest.mark.parametrize("folder", ["hf_specdec", "kernels/hf-specdec-kernels"])
def test_docstrings_name_their_subject(folder: str) -> None:
    found = [(file, *note) for file in (ROOT / folder).rglob("*.py") for note in notes(file)]
    assert len(found) > 100
    assert not [f"{file}:{line}: {text[:60]}" for file, line, text in found if WITHOUT_SUBJECT.match(text)]
