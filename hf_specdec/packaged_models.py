"""Models without the Hub: folders for `from_pretrained`, made once of the GGUF files that packages of PyPI carry."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .folders import user_cache


logger = logging.get_logger(__name__)

CONTROL_TOKEN = 3
"""`token_type` of special tokens in GGUF metadata."""


class GgufFile:
    """
    What a GGUF file holds.

    Attributes:
        path (`pathlib.Path`): the file.
        metadata (`dict[str, Any]`): its fields by name.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self._reader = GGUFReader(path)
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}

    def weights(self, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Yields the tensors, one after the other, in float32, with the dimensions in the order of PyTorch.

        Args:
            names (`dict[str, str]`): modules of the model by what the file calls them: those of a layer by the part
                after `blk.N.`, to be found in `model.layers.N`.

        Raises:
            ValueError: for a tensor that has no name there.
        """
        from gguf import dequantize

        for tensor in self._reader.tensors:
            module, _, kind = tensor.name.rpartition(".")
            block, _, part = module.rpartition(".")
            if part not in names:
                raise ValueError(f"{self.path.name}: no module is known for the tensor {tensor.name!r}.")
            name = f"{names[part]}.{kind}"
            if block:
                name = f"model.layers.{block.removeprefix('blk.')}.{name}"
            # A copy: what is float32 in the file comes as it lies there, where nothing can be written.
            yield name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def special_token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """The special tokens in a GGUF file's metadata, as arguments of a config."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {f"{name}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}


def sizes_of(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The sizes of a decoder in a GGUF file's metadata, as arguments of a config."""
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    found = {name: metadata[f"{architecture}.{key}"] for name, key in names.items()}
    return found | {"vocab_size": len(metadata["tokenizer.ggml.tokens"])}


def save_model(
    folder: Path, architecture: str, config: PreTrainedConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """
    Writes a model's config, generation config and weights, these in bfloat16 and without that of a tied `lm_head`.

    Args:
        folder (`pathlib.Path`): the folder.
        architecture (`str`): name of the model's class.
        config (`PreTrainedConfig`): the model's config.
        weights (`Iterable[tuple[str, torch.Tensor]]`): its weights by name, of which one is there at a time.
    """
    config.architectures, config.dtype = [architecture], torch.bfloat16
    config.save_pretrained(folder)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{name: getattr(config, name) for name in names}).save_pretrained(folder)
    state = {name: weight.to(torch.bfloat16) for name, weight in weights}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """
    A model in a GGUF file that packages carry, whole or in parts.

    Attributes:
        name (`str`): the model, in messages.
        packages (`tuple[str, ...]`): packages with the file, or with its parts in this order.
        files (`str`): pattern of the file, or the part, in a package's folder.
        install (`str`): the command that installs them.
        variable (`str`): environment variable that names another GGUF file.
        hub_id (`str`): the model on the Hub.
        expected (`dict[str, Any]`): metadata by which the model's files are told from others.
        layout (`int`): part of the folder's name, to be raised when `write` changes what it writes.
        write (`Callable[[GgufFile, Path], None]`): writes weights and tokenizer into a folder.
    """

    name: str
    packages: tuple[str, ...]
    files: str
    install: str
    variable: str
    hub_id: str
    expected: dict[str, Any]
    layout: int
    write: Callable[[GgufFile, Path], None]

    def folder(self, cache_dir: str | os.PathLike[str] | None = None) -> Path:
        """
        The folder of the model, converted if it is not there. Its name contains the SHA-256 of the GGUF file, so that
        another file never meets a stale conversion.

        Args:
            cache_dir (`str` or `os.PathLike`, *optional*): where folders are kept. Defaults to
                `$XDG_CACHE_HOME/hf_specdec`, or `~/.cache/hf_specdec`.

        Raises:
            FileNotFoundError: no GGUF file: neither the variable nor the packages are there.
            ImportError: a conversion is due, and `gguf` is missing.
            ValueError: the file is that of another model.
        """
        parts = self.find()
        digest = _digest_of(*((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts))
        root = Path(cache_dir) if cache_dir is not None else user_cache()
        stem = parts[0].name.partition(".gguf")[0]
        folder = root / f"{stem}-{digest[:12]}-v{self.layout}"
        if not folder.is_dir():
            self._convert(parts, folder)
        return folder

    def find(self) -> list[Path]:
        """
        The GGUF file, or its parts in order: what the environment names, else what the installed packages carry. They
        are not imported.

        Raises:
            FileNotFoundError: neither is there.
        """
        named = os.environ.get(self.variable)
        if named:
            path = Path(named).expanduser().resolve()
            if not path.is_file():
                raise FileNotFoundError(
                    f"{self.variable}={named!r} does not name a file. Set it to a GGUF file of {self.name}, or unset "
                    f"it to use what is in {' and '.join(self.packages)}."
                )
            return [path]
        found = [_first_file(package, self.files) for package in self.packages]
        missing = [package for package, file in zip(self.packages, found, strict=True) if file is None]
        if missing:
            raise FileNotFoundError(
                f"{self.name} is not on this machine ({', '.join(missing)}). Install what carries it with "
                f"`{self.install}`, set {self.variable} to a GGUF file of it, or use the Hub id {self.hub_id!r} in "
                "place of this folder."
            )
        return [file for file in found if file is not None]

    def _convert(self, parts: list[Path], folder: Path) -> None:
        """
        Writes `folder`, all or nothing.

        Everything goes into a private folder beside it, which is renamed last: a reader never sees a half-written one,
        and of two processes that convert at once the slower discards its copy.
        """
        if importlib.util.find_spec("gguf") is None:
            raise ImportError(
                f"Converting {parts[0].name} needs gguf: `pip install gguf`, or `pip install 'hf-specdec[demo]'`."
            )
        logger.warning(f"Converting the GGUF file of {self.name} to safetensors, once, into {folder}")
        scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        made, joined = scratch / "model", scratch / "whole.gguf"
        made.mkdir(parents=True)
        try:
            if len(parts) > 1:
                _join(parts, joined)
            file = GgufFile(joined if len(parts) > 1 else parts[0])
            self._check(file, parts[0])
            self.write(file, made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # not the other process's doing
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _check(self, file: GgufFile, path: Path) -> None:
        wrong = {name: file.metadata.get(name) for name, value in self.expected.items()}
        wrong = {name: value for name, value in wrong.items() if value != self.expected[name]}
        if wrong:
            values = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            instead = " and ".join(repr(self.expected[name]) for name in wrong)
            raise ValueError(
                f"{path} is not a GGUF file of {self.name}: {values} instead of {instead}. Point {self.variable} at "
                "one that is."
            )


@cache
def _digest_of(*parts: tuple[Path, int, int]) -> str:
    """SHA-256 of files one after the other, each with its size and the time of its last change."""
    digest = hashlib.sha256()
    for part, _, _ in parts:
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _first_file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return min((file for folder in folders for file in Path(folder).glob(pattern)), default=None)


def _join(parts: list[Path], whole: Path) -> None:
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
