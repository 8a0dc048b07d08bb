"""Configs that contradict the weights, and checkpoints of other models: an error that names what is wrong."""

import json

import pytest
import torch
from support.eagle import EAGLE_1, GOLDENS, MODELOPT, SAFEAILAB, SPECFORGE, SPECULATORS, publish, published, refused
from support.goldens import TINY_TARGET

from hf_specdec.eagle import EagleHead


CONFIGS = {
    "heads": ({"num_attention_heads": None}, "neither `num_attention_heads` nor `head_dim`"),
    "heads that do not fit": ({"num_attention_heads": 5}, "`num_attention_heads`=5"),
    "head_dim that does not fit": ({"head_dim": 24}, "`head_dim`=24"),
    "both at odds": ({"num_attention_heads": 8, "head_dim": 16}, "do not fit the weights: q_proj has 64 rows"),
    "text for a number": ({"num_attention_heads": "4"}, "`num_attention_heads`='4' in config.json must be a positive"),
    "zero": ({"num_attention_heads": 0}, "`num_attention_heads`=0"),
    "activation": ({"hidden_act": "sillu"}, "`hidden_act`='sillu' in config.json is unknown"),
    "epsilon": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "target size": ({"target_hidden_size": 48}, "`embed_tokens.weight` is missing"),
    "target size as text": ({"target_hidden_size": "64"}, "`target_hidden_size`='64'"),
    "rope type": ({"rope_scaling": {"type": "spiral"}}, "`rope_type`='spiral' in config.json is unknown"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "rope as text": ({"rope_scaling": "yarn"}, "`rope_scaling`='yarn' in config.json must be one flat object"),
    "rope by kind of layer": ({"rope_parameters": {"full_attention": {}}}, "must be one flat object"),
    "rope base": ({"rope_theta": "1e4"}, "`rope_theta`='1e4'"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`=0.5"),
    "window": ({"layer_types": ["sliding_attention"]}, "`sliding_window`, which is missing"),
    "window as text": ({"layer_types": ["sliding_attention"], "sliding_window": "8"}, "`sliding_window`='8'"),
    "layer types": ({"layer_types": ["linear_attention"]}, "`layer_types`=['linear_attention']"),
    "too few layer types": ({"layer_types": []}, "for each of 1 layers"),
    "number of layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "has 2 layers, but the head reads 3"),
    "layers as text": ({"eagle_aux_hidden_state_layer_ids": "low"}, "must be a list of layer numbers"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, tmp_path):
    config, weights = published(SAFEAILAB)
    changes, message = CONFIGS[name]
    for field, value in changes.items():
        config[field] = value
    refused(publish(tmp_path, config, weights), str(tmp_path), message)


def test_width_of_fc(tmp_path):
    config, weights = published(SPECULATORS)
    config["target_hidden_size"] = 50
    refused(publish(tmp_path, config, weights), "`fc.weight` reads 192 values", "target's hidden size 50")
    config, weights = published(EAGLE_1)
    weights["fc.weight"] = torch.ones(64, 192)
    refused(
        publish(tmp_path, config, weights), "`fc.weight` reads 192 values", "EAGLE-1 head of hidden size 64", "128"
    )


@pytest.mark.parametrize("kind", ["mlp", "mtp", None])
def test_other_kinds_of_speculators(kind, tmp_path):
    config, weights = published(SPECULATORS)
    config["speculators_model_type"] = kind
    refused(publish(tmp_path, config, weights), f"`speculators_model_type`={kind!r}", "'eagle3' and 'eagle'")


@pytest.mark.parametrize("value", [None, 3, []])
def test_speculators_without_layers(value, tmp_path):
    config, weights = published(SPECULATORS)
    config["transformer_layer_config"] = value
    refused(publish(tmp_path, config, weights), "`transformer_layer_config` in config.json must be an object")


def test_speculators_extra_norms(tmp_path):
    _, weights = published(EAGLE_1)
    config = {"speculators_model_type": "eagle", "layernorms": True, "transformer_layer_config": {}}
    refused(publish(tmp_path, config, weights), "`layernorms`=True")


def test_norms_that_the_config_announces(tmp_path):
    config, weights = published(SPECULATORS)
    refused(publish(tmp_path, config | {"norm_before_fc": True}, weights), "`input_norm.weight` is missing (192)")
    refused(publish(tmp_path, config | {"fc_norm": True}, weights), "`fc_norm.0.weight` is missing (64)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel_draft_step": 4}, "`parallel_draft_step`=4"),
        ({"use_mtp_layernorm": True}, "`use_mtp_layernorm`=True"),
    ],
)
def test_modelopts_other_heads(options, message, tmp_path):
    config, weights = published(MODELOPT)
    config["eagle_config"] |= options
    refused(publish(tmp_path, config, weights), message)


@pytest.mark.parametrize("golden", [SPECFORGE, SAFEAILAB])
def test_options_that_are_no_object(golden, tmp_path):
    config, weights = published(golden)
    refused(
        publish(tmp_path, config | {"eagle_config": "x"}, weights), "`eagle_config` in config.json must be an object"
    )


def test_our_own_format(tmp_path):
    EagleHead.from_pretrained(GOLDENS / SAFEAILAB).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value, word in (
        ("eagle_version", 7, "`eagle_version` must be 1 or 3"),
        ("aux_layer_convention", "up", "`aux_layer_convention`"),
        ("text_config", {"model_type": "nothing"}, "nothing"),
        ("text_config", 3, "`text_config` must be a config or a dict, but is 3"),
        ("text_config", config["text_config"] | {"hidden_size": "64"}, "hidden_size"),
        ("text_config", config["text_config"] | {"model_type": "gpt2"}, "text_config"),
        ("draft_vocab_size", 255, "`d2t` must be 255, but is 256"),
        ("final_norm", False, "`norm.weight` is unknown"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        refused(tmp_path, word)


def test_an_ordinary_language_model():
    message = refused(TINY_TARGET, "is a whole language model", "AutoModelForCausalLM")
    assert "tiny_target" in message


def test_medusa_heads(tmp_path):
    refused(GOLDENS / "medusa", "there are no weights", "Medusa heads", error=OSError)
    weights = torch.load(GOLDENS / "medusa" / "medusa_lm_head.pt")
    refused(publish(tmp_path, {}, weights), "holds Medusa heads", "MedusaHeads")


def test_an_adapter(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "PEFT adapter", error=OSError)


def test_an_encoder(tmp_path):
    weights = {
        "embeddings.word_embeddings.weight": torch.ones(8, 4),
        "encoder.layer.0.output.dense.bias": torch.ones(4),
    }
    refused(publish(tmp_path, {"model_type": "bert"}, weights), "has no `layers.0.self_attn.o_proj.weight`")


def test_latent_attention(tmp_path):
    config, weights = published(SAFEAILAB)
    renamed = {key.replace("q_proj", "q_a_proj"): tensor for key, tensor in weights.items()}
    refused(publish(tmp_path, config, renamed), "has no `layers.0.self_attn.q_proj.weight`")
