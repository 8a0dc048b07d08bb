"""How many positions a model knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, GitConfig

from hf_specdec.models.positions import last_position, num_positions


SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
BERT = {"is_decoder": True, "type_vocab_size": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": SIZES,
    "gpt_bigcode": SIZES,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "biogpt": {},
    "gptj": SIZES,
    "codegen": SIZES | {"rotary_dim": 4},
    "ctrl": SIZES | {"dff": 48},
    "bert": BERT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tables(family: str) -> None:
    """The number after which the model's own forward fails."""
    model = tiny_model(family, dtype=torch.float32, max_position_embeddings=16, **FAMILIES[family])
    ids, mask = torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.long)
    known, last = num_positions(model), last_position(model)
    assert known == 16 and last == 15
    model(input_ids=ids, position_ids=torch.tensor([[last]]), attention_mask=mask)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, position_ids=torch.tensor([[known]]), attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi", "stablelm", "falcon", "gpt_oss"])
def test_rotary_embeddings(family: str) -> None:
    """Whatever the config says."""
    assert num_positions(tiny_model(family, max_position_embeddings=16)) is None


@pytest.mark.parametrize("grows", [False, True])
def test_a_rotary_embedding_with_a_table(grows: bool) -> None:
    """A model of a user's own may keep its cosines, for as many positions as its config says, or for more and more."""
    model = tiny_model(max_position_embeddings=16)
    model.model.rotary_emb.register_buffer("cosines", torch.ones(16, 4))
    model.model.rotary_emb.register_buffer("mask", torch.ones(1, 1, 16, 16))
    if grows:
        model.model.rotary_emb._set_cos_sin_cache = lambda length: None
    assert num_positions(model) == (None if grows else 16)


def test_adapters() -> None:
    """An adapter on the table leaves its number of rows."""
    peft = pytest.importorskip("peft")
    for options in ({"target_modules": ["wpe"]}, {"target_modules": ["c_attn"], "modules_to_save": ["wpe"]}):
        model = tiny_model("gpt2", dtype=torch.float32, max_position_embeddings=16)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, **options))
        assert type(model.transformer.wpe) is not nn.Embedding
        assert num_positions(wrapped) == num_positions(model) == 16


def test_a_table_without_weights_of_its_own() -> None:
    """Where the weights are elsewhere, the config's number stands."""
    model = tiny_model("gpt2", max_position_embeddings=16)
    model.transformer.wpe.weight = nn.Parameter(torch.empty(0))
    assert num_positions(model) == 16


def test_images_have_positions_of_their_own() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
    config = GitConfig(vision_config=sizes | {"image_size": 32, "patch_size": 16}, max_position_embeddings=16, **sizes)
    with torch.device("meta"):
        assert num_positions(AutoModelForCausalLM.from_config(config)) == 16


def test_tables_that_grow() -> None:
    sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 16}
    assert num_positions(tiny_model("xglm", dtype=torch.float32, **sizes)) is None
