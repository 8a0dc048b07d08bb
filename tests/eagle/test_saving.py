"""Heads of every format written in ours and read again, by our classes and by transformers' Auto classes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.eagle import (
    ALL,
    EAGLE_1,
    GOLDENS,
    SPECFORGE,
    equal_weights,
    golden_rows,
    head_of,
    largest_difference,
    publish,
    published,
)
from support.models import tiny_model
from transformers import AutoConfig, AutoModel

from hf_specdec.eagle import EagleConfig, EagleHead


def small(**fields):
    layers = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "vocab_size": 512,
    }
    return EagleConfig(text_config=layers | fields.pop("layers", {}), **fields)


def test_the_targets_config_stays_as_it_is():
    """A head's layers may be like the target's; its embeddings are not tied, and its attention is its own."""
    target = tiny_model("llama", tie_word_embeddings=True)
    target.set_attn_implementation("eager")
    before = target.config.to_dict()
    head = EagleHead(EagleConfig(text_config=target.config))
    assert target.config.to_dict() == before and target.config._attn_implementation == "eager"
    assert not head.config.text_config.tie_word_embeddings


def described(config):
    """All that a config says but where it was read from, and the dtype, which transformers writes of the weights."""
    fields = config.to_dict()
    left_out = {"_name_or_path", "dtype"}
    fields["text_config"] = {name: value for name, value in fields["text_config"].items() if name not in left_out}
    return {name: value for name, value in fields.items() if name not in left_out}


@pytest.mark.parametrize("golden", ALL)
def test_round_trip(golden, tmp_path):
    head = EagleHead.from_pretrained(GOLDENS / golden)
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path)
    assert equal_weights(head, again)
    assert described(again.config) == described(head.config)
    assert again.dtype == head.dtype and again.follows_target_dtype
    found = golden_rows(again.float().eval(), golden)
    assert max(largest_difference(found, golden).values()) < 1e-4


@pytest.mark.parametrize("golden", ALL)
def test_config_is_json_and_equal_after_reload(golden, tmp_path):
    config = EagleHead.from_pretrained(GOLDENS / golden).config
    json.dumps(config.to_dict())
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is EagleConfig
    assert type(again.text_config) is type(config.text_config)
    assert described(again) == described(config)


def test_all_fields_are_kept(tmp_path):
    config = small(
        layers={"model_type": "qwen3", "head_dim": 16},
        aux_layer_ids=[1, 3, 5, 7],
        aux_layer_convention="outputs",
        draft_vocab_size=100,
        norm_before_fc=True,
        fc_norm=True,
        fc_bias=True,
        norm_before_residual=True,
        norm_hidden_twice=True,
        norm_output=True,
        has_embeddings=True,
        default_tree=[[0], [0, 0]],
        target_name="some/model",
        recipe={"dataset": "a set", "steps": 3},
    )
    head = EagleHead(config)
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path)
    assert described(again.config) == described(head.config)
    assert equal_weights(head, again)
    assert again.config.recipe == {"dataset": "a set", "steps": 3}


@pytest.mark.parametrize("golden", [EAGLE_1, SPECFORGE])
def test_auto_model(golden, tmp_path):
    head = EagleHead.from_pretrained(GOLDENS / golden)
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is EagleHead
    assert equal_weights(head, again)
    other = AutoModel.from_pretrained(tmp_path, dtype=torch.float64, device_map="cpu")
    assert other.dtype == torch.float64 and not other.follows_target_dtype
    assert type(AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))) is EagleHead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "float16", "auto", None])
def test_dtype(dtype, tmp_path):
    EagleHead.from_pretrained(GOLDENS / SPECFORGE).save_pretrained(tmp_path)
    wanted = {"float16": torch.float16, "auto": torch.bfloat16, None: torch.bfloat16}.get(dtype, dtype)
    for folder in (GOLDENS / SPECFORGE, tmp_path):
        head = EagleHead.from_pretrained(folder, dtype=dtype)
        assert {parameter.dtype for parameter in head.parameters()} == {wanted}
        assert head.follows_target_dtype == (dtype in ("auto", None))


def test_several_dtypes_in_one_checkpoint(tmp_path):
    """Nothing is rounded: the widest is taken for all."""
    config, weights = published(SPECFORGE)
    weights["norm.weight"] = weights["norm.weight"].float() + 1e-4
    head = EagleHead.from_pretrained(publish(tmp_path, config, weights))
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert torch.equal(head.norm.weight, weights["norm.weight"])
    assert head.follows_target_dtype


def test_placement_and_attention():
    head = EagleHead.from_pretrained(GOLDENS / SPECFORGE, device_map="cpu", attn_implementation="eager")
    assert head.device.type == "cpu"
    assert head.config.text_config._attn_implementation == "eager"
    expected = head_of(SPECFORGE)
    features, embeddings = torch.randn(1, 5, 192), torch.randn(1, 5, 64)
    logits = head.float()(inputs_embeds=embeddings, features=features).logits
    torch.testing.assert_close(logits, expected(inputs_embeds=embeddings, features=features).logits)


def test_shards(tmp_path):
    head = EagleHead.from_pretrained(GOLDENS / SPECFORGE)
    head.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert equal_weights(head, EagleHead.from_pretrained(tmp_path))
    assert equal_weights(head, AutoModel.from_pretrained(tmp_path))


@pytest.mark.parametrize("golden", ALL)
def test_what_the_target_has_is_not_stored(golden, tmp_path):
    head = EagleHead.from_pretrained(GOLDENS / golden)
    head.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == head.state_dict().keys()
    assert "embed_tokens.weight" not in stored
    assert ("lm_head.weight" in stored) == (golden != EAGLE_1)


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(eagle_version=1, fc_bias=True),
        small(draft_vocab_size=100, has_embeddings=True),
        small(num_aux_features=0, has_fc=False, has_lm_head=False),
        small(layers={"num_hidden_layers": 3}),
    ],
)
def test_new_heads(config):
    """Initialized as any model of transformers is: they run, learn, and draft."""
    head = EagleHead(config)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    assert torch.equal(head.layers[0].post_attention_layernorm.weight, torch.ones(64))
    weight = head.layers[0].self_attn.q_proj.weight
    assert 0.01 < weight.std() < 0.03  # initializer_range is 0.02
    embeddings, features = torch.randn(2, 5, 64), torch.randn(2, 5, config.feature_size)
    output = head(inputs_embeds=embeddings, features=features, lm_head=torch.nn.Linear(64, 512))
    assert output.logits.shape == (2, 5, config.num_draft_tokens)
    output.logits.sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters() if parameter is not head_embeddings(head))


def head_embeddings(head):
    return None if head.embed_tokens is None else head.embed_tokens.weight


def test_config_in_place_of_the_checkpoints(tmp_path):
    config = EagleHead.from_pretrained(GOLDENS / SPECFORGE).config
    config.target_name = "some/model"
    head = EagleHead.from_pretrained(GOLDENS / SPECFORGE, config=config, norm_output=True)
    assert head.config.target_name == "some/model" and head.config.norm_output
    assert not config.norm_output  # the user's own is not changed
    assert head.name_or_path == head.config._name_or_path == str(GOLDENS / SPECFORGE)


def test_a_config_that_does_not_fit():
    config = EagleHead.from_pretrained(GOLDENS / SPECFORGE).config
    config.fc_bias = True
    with pytest.raises(ValueError, match="`fc.bias` is missing"):
        EagleHead.from_pretrained(GOLDENS / SPECFORGE, config=config)


def test_version_1_without_a_projection():
    with pytest.raises(ValueError, match="`has_fc`=False"):
        small(eagle_version=1, has_fc=False)


def test_logits_without_an_lm_head():
    with pytest.raises(ValueError, match="`lm_head`: this head has none"):
        EagleHead(small(eagle_version=1)).compute_logits(torch.zeros(1, 1, 64))


@pytest.mark.parametrize("text_config", [{"model_type": "gpt2"}, {"model_type": "mistral"}])
def test_layers_of_another_kind(text_config):
    with pytest.raises(ValueError, match="`text_config.model_type`=.* must be of one of 'llama', 'qwen2', 'qwen3'"):
        EagleHead(EagleConfig(text_config=text_config))
