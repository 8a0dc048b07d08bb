"""The packages of the library: which imports which."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_specdec


ROOT = Path(hf_specdec.__file__).parent


def part_of(module: tuple[str, ...]) -> str:
    """The folder, or the file, of the library's root in which a module lies."""
    return module[0] if module else "__init__"


def imports_at_top_level(root: Path) -> dict[str, set[str]]:
    """For each package, and each module beside them, those that it imports as it is imported itself."""
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        module = file.relative_to(root).with_suffix("").parts
        package = module[:-1]
        own = part_of(package if module[-1] == "__init__" else module)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                names = [(node.module or name.name) for name in node.names]
                parts = {part_of((*base, *name.split("."))) for name in names}
                found.setdefault(own, set()).update(parts - {own})
    return found


def test_packages_import_each_other_in_one_direction() -> None:
    imports = imports_at_top_level(ROOT)
    assert {"trees", "drafters", "generation"} <= imports.keys()
    TopologicalSorter(imports).prepare()  # which names a cycle


def test_a_cycle_is_found(tmp_path: Path) -> None:
    for name, source in {"one/a.py": "from ..two import b", "two/b.py": "def f(): from ..one import a"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(source)
    TopologicalSorter(imports_at_top_level(tmp_path)).prepare()
    (tmp_path / "two/b.py").write_text("from ..one.a import b")
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(imports_at_top_level(tmp_path)).prepare()
