"""The decoder layers of a head: their kind, number, rotary embedding and windows, as weights and configs say."""

import pytest
import torch
from support.eagle import (
    EAGLE_1,
    SAFEAILAB,
    SPECULATORS,
    Rows,
    arrays,
    features_of,
    publish,
    published,
)
from support.goldens import trained_target

from hf_specdec.eagle import EagleHead


def test_qwen3_layers(tmp_path):
    config, weights = published(SPECULATORS)
    norms = {f"layers.0.self_attn.{name}_norm.weight": torch.full((16,), 1.5) for name in "qk"}
    config["transformer_layer_config"] |= {"model_type": "qwen3", "num_attention_heads": None}
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights | norms))
    assert head.config.text_config.model_type == "qwen3"
    assert (head.config.text_config.head_dim, head.config.text_config.num_attention_heads) == (16, 4)
    assert torch.equal(head.layers[0].self_attn.q_norm.weight, torch.full((16,), 1.5))


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB])
def test_biases_of_attention_and_mlp(golden, tmp_path):
    config, weights = published(golden)
    layer = "layers.0." if golden == EAGLE_1 else "midlayer."
    qkv = {
        f"{layer}self_attn.{name}_proj.bias": torch.ones(size) for name, size in zip("qkv", (64, 32, 32), strict=True)
    }
    head = EagleHead.from_pretrained(publish(tmp_path / "qkv", config, weights | qkv))
    assert head.config.text_config.model_type == "qwen2"
    assert torch.equal(head.layers[0].self_attn.k_proj.bias, torch.ones(32))
    assert head.layers[0].self_attn.o_proj.bias is None
    rest = {f"{layer}self_attn.o_proj.bias": torch.ones(64)} | {
        f"{layer}mlp.{name}_proj.bias": torch.ones(size)
        for name, size in zip(("gate", "up", "down"), (96, 96, 64), strict=True)
    }
    head = EagleHead.from_pretrained(publish(tmp_path / "all", config, weights | qkv | rest))
    assert head.config.text_config.model_type == "llama"
    assert torch.equal(head.layers[0].mlp.up_proj.bias, torch.ones(96))


@pytest.mark.parametrize("golden", [EAGLE_1, SPECULATORS])
def test_several_layers(golden, tmp_path):
    """Layers behind the first are plain decoder layers, with a norm before their attention."""
    config, weights = published(golden)
    target = trained_target().model.layers[3].state_dict()
    second = {f"layers.1.{key}": tensor.clone() for key, tensor in target.items()}
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights | second)).eval()
    assert head.config.text_config.num_hidden_layers == 2
    assert torch.equal(head.layers[1].input_layernorm.weight, target["input_layernorm.weight"])
    # Row by row with a cache is the same as at once: every layer has its own mask and keys.
    expected = arrays(golden)
    tokens, features = expected["head_input_ids"], features_of(head, expected["input_ids"])
    together, rows = Rows(head).feed(tokens, features).logits, Rows(head)
    one_by_one = [rows.feed(tokens[:, row : row + 1], features[:, row : row + 1]).logits for row in range(24)]
    torch.testing.assert_close(torch.cat(one_by_one, 1), together, atol=1e-5, rtol=0)
    assert (together - expected["head_logits"]).abs().max() > 0.1


PLAIN = {"rope_type": "default", "rope_theta": 5e5}


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# What a config says, and what it means.
ROPES = {
    "outside": ({"rope_theta": 5e5}, PLAIN),
    "inside": ({"rope_parameters": PLAIN}, PLAIN),
    "neither": ({}, PLAIN | {"rope_theta": 1e4}),
    "null inside": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": None}}, PLAIN),
    "both": ({"rope_theta": 1e4, "rope_scaling": PLAIN}, PLAIN),
    "old name of the type": ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, LINEAR),
    "scaling beside parameters": (
        {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        LINEAR,
    ),
    "multimodal": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        PLAIN | {"mrope_section": [2, 3, 3]},
    ),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": LLAMA_3}, LLAMA_3 | {"rope_theta": 5e5}),
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embeddings(rope, tmp_path):
    config, weights = published(SAFEAILAB)
    given, expected = ROPES[rope]
    head = EagleHead.from_pretrained(publish(tmp_path, config | given, weights))
    assert head.config.text_config.rope_parameters == expected
    assert ("rope_theta" in head.config.conventions) == (rope == "neither")
    frequencies = head.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies[0], torch.tensor(0.5 if "linear" in str(expected) else 1.0))


def test_windows_that_are_asked_for(tmp_path):
    config, weights = published(SPECULATORS)
    layers = config["transformer_layer_config"]
    layers |= {"sliding_window": 2048, "layer_types": ["sliding_attention"]}
    text_config = EagleHead.from_pretrained(publish(tmp_path / "types", config, weights)).config.text_config
    assert (text_config.sliding_window, text_config.layer_types) == (2048, ["sliding_attention"])
    layers["layer_types"] = ["full_attention"]
    assert (
        EagleHead.from_pretrained(publish(tmp_path / "full", config, weights)).config.text_config.sliding_window
        is None
    )
    del layers["layer_types"]
    layers["use_sliding_window"] = True
    text_config = EagleHead.from_pretrained(publish(tmp_path / "use", config, weights)).config.text_config
    assert (text_config.sliding_window, text_config.layer_types) == (2048, ["sliding_attention"])
