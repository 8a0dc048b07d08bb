"""What pages say to install, in fresh environments: their Python runs there, and their commands start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pages import CARDS, PAGES, PLAIN, ROOT, blocks, installs, needs, run_pages


SPACE = ROOT / "examples" / "space" / "README.md"
WANTED = sorted(
    {wanted for page in [*PAGES, *CARDS, SPACE] for _, wanted in installs(page) if wanted[0].startswith(".")}
)
"""Whatever is installed with the package, `make test-plain` tries the package alone."""


def run(*command: Any) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=kept | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is built in the checkout itself."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("hf_specdec", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def test_pages_that_need_more_say_so() -> None:
    plain = [page.name for page in [*PAGES, *CARDS] if needs(page) == PLAIN]
    assert {"README.md", "heads.md", "batching.md"} <= set(plain)
    assert needs(ROOT / "docs" / "multi-gpu.md") == (".", "accelerate")
    assert {PLAIN, (".[train]",), (".[serve]",), (".[bench]",), (".[demo]",)} <= set(WANTED)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [wanted for wanted in WANTED if wanted != PLAIN], ids=" ".join)
def test_what_pages_install(wanted: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    pip = [bin / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, f"{checkout}{wanted[0][1:]}", *wanted[1:])
    pages = [page for page in [*PAGES, *CARDS] if (wanted in dict.fromkeys(of for _, of in installs(page)))]
    for page in pages:
        for line, code in blocks(page, "bash"):
            for more in re.findall(r"^pip install (--no-deps .*)$", code, flags=re.MULTILINE):
                if (line, wanted) in installs(page):
                    run(*pip, *shlex.split(more, comments=True))
                    print_folder = "import hf_specdec; print(hf_specdec.smollm2.smollm2_folder())"
                    assert "smollm2" in run(bin / "python", "-c", print_folder).lower()
    for page, outcome in run_pages(
        [page for page in pages if blocks(page, "python")], python=str(bin / "python")
    ).items():
        assert outcome.passed, f"{page}\n{outcome.printed}"
    for page in pages:
        for line, code in blocks(page, "bash"):
            if (line, wanted) not in installs(page):
                continue
            for command in re.findall(r"^hf-specdec .*$", code, flags=re.MULTILINE):
                assert "Usage" in run(bin / "hf-specdec", shlex.split(command)[1], "--help")
