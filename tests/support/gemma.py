"""A tiny Gemma 4 and its assistant, as they are published: what differs between kinds of layers does so here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_specdec import GemmaAssistant
from hf_specdec.compat import CACHE
from hf_specdec.gemma.configuration_gemma import config_of
from hf_specdec.gemma.modeling_gemma import SharedKV


_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
TARGET: dict[str, Any] = _TEXT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
"""The last two layers read the K/V of earlier ones, as in E2B and E4B."""
ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 32,
    "use_ordered_embeddings": True,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 3,
    "tie_word_embeddings": True,
    "text_config": _TEXT
    | {
        "model_type": "gemma4_text",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


def make_target(seed: int = 0, sharpness: float = 3.0, **changes: Any) -> PreTrainedModel:
    """A target in float32, whose matrices are scaled so that it reacts to its input."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model("gemma4_text", **(TARGET | changes))
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.mul_(sharpness) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return target


def write_assistant(folder: Path, seed: int = 0, text: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Writes an assistant's checkpoint; `text` and `changes` are values of its text config and its config."""
    published = ASSISTANT | changes | {"text_config": ASSISTANT["text_config"] | (text or {})}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = GemmaAssistant(config_of("an assistant", published)).state_dict()
        for name, tensor in weights.items():
            if name.endswith("token_ordering"):
                weights[name] = torch.randperm(len(tensor))
            else:
                spread = torch.randn(tensor.shape) * (0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5)
                weights[name] = spread + (1.0 if tensor.dim() == 1 else 0.0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published))
    save_file(weights, folder / "model.safetensors")
    return folder


@torch.no_grad()
def logits_from_scratch(
    target: Any, assistant: GemmaAssistant, text: list[int], path: list[int], before: int = 0
) -> torch.Tensor:
    """
    The assistant's logits after a path of draft tokens below the last token of a text, from K/V that the target
    computes anew, all of them kept; `before`: by how many positions the queries come earlier.
    """
    cache = DynamicCache()  # without a config: no layer drops anything
    features = target.model(input_ids=torch.tensor([text[:-1]]), **{CACHE: cache}).last_hidden_state[:, -1:]
    kinds = target.config.layer_types[: len(cache.layers)]
    shared = {}
    for kind in assistant.layer_kinds:
        layer = cache.layers[max(index for index, its in enumerate(kinds) if its == kind)]
        last = slice(-(7 if kind == "sliding_attention" else 1000), None)  # the window, and one more
        shared[kind] = SharedKV(layer.keys[:, :, last], layer.values[:, :, last])
    for token in [text[-1], *path]:
        embeddings = target.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(features, embeddings, torch.tensor([[len(text) - 1 - before]]), shared)
        features = output.hidden_states
    return output.logits[0, 0]
