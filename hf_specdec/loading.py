"""Loading of targets and drafts by name: a Hub id or a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .checkpoints.reading import WEIGHT_FILES, HubOptions, find_first, read_weights
from .drafters import NgramDraft
from .eagle import EagleConfig, EagleHead
from .medusa import MedusaConfig, MedusaHeads
from .smollm2 import smollm2_folder


SMOLLM2 = "SmolLM2-135M-Instruct"
"""Name of the default target."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> str:
    """The device `cuda` where PyTorch finds one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(name: str | None, dtype: torch.dtype, device: str, device_map: str | None = None) -> PreTrainedModel:
    """
    Loads a language model in evaluation mode; SmolLM2-135M-Instruct if `name` is None.

    Args:
        name (`str`, *optional*): Hub id or folder.
        dtype (`torch.dtype`): dtype of the weights.
        device (`str`): device of the model, unless `device_map` is given.
        device_map (`str`, *optional*): placement over several devices, as in transformers.

    Raises:
        ImportError, OSError, ValueError: if no model can be read.
    """
    check_place(name)
    model = AutoModelForCausalLM.from_pretrained(name or str(smollm2_folder()), dtype=dtype, device_map=device_map)
    return (model if device_map is not None else model.to(device)).eval()


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """
    The tokenizer of a target.

    Raises:
        OSError, ValueError: if there is nothing that can be read.
    """
    check_place(name)
    return AutoTokenizer.from_pretrained(name or str(smollm2_folder()))


def load_draft(name: str, dtype: torch.dtype, device: str) -> Any:
    """
    Loads a value of `assistant_model=`: for `ngram` an `NgramDraft`, else the EAGLE head, Medusa heads or language
    model of that name, see `kind_of_draft`.

    Heads are loaded without `dtype`, because they run in the target's.

    Raises:
        ImportError, OSError, ValueError: if no draft can be read.
    """
    if name == "ngram":
        return NgramDraft()
    check_place(name)
    kind = kind_of_draft(name)
    if kind == "model":
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    heads: dict[str, Any] = {"eagle": EagleHead, "medusa": MedusaHeads}
    return heads[kind].from_pretrained(name).to(device).eval()


def check_place(name: str | None) -> None:
    """
    Checks that a name is a folder with files in it, or may be a Hub id that can be looked for.

    Raises:
        OSError: if it is neither, or the Hub cannot be reached.
    """
    if name is None:
        return
    folder = Path(name)
    if folder.is_dir() and not any(folder.iterdir()):
        raise OSError(f"The folder {name!r} is empty. Name one with a model's files (config.json, *.safetensors).")
    if not folder.exists() and not _is_hub_id(name):
        raise OSError(f"There is no folder {name!r}, and it is no Hub id (owner/name). Name one that exists.")
    HubOptions().check(name)


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def kind_of_draft(name: str) -> str:
    """
    The kind of a draft, by its config and the names of its weights: `eagle`, `medusa` or `model`.

    Medusa heads have `medusa_num_heads` or their `model_type` in the config; EAGLE heads their `model_type`, or a
    weight named `fc.weight`; any other draft is a language model.

    Raises:
        OSError: if there is no such folder or repository, or it holds no weights.
        ValueError: if a file is damaged.
    """
    options = HubOptions()
    options.check(name)
    config = json.loads(options.find(name, "config.json").read_text(encoding="utf-8"))
    if "medusa_num_heads" in config or config.get("model_type") == MedusaConfig.model_type:
        return "medusa"
    keys = _keys(find_first(name, WEIGHT_FILES, options))
    is_head = any(key.split(".")[-2:] == ["fc", "weight"] for key in keys)
    return "eagle" if is_head or config.get("model_type") == EagleConfig.model_type else "model"


def _keys(path: Path) -> set[str]:
    """Names of the tensors in a weight file, or in all files of a weight index."""
    if path.name.endswith(".index.json"):
        return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    return set(read_weights(path))
