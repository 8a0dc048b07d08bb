"""Reading a published checkpoint: a config and weights, from a folder or the Hub, of whatever format."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import torch
from huggingface_hub import constants, get_session, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_SECONDS_TO_ANSWER = 5

# Exceptions that safetensors, zipfile and the unpickler raise on damaged files, found by flipping bytes.
_DAMAGE = (
    SafetensorError,
    zipfile.BadZipFile,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options for finding a checkpoint's files, as in transformers' `from_pretrained`."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str = ""

    def as_arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of `from_pretrained`."""
        return asdict(self)

    def check(self, name: str) -> None:
        """
        Checks that the files of `name` can be looked for: it is a folder, has a config in the cache, or the Hub can be
        reached, which is asked once. (huggingface_hub asks six times, for 24 seconds.)

        Raises:
            OSError: if none of this holds.
        """
        if self.local_files_only or is_offline_mode() or Path(name).exists():
            return  # said at once by `find`
        config = f"{self.subfolder}/config.json" if self.subfolder else "config.json"
        try:
            if isinstance(try_to_load_from_cache(name, config, self.cache_dir, self.revision), str):
                return
        except HFValidationError:  # no repository's name: said at once, too
            return
        client = get_session()
        library = import_module(type(client).__module__.partition(".")[0])  # httpx, of one version or another
        try:
            client.head(constants.ENDPOINT, timeout=_SECONDS_TO_ANSWER)
        except library.TransportError as error:
            raise OSError(
                f"There is no folder {name!r}, and {constants.ENDPOINT} cannot be reached to look for a repository of "
                f"this name ({error}). Name a folder that exists, or one that was downloaded before."
            ) from error

    @overload
    def find(self, name: str, file: str) -> Path: ...

    @overload
    def find(self, name: str, file: str, required: bool) -> Path | None: ...

    def find(self, name: str, file: str, required: bool = True) -> Path | None:
        """
        The local path of a file of a folder or Hub repository, downloaded if need be; None if a file that is not
        `required` is missing.

        Raises:
            OSError: if a `required` file is missing, or the repository cannot be reached.
        """
        path = cached_file(name, file, **self.as_arguments(), _raise_exceptions_for_missing_entries=required)
        if path is None and required:
            where = "" if self.revision is None else f" at revision {self.revision!r}"
            raise OSError(f"{name}: there is no {file}{where}.")
        return None if path is None else Path(path)


@dataclass(eq=False)
class Checkpoint:
    """
    A published checkpoint, as it was published.

    Args:
        name (`str`): folder or Hub repository.
        config (`dict`): content of config.json.
        weights (`dict[str, torch.Tensor]`): the tensors, by their published names.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor] = field(repr=False)

    @classmethod
    def read(
        cls, name: str | Path, options: HubOptions | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
    ) -> Checkpoint:
        """
        Reads config.json and the first of `weight_files` that exists. Pickles are read with `weights_only=True`.

        Raises:
            OSError: if there is no such folder or repository, or a file is missing.
            ValueError: if a file is damaged.
        """
        name, options = str(name), options or HubOptions()
        options.check(name)
        config_path = options.find(name, "config.json")
        # All files come from the config's revision, even if a new one is pushed meanwhile.
        options = replace(options, revision=extract_commit_hash(str(config_path), None) or options.revision)
        config = read_config(name, config_path)
        path = find_first(name, weight_files, options)
        weights: dict[str, torch.Tensor] = {}
        for shard in shard_paths(name, path, options):
            weights |= read_weights(shard)
        return cls(name, config, weights)


def without_prefix(checkpoint: Checkpoint) -> Checkpoint:
    """
    The checkpoint without the prefix `model.`, which heads converted for vLLM have before all names but those of `fc`
    and the lm_head.
    """
    weights = checkpoint.weights
    if not any(key in weights for key in ("fc.weight", "model.fc.weight")):
        return checkpoint
    if not any(key.startswith("model.") for key in weights):
        return checkpoint
    weights = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
    if len(weights) != len(checkpoint.weights):
        raise ValueError(f"{checkpoint.name}: the checkpoint holds the same tensors with and without `model.`.")
    return Checkpoint(checkpoint.name, checkpoint.config, weights)


def read_config(name: str, path: Path) -> dict[str, Any]:
    """
    The content of a config.json.

    Raises:
        ValueError: if it is not JSON, or no object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: config.json is not valid JSON ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{name}: config.json must hold an object, but holds {type(config).__name__}.")
    return config


def find_first(name: str, files: tuple[str, ...], options: HubOptions) -> Path:
    """
    The local path of the first of `files` that the folder or repository `name` has.

    Raises:
        OSError: if it has none of them.
    """
    for file in files:
        path = options.find(name, file, required=False)
        if path is not None:
            return path
    hint = ""
    if options.find(name, "medusa_lm_head.pt", required=False) is not None:
        hint = " It holds Medusa heads: use `hf_specdec.MedusaHeads.from_pretrained`."
    elif options.find(name, "adapter_config.json", required=False) is not None:
        hint = " It holds a PEFT adapter, not a head."
    try:
        return options.find(name, files[0])  # says whether it is not there, or the Hub cannot be reached
    except OSError as error:
        raise OSError(
            f"{name}: there are no weights; looked for {', '.join(files)}.{hint} ({str(error).splitlines()[0]})"
        ) from error


def shard_paths(name: str, path: Path, options: HubOptions) -> list[Path]:
    """
    The local paths of the weight files: `path` itself, or the shards that it lists if it is an index.

    Raises:
        OSError: if a shard is missing.
        ValueError: if the index is damaged.
    """
    if not path.name.endswith(".index.json"):
        return [path]
    try:
        files = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {path.name} is damaged ({error!r}). Download it again.") from error
    outside = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if outside or not files:
        found = repr(outside[0]) if outside else "nothing"
        raise ValueError(f"{name}: {path.name} must name files beside it, but names {found}. Download it again.")
    return [options.find(name, file) for file in files]


def tensor_names(path: Path) -> set[str]:
    """
    Names of the tensors in a weight file, or in all files of an index, without reading the tensors where the format
    allows it.

    Raises:
        ValueError: if the file is damaged, or holds anything but tensors.
    """
    try:
        if path.name.endswith(".index.json"):
            return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return set(file.keys())
        return set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        if path.suffix != ".bin":
            raise ValueError(f"{path}: the file is damaged or cut short ({error}). Download it again.") from error
        return set(read_weights(path))  # an old pickle, which cannot be mapped; or a damaged one, which this says


def read_weights(path: Path, only: Container[str] | None = None) -> dict[str, torch.Tensor]:
    """
    The tensors of one weight file, by name.

    Args:
        path (`Path`): the file.
        only (`Container[str]`, *optional*): names of the tensors to read; all by default. Of a pickle, all are read.

    Raises:
        ValueError: if the file is damaged, or holds anything but tensors.
    """
    if path.suffix == ".safetensors":
        try:
            if only is None:
                return load_file(path)
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys() if key in only}  # noqa: SIM118
        except _DAMAGE as error:
            raise ValueError(f"{path}: the file is damaged or cut short ({error}). Download it again.") from error
    weights = load_pickle(path)
    if not isinstance(weights, dict):
        raise ValueError(f"{path}: must hold a dict of tensors, but holds {type(weights).__name__}.")
    for key, tensor in weights.items():
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path}: must hold a dict of tensors, but `{key}` is {type(tensor).__name__}. If the tensors are one "
                "level below, save that level."
            )
    return weights if only is None else {key: tensor for key, tensor in weights.items() if key in only}


def load_pickle(path: Path) -> Any:
    """
    The content of a pickle, read with `weights_only=True`.

    Raises:
        ValueError: if the file is damaged, or holds anything that could run code.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: the pickle is damaged, or holds more than tensors, which is not loaded since it could run code "
            f"({str(error).splitlines()[0]}). Ask its author for safetensors."
        ) from error
    except _DAMAGE as error:
        raise ValueError(f"{path}: the file is damaged or cut short ({error}). Download it again.") from error
