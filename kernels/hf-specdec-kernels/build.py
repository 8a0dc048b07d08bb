"""
Builds the Hub kernel: the folder that `kernels.get_local_kernel` reads and that a kernel repository on the Hub holds.

    python build.py

The script copies `torch-ext/hf_specdec_kernels` to `build/torch-universal`, with a unique namespace of the operators,
so that several versions can be loaded in one process, and with the metadata that the `kernels` package needs. Nothing
is compiled: Triton compiles the kernels where they run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from pathlib import Path


HERE = Path(__file__).parent
VARIANT = "torch-universal"

COMPATIBILITY = '''"""For versions of `kernels` that look for the package one folder down."""

import importlib.util
import sys
from pathlib import Path


_init = Path(__file__).parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location({identifier!r}, _init)
_module = sys.modules.setdefault({identifier!r}, importlib.util.module_from_spec(_spec))
if not hasattr(_module, "__all__"):
    _spec.loader.exec_module(_module)
globals().update({{name: getattr(_module, name) for name in _module.__all__}})
'''


def build(target: Path) -> None:
    """Writes the build variant to the folder `target`, replacing its contents."""
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    package = general["name"].replace("-", "_")
    source = HERE / "torch-ext" / package
    identifier = f"_{package}_{digest(source)}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    operators = target / "_ops.py"
    text = operators.read_text()
    operators.write_text(text.replace(f'NAMESPACE = "{package}"', f'NAMESPACE = "{identifier}"'))
    if operators.read_text() == text:
        raise RuntimeError(f"{source / '_ops.py'} no longer sets NAMESPACE to {package!r}; adapt build.py.")
    metadata = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    compatibility = target / package / "__init__.py"
    compatibility.parent.mkdir()
    compatibility.write_text(COMPATIBILITY.format(identifier=identifier))


def digest(folder: Path) -> str:
    """The first seven hexadecimal digits of a SHA-256 hash over the Python files of a folder."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        hashed.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()[:7]


if __name__ == "__main__":
    build(HERE / "build" / VARIANT)
    print(HERE / "build" / VARIANT)
