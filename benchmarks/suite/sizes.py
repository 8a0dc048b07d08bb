"""Sizes of the suite's random models and texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_specdec.trees import TokenTree
from hf_specdec.trees.auto_tables import likeliest_paths


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """
    Sizes of a run of the suite.

    Args:
        shape (`dict`): fields of a `LlamaConfig`.
        context (`int`): tokens of the context of P1's verification.
        prompt (`int`): tokens of the random prompts of P2 and P3.
        num_prompts (`int`): prompts of P2 and P3.
        max_new_tokens (`int`): new tokens of timed calls.
        gate_tokens (`int`): new tokens of the comparison in float32.
        repeats (`int`): timings of a forward.
    """

    shape: dict[str, Any]
    context: int
    prompt: int
    num_prompts: int
    max_new_tokens: int
    gate_tokens: int
    repeats: int


LLAMA_8B = Sizes(
    shape={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    context=1024,
    prompt=512,
    num_prompts=3,
    max_new_tokens=256,
    gate_tokens=32,
    repeats=50,
)
"""Sizes with the model shape of Llama-3.1-8B."""

TINY = Sizes(
    shape={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    },
    context=48,
    prompt=16,
    num_prompts=2,
    max_new_tokens=48,
    gate_tokens=16,
    repeats=5,
)
"""Sizes that try the code on any machine, within seconds."""


def random_llama(shape: dict[str, Any], dtype: torch.dtype, device: str, seed: int = 0) -> PreTrainedModel:
    """A Llama with random weights, created on the device, without an end token."""
    config = LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    devices = [torch.device(device).index or 0] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def tree_of(num_nodes: int, depth: int) -> TokenTree:
    """
    A static tree for a good draft: the likeliest paths if the child of rank 0, 1, … is accepted with probability 0.75,
    0.12, …
    """
    chances = [[0.75, 0.12, 0.05, 0.03, 0.02]] * depth
    return TokenTree(path for _, path in likeliest_paths(chances, num_nodes, depth))
