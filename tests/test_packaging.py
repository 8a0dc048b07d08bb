"""The source distribution, and the wheel built from it, installed where the checkout cannot be seen."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.goldens import TINY_TARGET

import hf_specdec
from hf_specdec.benchmarking.prompts import built_in


ROOT = Path(__file__).parent.parent
SOURCES = {
    "hf_specdec": ROOT / "hf_specdec",
    "hf_specdec_kernels": ROOT / "kernels" / "hf-specdec-kernels" / "torch-ext" / "hf_specdec_kernels",
}
PACKED = ("hf_specdec/", "kernels/", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
"""What the wheel is made from. Other files are empty in the source distribution of these tests, to be packed fast."""
OPTIONAL = [name for name in ("ray",) if not importlib.util.find_spec(name)]
"""Packages that `dev` leaves out, without which some modules cannot be imported."""
COMMANDS = ("bench", "convert", "demo", "doctor", "generate-file", "serve", "train", "tune")

LOOKS = """
import contextlib, importlib.util, io, json, runpy, sys
from importlib.metadata import distribution
from typer.testing import CliRunner
import hf_specdec, hf_specdec_kernels
from hf_specdec.benchmarking.prompts import built_in
from hf_specdec.cli import build_app

names = json.load(sys.stdin)
modules = {}
for name in names["modules"]:
    try:
        modules[name] = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        if error.name not in names["optional"]:
            raise
        modules[name] = importlib.util.find_spec(name).origin
helps = {name: CliRunner().invoke(build_app(), [name, "--help"]).output for name in names["commands"]}
prompts = [prompt.text for prompt in built_in()]
version = distribution("hf-specdec").version
demo = CliRunner().invoke(build_app(), ["demo", *names["demo"]]).output
sys.argv, overview = ["hf-specdec", "--help"], io.StringIO()
with contextlib.redirect_stdout(overview), contextlib.suppress(SystemExit):
    runpy.run_path(names["script"], run_name="__main__")
found = {"modules": modules, "helps": helps, "prompts": prompts, "version": version, "demo": demo}
print(json.dumps(found | {"overview": overview.getvalue()}))
"""


def run(*command: Any, stdin: str | None = None, folder: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    done = subprocess.run(
        list(map(str, command)), input=stdin, capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def repository() -> list[str]:
    """The files that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(repository: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that nothing of an earlier build is in it, and nothing of this one stays behind."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in repository:
        copy = folder / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy) if name.startswith(PACKED) else copy.touch()
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run(sys.executable, "-c", build, folder=folder / "checkout")
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the source distribution, as `python -m build` and an installation of that do."""
    folder = sdist.parent
    run(sys.executable, "-m", "pip", "wheel", sdist, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A virtual environment with the wheel. It reads this one's packages, but not its .pth files, by which editable
    installs are found.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=os.name != "nt")
    python = folder / "bin" / "python"
    paths = json.loads(run(python, "-c", "import json, sysconfig; print(json.dumps(sysconfig.get_paths()))"))
    outer = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}
    (Path(paths["purelib"]) / "outer.pth").write_text("\n".join(outer))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return folder


@pytest.fixture(scope="module")
def answer(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `LOOKS` finds, in one process for all tests: importing torch and transformers takes longest."""
    demo = ["--target", str(TINY_TARGET), "--device", "cpu", "--max-new-tokens", "12"]
    script = str(clean / "bin" / "hf-specdec")
    question = json.dumps(
        {"modules": modules(), "optional": OPTIONAL, "commands": COMMANDS, "demo": demo, "script": script}
    )
    # Isolated: neither the working folder nor variables of the environment lead to other packages.
    folder = tmp_path_factory.mktemp("elsewhere")
    return json.loads(run(clean / "bin" / "python", "-I", "-c", LOOKS, stdin=question, folder=folder).splitlines()[-1])


def modules() -> list[str]:
    return [
        module.name
        for package, folder in SOURCES.items()
        for module in pkgutil.walk_packages([str(folder)], f"{package}.")
        if not module.name.endswith("__main__")
    ]


def files_of(folder: Path) -> set[str]:
    return {
        file.relative_to(folder.parent).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    information = {name for name in held if ".dist-info/" in name}
    assert held - information == files_of(SOURCES["hf_specdec"]) | files_of(SOURCES["hf_specdec_kernels"])
    assert {"hf_specdec/py.typed", "hf_specdec/benchmarking/prompts.jsonl"} <= held
    assert any(name.endswith("licenses/LICENSE") for name in information)


def test_metadata_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == hf_specdec.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        metadata.get_all("Classifier")
    )
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    assert {item.name for item in required if item.marker is None} == {"torch", "transformers"}


def test_the_source_distribution_holds_what_the_repository_holds(sdist: Path, repository: list[str]) -> None:
    """All tests with what they read, docs, examples and benchmarks."""
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert set(repository) <= held
    assert not {name for name in held - set(repository) if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}


def test_changes_and_citation_are_of_this_version() -> None:
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert newest and cited and newest[1] == cited[1] == hf_specdec.__version__


def test_every_extra_says_what_it_is_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {"train", "demo", "bench", "kernels", "dev"} <= set(extras)
    for extra in extras:
        assert re.search(rf"^# .+\n{extra} = \[$", text, flags=re.MULTILINE), extra


def test_the_wheel_has_the_modules_and_commands_of_the_checkout(clean: Path, answer: dict[str, Any]) -> None:
    """Every module, from where it was installed; the same commands; no file of the checkout."""
    assert set(answer["modules"]) == set(modules()) and len(modules()) > 100
    assert answer["version"] == hf_specdec.__version__
    strangers = {name: file for name, file in answer["modules"].items() if not Path(file).is_relative_to(clean)}
    assert not strangers
    assert answer["prompts"] == [prompt.text for prompt in built_in()]
    for command, text in answer["helps"].items():
        assert re.search(rf"Usage: .*\b{command} \[OPTIONS\]", text), text


def test_the_command_of_the_wheel(answer: dict[str, Any]) -> None:
    assert all(f" {name} " in answer["overview"] for name in COMMANDS), answer["overview"]


def test_the_wheel_generates(answer: dict[str, Any]) -> None:
    """With and without drafts, to the same text."""
    assert "identical: yes" in answer["demo"], answer["demo"]
