"""Contexts of models, by their configs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, FalconConfig, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from hf_specdec.serving.contexts import context_of


def scaled(kind: str, **rope: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e6} | rope


@pytest.mark.parametrize(
    "config, context",
    [
        (LlamaConfig(max_position_embeddings=2048), 2048),
        (LlamaConfig(max_position_embeddings=2048, rope_parameters=scaled("linear", factor=4.0)), 8192),
        # As the cards of Qwen2.5 say, and as those of DeepSeek-V3.
        (
            Qwen2Config(
                max_position_embeddings=32768,
                rope_parameters=scaled("yarn", factor=4.0, original_max_position_embeddings=32768),
            ),
            131072,
        ),
        (
            Qwen2Config(
                max_position_embeddings=163840,
                rope_parameters=scaled("yarn", factor=40.0, original_max_position_embeddings=4096),
            ),
            163840,
        ),
        (GPT2Config(n_positions=1024), 1024),
        (FalconConfig(alibi=True), None),
        (AutoConfig.for_model("gemma3_text", max_position_embeddings=4096), 4096),
        (PreTrainedConfig(), None),
    ],
    ids=["plain", "linear", "yarn", "yarn, already stretched", "learned", "alibi", "by layers", "unknown"],
)
def test_contexts(config: PreTrainedConfig, context: int | None) -> None:
    assert context_of(config) == context
