"""Targets and drafts by name: a Hub id or a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import WEIGHT_FILES, HubOptions, find_first, read_weights
from ..drafters import NgramDraft
from ..eagle import EagleConfig, EagleHead
from ..medusa import MedusaConfig, MedusaHeads
from ..smollm2 import smollm2_folder


SMOLLM2 = "SmolLM2-135M-Instruct"
"""The target where none is named."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(name: str | None, dtype: torch.dtype, device: str, device_map: str | None = None) -> PreTrainedModel:
    """
    A language model; SmolLM2-135M-Instruct if no name is given. `device_map` puts it where transformers says, instead
    of on one device.

    Raises:
        ImportError, OSError, ValueError: if there is nothing that can be read.
    """
    model = AutoModelForCausalLM.from_pretrained(name or str(smollm2_folder()), dtype=dtype, device_map=device_map)
    return (model if device_map is not None else model.to(device)).eval()


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a target."""
    return AutoTokenizer.from_pretrained(name or str(smollm2_folder()))


def load_draft(name: str, dtype: torch.dtype, device: str) -> Any:
    """
    What `assistant_model=` takes: `ngram`, or an EAGLE head, Medusa heads or a language model, told by its weights.
    Heads are given no dtype: they run in the target's.

    Raises:
        ImportError, OSError, ValueError: if there is nothing that can be read.
    """
    if name == "ngram":
        return NgramDraft()
    kind = kind_of_draft(name)
    if kind == "model":
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    heads: dict[str, Any] = {"eagle": EagleHead, "medusa": MedusaHeads}
    return heads[kind].from_pretrained(name).to(device).eval()


def kind_of_draft(name: str) -> str:
    """
    `eagle`, `medusa` or `model`: whole language models have several layers or names that begin with `model.layers.`.

    Raises:
        OSError: if there is no such folder or repository, or it holds no weights.
        ValueError: if a file is damaged.
    """
    options = HubOptions()
    config = json.loads(options.find(name, "config.json").read_text(encoding="utf-8"))
    if "medusa_num_heads" in config or config.get("model_type") == MedusaConfig.model_type:
        return "medusa"
    keys = _keys(find_first(name, WEIGHT_FILES, options))
    is_head = any(key.split(".")[-2:] == ["fc", "weight"] for key in keys)
    return "eagle" if is_head or config.get("model_type") == EagleConfig.model_type else "model"


def _keys(path: Path) -> set[str]:
    """Names of the tensors in a file, or in those that it is the index of."""
    if path.name.endswith(".index.json"):
        return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    return set(read_weights(path))
