"""Targets, heads and prompts that contenders share, in files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from suite.sizes import LLAMA_8B, TINY
from transformers import LlamaConfig

from hf_specdec import EagleConfig, EagleHead


SHAPES = {"8b": LLAMA_8B.shape, "tiny": TINY.shape | {"head_dim": 16}}
"""Fields of a `LlamaConfig`, by name."""
DRAFT_TOKENS = 32_000


def random_target(shape: str, dtype: str, folder: Path) -> str:
    """Writes the config of a Llama of a shape, whose weights every contender draws; returns the folder."""
    config = LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=dtype
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def random_head(shape: str, dtype: str, device: str, folder: Path) -> str:
    """Writes an EAGLE-3 head of one layer with random weights for a target of a shape; returns the folder."""
    sizes = SHAPES[shape] | {"model_type": "llama", "num_hidden_layers": 1}
    torch.manual_seed(0)
    with torch.device(device):
        head = EagleHead(EagleConfig(text_config=sizes, draft_vocab_size=min(DRAFT_TOKENS, sizes["vocab_size"] // 2)))
    head.to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def converted(source: str, format: str, target: str, folder: Path) -> str:
    """The folder of a head in another format, written by `hf-specdec convert`."""
    command = [sys.executable, "-m", "hf_specdec.cli", "convert", source, str(folder), "--to", format]
    # The target is read for its number of layers, or for tensors that a format copies.
    done = subprocess.run([*command, "--target", target], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{source} cannot be written as {format}: {done.stderr[-1000:]}")
    return str(folder)


def has_package(python: str, package: str) -> bool:
    """Whether a Python interpreter finds a package, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def described(values: dict[str, Any]) -> str:
    """Names and values on one line."""
    return ", ".join(f"{name}={value}" for name, value in values.items())
