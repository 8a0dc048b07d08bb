"""What `torch.compile` and Triton have compiled, kept on disk for later processes by their own caches."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import torch
from transformers.utils import logging

from ..folders import user_cache


logger = logging.get_logger(__name__)

MOST_BYTES = 8 * 2**30
"""Most bytes of compiled code, over all versions and devices, with which a process begins."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Where Inductor and Triton look for compiled code: the folder within ours, by environment variable."""
_MANIFEST, _LOCK = "files.json", "lock"


class KeptCode:
    """
    A folder with compiled code of one set of versions and one kind of device. A process that begins to use it checks
    that its files are those that an earlier one has noted: torch and Triton fail where some of theirs are damaged.

    Args:
        root (`Path`): the folder of all versions and devices.
        device (`str`): the device that code is compiled for.
        most_bytes (`int`, *optional*, defaults to 8 GiB): above this size of `root`, what was used least recently is
            removed.
    """

    def __init__(self, root: Path, device: str, most_bytes: int = MOST_BYTES):
        self._root, self._most_bytes = root, most_bytes
        self.folder = root / _key_of(device)
        """Where the code is."""
        self._held: IO[str] | None = None

    def use(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """
        Lets this process, and those that it starts, use the folder. To be called before anything is compiled. Without
        a folder that can be used, it does nothing but warn.

        Args:
            environment (`MutableMapping`, *optional*): gets torch's and Triton's variables.
        """
        try:
            for folder in (self._root, self.folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _check_owner(folder)
            self._remove_oldest()
            self._held = (self.folder / _LOCK).open("a")
            _lock(self._held)
            os.utime(self._held.name)
            place = self.folder
            if (damaged := self._damaged()) is not None:
                logger.warning(f"{damaged} is damaged: the compiled code beside it is not used.")
                place = self._emptied()
        except OSError as error:
            logger.warning(
                f"Compiled code is not kept: {error}. Name a folder of your own that can be written to, or `off`."
            )
            self._held = None
            return
        environment.update({name: str(place / own) for name, own in VARIABLES.items()})

    def note(self) -> None:
        """Notes the files that there are now, for the checks of later processes. Does nothing if they are not used."""
        if self._held is None:
            return
        try:
            files = {str(path.relative_to(self.folder)): _digest_of(path) for path in self._files()}
            scratch = self.folder / f".{uuid.uuid4().hex}"
            scratch.write_text(json.dumps(files))
            scratch.replace(self.folder / _MANIFEST)
        except OSError as error:
            logger.warning(f"Compiled code is not kept: {error}.")

    def _files(self) -> Iterator[Path]:
        for own in VARIABLES.values():
            for place, folders, names in os.walk(self.folder / own):
                folders[:] = [name for name in folders if name != "locks" and not name.startswith("tmp.")]
                yield from (Path(place, name) for name in names if not name.endswith((".lock", ".tmp")))

    def _damaged(self) -> Path | None:
        """A file that is not as it was noted."""
        manifest = self.folder / _MANIFEST
        if not manifest.exists():
            return None  # an earlier process has ended early; torch and Triton write files at once
        try:
            noted = [(self.folder / str(name), digest) for name, digest in json.loads(manifest.read_text()).items()]
        except (ValueError, AttributeError):
            return manifest
        return next((path for path, digest in noted if not path.is_file() or _digest_of(path) != digest), None)

    def _emptied(self) -> Path:
        """The folder, emptied; while other processes use it, a folder for this process alone."""
        assert self._held is not None
        if not _lock(self._held, alone=True):
            self._held = None
            return Path(tempfile.mkdtemp(prefix="hf_specdec-"))
        _empty(self.folder)
        _lock(self._held)
        return self.folder

    def _remove_oldest(self) -> None:
        """Removes what was used least recently, until the rest is small enough; nothing that is in use."""
        sizes = {folder: _size_of(folder) for folder in self._root.iterdir() if (folder / _LOCK).is_file()}
        total = sum(sizes.values())
        for folder in sorted(sizes, key=lambda one: (one / _LOCK).stat().st_mtime):
            if total <= self._most_bytes:
                break
            with (folder / _LOCK).open("a") as lock:
                if _lock(lock, alone=True):
                    _empty(folder)
                    total -= sizes[folder]


def compile_cache_of(option: str | None) -> str | None:
    """
    The folder of all kept code.

    Args:
        option (`str`, *optional*): the folder; `off` for none. By default one of the user's, unless the environment
            has torch's or Triton's.
    """
    if option is None:
        return None if any(map(os.environ.get, VARIABLES)) else str(user_cache() / "compiled")
    return None if option == "off" else option


def _key_of(device: str) -> str:
    """Versions and device that code is compiled for, as the name of a folder."""
    place = torch.device(device)
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
    else:  # code for one CPU may not run on another
        digest = hashlib.sha256(_cpu().encode()).hexdigest()[:8]
        name = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-{digest}"
    packages = [f"{package}-{_version(package)}" for package in ("hf-specdec", "torch", "triton")]
    parts = [f"python-{platform.python_version()}", *packages, name]
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(parts))


def _check_owner(folder: Path) -> None:
    """Raises `OSError` if others may write to a folder: code in it is run."""
    about = folder.stat()
    if hasattr(os, "getuid") and about.st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user, whose code would be run")
    if os.name == "posix" and about.st_mode & 0o022:
        raise OSError(f"others may write to {folder}, whose code would be run (`chmod go-w {folder}` forbids it)")


def _cpu() -> str:
    """What the first processor can do."""
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2].partition("\n")[0]
    except OSError:
        return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process compiles, and renames its files
                size += Path(place, name).stat().st_size if name != _LOCK else 0
    return size


def _empty(folder: Path) -> None:
    """Removes compiled code so that no reader sees a part of it."""
    for name in (*VARIABLES.values(), _MANIFEST):
        if (folder / name).exists():
            gone = (folder / name).rename(folder / f".{uuid.uuid4().hex}")
            if gone.is_dir():
                shutil.rmtree(gone, ignore_errors=True)
            else:
                gone.unlink()


def _lock(file: IO[str], alone: bool = False) -> bool:
    """Locks a file beside others, or `alone` if nobody else has it locked. Returns whether it is locked."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError("this system cannot lock files") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    return True
