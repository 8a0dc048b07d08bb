"""Compiled code on disk: for one set of versions, whole or not at all, and no more than fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdec.compiling import kept
from hf_specdec.compiling.kept import VARIABLES, KeptCode, compile_cache_of


FILES = {"inductor/fx/a": b"graph", "inductor/b.so": b"code", "triton/c/d.cubin": b"kernel"}


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(kept.logger, "warning", found.append)
    return found


def compiled(root: Path, **options: int) -> KeptCode:
    """Code that a process has compiled, with what a compiler leaves beside it."""
    code = KeptCode(root, "cpu", **options)
    code.use({})
    for name, content in FILES.items() | {("inductor/locks/a.lock", b"")}:
        (code.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (code.folder / name).write_bytes(content)
    code.note()
    return code


def left(code: KeptCode) -> set[str]:
    return {name for name in FILES if (code.folder / name).exists()}


def test_what_is_kept(tmp_path: Path, warnings: list[str]) -> None:
    first, found = compiled(tmp_path), dict[str, str]()
    KeptCode(tmp_path, "cpu").use(found)
    assert found == {name: str(first.folder / own) for name, own in VARIABLES.items()}
    assert left(first) == set(FILES) and not warnings
    assert first.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["root", "folder"])
@pytest.mark.parametrize("how", ["writable by others", "of another user"])
def test_code_that_others_may_have_written(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    """It is not run, and stays as it is."""
    code, found = compiled(tmp_path), dict[str, str]()
    folder = tmp_path if place == "root" else code.folder
    if how == "writable by others":
        folder.chmod(0o770)
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    KeptCode(tmp_path, "cpu").use(found)
    assert not found and left(code) == set(FILES)
    (told,) = warnings
    assert str(folder if how == "writable by others" else tmp_path) in told and "Name a folder of your own" in told


def test_other_versions_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = KeptCode(tmp_path, "cpu").folder
    for name in ("_version", "_cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(kept, name, lambda *_: "another")
            assert KeptCode(tmp_path, "cpu").folder != first
    assert KeptCode(tmp_path, "cpu").folder == first


@pytest.mark.parametrize("name", [*FILES, kept._MANIFEST])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_damage(tmp_path: Path, warnings: list[str], name: str, how: str) -> None:
    code = compiled(tmp_path)
    code._held.close()  # its process has ended
    file, found = code.folder / name, dict[str, str]()
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-1] + (b"" if how == "cut" else b"?"))
    again = KeptCode(tmp_path, "cpu")
    again.use(found)
    if name == kept._MANIFEST and how == "gone":  # as after a process that was killed
        assert left(code) == set(FILES) and not warnings
    else:
        assert not left(code) and len(warnings) == 1 and str(file) in warnings[0]
    assert found == {name: str(code.folder / own) for name, own in VARIABLES.items()}
    again.note()
    KeptCode(tmp_path, "cpu").use({})
    assert len(warnings) <= 1


def test_damage_that_another_process_uses(tmp_path: Path, warnings: list[str]) -> None:
    code, found = compiled(tmp_path), dict[str, str]()
    (code.folder / "inductor/b.so").write_bytes(b"")
    again = KeptCode(tmp_path, "cpu")
    again.use(found)
    assert left(code) == set(FILES) and len(warnings) == 1
    assert not any(str(tmp_path) in place for place in found.values())
    again.note()


def test_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used least recently goes, and nothing that is in use."""
    codes = []
    for number in range(3):
        monkeypatch.setattr(kept, "_version", lambda _, number=number: str(number))
        codes.append(compiled(tmp_path))
        os.utime(codes[-1].folder / kept._LOCK, (number, number))
    size = kept._size_of(codes[0].folder)
    for code in codes[1:]:
        code._held.close()
    monkeypatch.setattr(kept, "_version", lambda _: "new")
    KeptCode(tmp_path, "cpu", most_bytes=2 * size).use({})
    assert [bool(left(code)) for code in codes] == [True, False, True]


def test_files_that_are_renamed_meanwhile(tmp_path: Path, warnings: list[str]) -> None:
    """By another process, between the list of files and the look at their sizes."""
    (compiled(tmp_path).folder / "inductor/gone.tmp").symlink_to("nowhere")
    found = dict[str, str]()
    KeptCode(tmp_path, "cpu").use(found)
    assert found and not warnings


def test_a_folder_that_cannot_be_written(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("")
    code, found = KeptCode(tmp_path / "file", "cpu"), dict[str, str]()
    code.use(found)
    code.note()
    assert not found and len(warnings) == 1


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache_of(None) == str(tmp_path / "hf_specdec" / "compiled")
    assert compile_cache_of("off") is None and compile_cache_of("here") == "here"
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    assert compile_cache_of(None) is None and compile_cache_of("here") == "here"


COMPILES = """
import sys
from pathlib import Path
from hf_specdec.compiling.kept import KeptCode
code = KeptCode(Path(sys.argv[1]), "cpu")
code.use()
import torch
from torch._dynamo.utils import counters
from hf_specdec.compiling.layers import compiled_function

x = torch.arange(8.0)
assert torch.allclose(compiled_function(lambda x: x.sin() + 1)(x), x.sin() + 1)
code.note()
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_processes_one_after_the_other(tmp_path: Path) -> None:
    """The second reads what the first has compiled; the third, which finds it damaged, compiles anew."""

    def hits() -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", COMPILES, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout), done.stderr

    assert hits()[0] == 0 and hits()[0] == 1
    for file in KeptCode(tmp_path, "cpu").folder.glob("inductor/**/*.so"):
        file.write_bytes(file.read_bytes()[:20])
    number, told = hits()
    assert number == 0 and told.count("is damaged") == 1
