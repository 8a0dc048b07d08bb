"""What a head is, is told by its weights: configs of published heads are silent, ambiguous or wrong."""

import pytest
import torch
from support.eagle import (
    EAGLE_1,
    MODELOPT,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    arrays,
    equal_weights,
    golden_rows,
    head_of,
    largest_difference,
    publish,
    publish_shards,
    published,
)
from support.goldens import trained_target

from hf_specdec.eagle import EagleHead


def reproduces(folder, golden, suffix="", **options):
    head = EagleHead.from_pretrained(folder, **{"dtype": torch.float32} | options).eval()
    assert max(largest_difference(golden_rows(head, golden), golden, suffix).values()) < 1e-4
    return head


@pytest.mark.parametrize(
    ("golden", "version", "source"),
    [
        (EAGLE_1, 1, "safeailab_eagle1"),
        (SAFEAILAB, 3, "safeailab_eagle3"),
        (SPECULATORS, 3, "speculators_eagle3"),
        (SPECFORGE, 3, "specforge_eagle3"),
        (MODELOPT, 3, "modelopt_eagle3"),
    ],
)
def test_formats(golden, version, source):
    config = head_of(golden).config
    assert (config.eagle_version, config.source_format) == (version, source)
    assert (config.hidden_size, config.target_hidden_size, config.vocab_size) == (64, 64, 512)
    assert config.draft_vocab_size == (None if version == 1 else 256)


MISLEADING = {
    "forty layers": {"num_hidden_layers": 40},
    "tied embeddings": {"tie_word_embeddings": True},
    "no architectures": {"architectures": None},
    "no model type": {"model_type": None},
    "another model type": {"model_type": "qwen2"},
    "a window that nothing asks for": {"sliding_window": 4, "max_window_layers": 28},
    "a window switched off": {"sliding_window": 4, "use_sliding_window": False},
    "the target's sizes": {"intermediate_size": 14336, "num_key_value_heads": 8},
    "no vocabulary": {"vocab_size": None},
    "no rope": {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
    "quantized": {"quantization_config": None, "use_cache": False, "pretraining_tp": 4},
    "head_dim only": {"head_dim": 16, "num_attention_heads": None},
    "heads only": {"head_dim": None, "num_attention_heads": 4},
}


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB, SPECFORGE])
@pytest.mark.parametrize("misleading", MISLEADING)
def test_misleading_configs(golden, misleading, tmp_path):
    config, weights = published(golden)
    for field, value in MISLEADING[misleading].items():
        config.pop(field, None)
        if value is not None:
            config[field] = value
    reproduces(publish(tmp_path, config, weights), golden)


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB])
def test_version_is_told_by_the_weights(golden, tmp_path):
    """SafeAILab calls heads of both versions a Llama; SGLang's and AngelSlim's names are of one version each."""
    config, weights = published(golden)
    for number, name in enumerate(["LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"]):
        head = reproduces(publish(tmp_path / str(number), config | {"architectures": [name]}, weights), golden)
        assert head.config.eagle_version == (1 if golden == EAGLE_1 else 3)


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB])
def test_vllm_wraps_configs_and_prefixes_names(golden, tmp_path):
    config, weights = published(golden)
    wrapped = {"model_type": "eagle", "model": config, "architectures": ["EAGLEModel"]}
    reproduces(publish(tmp_path / "wrapped", wrapped, weights), golden)
    renamed = {key if key.startswith("fc") else f"model.{key}": tensor for key, tensor in weights.items()}
    renamed["lm_head.weight"] = renamed.pop("model.lm_head.weight", trained_target().lm_head.weight.detach().clone())
    reproduces(publish(tmp_path / "prefixed", wrapped, renamed), golden)


def test_copies_of_the_targets_weights_are_left_out(tmp_path):
    config, weights = published(EAGLE_1)
    weights["lm_head.weight"] = torch.ones(512, 64)
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    head = reproduces(publish(tmp_path, config, weights), EAGLE_1)
    assert head.lm_head is None and head.embed_tokens is None
    assert not any("embed_tokens" in key for key in head.state_dict())
    speculators = head_of(SPECULATORS)
    assert speculators.embed_tokens is None
    assert "frozen" in speculators.config.conventions["embed_tokens"]


def test_embeddings_of_its_own(tmp_path):
    """Trained ones (speculators), or any in a format that normally has none, are used."""
    config, weights = published(SPECULATORS)
    head = EagleHead.from_pretrained(publish(tmp_path, config | {"embed_requires_grad": True}, weights)).eval()
    assert torch.equal(head.embed_tokens.weight, weights["embed_tokens.weight"])
    expected = arrays(SPECULATORS)
    features = torch.cat([expected[f"aux_{level}"] for level in ("low", "mid", "high")], dim=-1)
    logits = head(input_ids=expected["head_input_ids"], features=features).logits
    torch.testing.assert_close(logits, expected["head_logits"], atol=1e-4, rtol=0)


def test_fc_bias_by_its_key(tmp_path):
    config, weights = published(EAGLE_1)
    assert config["bias"] is False
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights | {"fc.bias": torch.ones(64)}))
    assert torch.equal(head.fc.bias, torch.ones(64))
    del config["bias"]  # SafeAILab's code would then expect one
    reproduces(publish(tmp_path / "absent", config, weights), EAGLE_1)


def test_specforges_norms_of_features(tmp_path):
    config, weights = published(SPECFORGE)
    names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    old = {f"{name}.weight": torch.full((64,), 1.0 + index) for index, name in enumerate(names)}
    new = {f"fc_norm.{index}.weight": old[f"{name}.weight"] for index, name in enumerate(names)}
    heads = [
        EagleHead.from_pretrained(publish(tmp_path / "old", config, weights | old), dtype=torch.float32),
        EagleHead.from_pretrained(publish(tmp_path / "new", config, weights | new), dtype=torch.float32),
    ]
    assert equal_weights(*heads)
    assert [norm.weight[0].item() for norm in heads[0].fc_norm] == [1.0, 2.0, 3.0]
    features = torch.randn(1, 5, 192)
    parts = [part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-5) for part in features.chunk(3, -1)]
    by_hand = heads[0].fc(torch.cat([part * (1 + index) for index, part in enumerate(parts)], -1))
    torch.testing.assert_close(heads[0].fuse(features), by_hand, atol=1e-5, rtol=0)


def test_specforges_norm_output_means_the_last_norm(tmp_path):
    config, weights = published(SPECFORGE)
    head = reproduces(publish(tmp_path, config | {"norm_output": True}, weights), SPECFORGE)
    assert not head.config.norm_output
    assert "norm_output" in head.config.conventions

    # Without it there is none; but the word is also used in vLLM's sense, and a trained norm is there to be used.
    reproduces(publish(tmp_path / "trained", config | {"norm_output": False}, weights), SPECFORGE)
    untrained = weights | {"norm.weight": torch.ones(64)}
    head = EagleHead.from_pretrained(publish(tmp_path / "initial", config | {"norm_output": False}, untrained))
    assert head.norm is None and "final_norm" in head.config.conventions
    assert EagleHead.from_pretrained(publish(tmp_path / "default", config, untrained)).norm is not None


def test_speculators_norms_before_fc(tmp_path):
    config, weights = published(SPECULATORS)
    one = {"input_norm.weight": torch.full((192,), 2.0)}
    head = EagleHead.from_pretrained(publish(tmp_path / "one", config | {"norm_before_fc": True}, weights | one))
    features = torch.randn(1, 5, 192)
    normed = 2 * features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(head.fuse(features), head.fc(normed), atol=1e-5, rtol=0)
    each = {f"fc_norm.{index}.weight": torch.ones(64) for index in range(3)}
    head = EagleHead.from_pretrained(publish(tmp_path / "each", config | {"fc_norm": True}, weights | each))
    assert len(head.fc_norm) == 3


def test_speculators_feeds_back_normed_states_if_its_config_says_so(tmp_path):
    config, weights = published(SPECULATORS)
    assert EagleHead.from_pretrained(publish(tmp_path, config | {"norm_output": True}, weights)).config.norm_output


def test_speculators_options_that_are_absent(tmp_path):
    config, weights = published(SPECULATORS)
    for field in (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "eagle_aux_hidden_state_layer_ids",
    ):
        del config[field]
    del config["speculators_config"]
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights))
    assert not head.config.norm_before_residual
    assert "library's default" in head.config.conventions["norm_before_residual"]
    assert head.config.target_name is None
    assert head_of(SPECULATORS).config.target_name == "tiny_target"


def test_older_speculators_eagle(tmp_path):
    config, weights = published(EAGLE_1)
    renamed = {
        key.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for key, tensor in weights.items()
    }
    old = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "fusion_bias": False,
        "layernorms": False,
        "transformer_layer_config": config,
        "speculators_config": {"verifier": {"name_or_path": "some/model"}},
    }
    head = reproduces(publish(tmp_path, old, renamed), EAGLE_1)
    assert head.config.source_format == "speculators_eagle"
    assert head.config.target_name == "some/model"


def test_modelopts_versions(tmp_path):
    config, weights = published(MODELOPT)
    old_names = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in weights.items()}
    reproduces(publish(tmp_path / "0.41", config, old_names), MODELOPT)
    del config["eagle_config"]["next_layer_regular"]
    reproduces(publish(tmp_path / "0.40", config, old_names), MODELOPT, suffix="_singlenorm")
    reproduces(publish(tmp_path / "0.43", config, weights), MODELOPT)


def test_modelopt_without_aux_hidden_states(tmp_path):
    config, weights = published(MODELOPT)
    config["eagle_config"]["use_aux_hidden_state"] = False
    del weights["fc.weight"]
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights))
    assert (head.config.num_aux_features, head.config.feature_size, head.fc) == (0, 64, None)
    assert head.config.aux_boundaries(8) == []
    features = torch.randn(1, 3, 64)
    assert torch.equal(head.fuse(features), features)


def test_angelslim(tmp_path):
    config, weights = published(SAFEAILAB)
    config |= {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
    head = reproduces(publish(tmp_path, config, weights), SAFEAILAB)
    assert head.config.source_format == "angelslim_eagle3"
    assert "tie_word_embeddings" in head.config.conventions


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix, tmp_path):
    config, weights = published(SAFEAILAB)
    reproduces(publish_shards(tmp_path, config, weights, suffix), SAFEAILAB)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_half_precision_files(file, tmp_path):
    config, weights = published(SAFEAILAB)
    half = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
    head = EagleHead.from_pretrained(publish(tmp_path, config, half, file))
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float16}
    assert head.d2t.dtype == torch.int64


def test_int32_offsets(tmp_path):
    config, weights = published(SAFEAILAB)
    weights["d2t"] = weights["d2t"].int()
    assert reproduces(publish(tmp_path, config, weights), SAFEAILAB).d2t.dtype == torch.int64


def test_the_whole_vocabulary(tmp_path):
    """Where every token can be drafted there is no `d2t`, or one that says so."""
    config, weights = published(SAFEAILAB)
    weights["lm_head.weight"] = torch.randn(512, 64)
    identity = {"d2t": torch.zeros(512, dtype=torch.long), "t2d": torch.ones(512, dtype=torch.bool)}
    absent = {key: tensor for key, tensor in weights.items() if key not in identity}
    for number, tensors in enumerate((absent, weights | identity)):
        head = EagleHead.from_pretrained(publish(tmp_path / str(number), config | {"draft_vocab_size": 512}, tensors))
        assert head.config.draft_vocab_size is None
        assert head.target_ids is None
        assert head.config.num_draft_tokens == 512


def test_the_targets_lm_head(tmp_path):
    """nvidia/gpt-oss-120b-Eagle3 holds no lm_head; SGLang takes the target's where no draft vocabulary is named."""
    config, weights = published(MODELOPT)
    for key in ("lm_head.weight", "d2t"):
        del weights[key]
    config["draft_vocab_size"] = 512
    identity = {"d2t": torch.zeros(512, dtype=torch.long), "t2d": torch.ones(512, dtype=torch.bool)}
    assert EagleHead.from_pretrained(publish(tmp_path / "named", config, weights | identity)).lm_head is None
    config["draft_vocab_size"] = None
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights)).eval()
    assert head.lm_head is None and head.target_ids is None
    assert head.config.conventions["lm_head"].startswith("the target's")
    features, embeddings = torch.randn(1, 3, 192), torch.randn(1, 3, 64)
    assert head(inputs_embeds=embeddings, features=features).logits is None
    logits = head(inputs_embeds=embeddings, features=features, lm_head=trained_target().lm_head).logits
    assert logits.shape == (1, 3, 512)


def test_another_target_hidden_size(tmp_path):
    config, weights = published(SPECULATORS)
    weights["fc.weight"] = torch.randn(64, 3 * 48)
    head = EagleHead.from_pretrained(publish(tmp_path, config | {"target_hidden_size": 48}, weights))
    assert (head.config.num_aux_features, head.config.feature_size) == (3, 144)
    assert head.embed_tokens is not None  # the target's are of another width


def test_more_features(tmp_path):
    config, weights = published(SPECULATORS)
    weights["fc.weight"] = torch.randn(64, 4 * 64)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5, 8]
    config_read = EagleHead.from_pretrained(publish(tmp_path, config, weights)).config
    assert config_read.aux_boundaries(8) == [1, 3, 5, 8]
