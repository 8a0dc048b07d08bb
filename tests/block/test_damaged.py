"""Damaged or foreign checkpoints: an error that names the file or key, and what was expected."""

import copy
import json

import pytest
import torch
from support.blocks import ALL, CONTEXT
from support.eagle import GOLDENS, publish, published
from support.goldens import TINY_TARGET, trained_target

from hf_specdec import BlockConfig, BlockHead, EagleHead, MedusaHeads, TokenTree
from hf_specdec.drafters import BlockDrafter


def refused(folder, *words, error=ValueError, load=BlockHead.from_pretrained, **options):
    with pytest.raises(error) as caught:
        load(folder, **options)
    message = str(caught.value)
    for word in words:
        assert word in message, message


# ---------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("kept", [0, 7, 5000, 200_000])
def test_cut_short(kept, tmp_path):
    path = publish(tmp_path, *published("dflash")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "model.safetensors", "damaged")


@pytest.mark.parametrize("golden", ALL)
def test_every_tensor_that_is_missing(golden, tmp_path):
    config, weights = published(golden)
    optional = {"embed_tokens.weight", "lm_head.weight"}
    for key in weights.keys() - optional:
        damaged = {name: tensor for name, tensor in weights.items() if name != key}
        refused(publish(tmp_path, config, damaged), str(tmp_path), f"`{key}`")


@pytest.mark.parametrize("golden", ALL)
def test_every_tensor_of_another_shape(golden, tmp_path):
    config, weights = published(golden)
    for key, tensor in weights.items():
        longer = torch.cat([tensor, tensor[:1]])
        if key != "embed_tokens.weight":  # which tells the size of the vocabulary
            refused(publish(tmp_path, config, weights | {key: longer}), str(tmp_path))
        if key != "mask_hidden":  # whose first dimensions do not count
            refused(publish(tmp_path, config, weights | {key: tensor[None]}), str(tmp_path))


@pytest.mark.parametrize("key", ["fc.weight", "candidate_selector.successor_codebook"])
def test_not_finite(key, tmp_path):
    config, weights = published("dflash2")
    weights[key].view(-1)[3] = torch.nan
    refused(publish(tmp_path, config, weights), f"`{key}`", "not finite")


def test_unknown_tensors(tmp_path):
    config, weights = published("dflash")
    refused(publish(tmp_path, config, weights | {"extra": torch.ones(3)}), "`extra` is unknown (3)", "a block head")


@pytest.mark.parametrize("golden", ALL)
def test_last_layer_missing(golden, tmp_path):
    """No other size shows it."""
    config, weights = published(golden)
    layers = config.get("transformer_layer_config", config)
    layers["num_hidden_layers"] += 1
    if "layer_types" in layers:
        layers["layer_types"] = ["full_attention"] * layers["num_hidden_layers"]
    number = layers["num_hidden_layers"]
    refused(publish(tmp_path, config, weights), f"`num_hidden_layers`={number}", f"hold {number - 1} decoder layers")


def test_first_layer_missing(tmp_path):
    config, weights = published("dflash")
    weights = {key: tensor for key, tensor in weights.items() if not key.startswith("layers.0.")}
    refused(publish(tmp_path, config, weights), "`layers.0.self_attn")


# ----------------------------------------------------------------------------------------------------------- config


def without(config, name):
    del config[name]


DFLASH = {
    "mask token beyond the vocabulary": (
        lambda c: c["dflash_config"].update(mask_token_id=512),
        "`mask_token_id`=512 is outside the vocabulary of 512 tokens",
    ),
    "negative mask token": (lambda c: c["dflash_config"].update(mask_token_id=-1), "`mask_token_id` must be a whole"),
    "mask token as text": (lambda c: c["dflash_config"].update(mask_token_id="13"), "mask_token_id"),
    "no mask token": (lambda c: without(c["dflash_config"], "mask_token_id"), "`mask_token_id` is missing"),
    "block of one": (lambda c: c.update(block_size=1), "`block_size` must be a whole number of at least 2, but is 1"),
    "block of text": (lambda c: c.update(block_size="8"), "block_size"),
    "layers as text": (
        lambda c: c["dflash_config"].update(target_layer_ids="last"),
        "must be a list of layer numbers",
    ),
    "no layers": (lambda c: c["dflash_config"].update(target_layer_ids=[]), "must be a list of layer numbers"),
    "another number of layers": (
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 2, 3]),
        "`fc.weight` reads 128 values",
    ),
    "target size": (lambda c: c.update(target_hidden_size=50), "`fc.weight` reads 128 values"),
    "target size as text": (lambda c: c.update(target_hidden_size="64"), "`target_hidden_size`='64'"),
    "causal as text": (lambda c: c["dflash_config"].update(causal_head="yes"), "`causal_head`='yes'"),
    "options": (lambda c: c.update(dflash_config=3), "`dflash_config` in config.json must be an object"),
    "projector": (lambda c: c["dflash_config"].update(projector_type="domino"), "`projector_type`='domino'"),
    "architecture": (lambda c: c.update(architectures=["DSpineDraftModel"]), "`architectures`=['DSpineDraftModel']"),
    "window": (lambda c: c.update(layer_types=["sliding_attention"] * 2), "`sliding_window`, which is missing"),
    "rope": (lambda c: c.update(rope_parameters={"rope_type": "spiral"}), "`rope_type`='spiral'"),
    "draft vocabulary": (lambda c: c.update(draft_vocab_size=100), "`draft_vocab_size`=100"),
}


@pytest.mark.parametrize("name", DFLASH)
def test_configs(name, tmp_path):
    config, weights = published("dflash")
    change, message = DFLASH[name]
    change(config)
    refused(publish(tmp_path, config, weights), str(tmp_path), message)


@pytest.mark.parametrize(
    ("golden", "changes", "message"),
    [
        ("dspark", {"markov_head_type": "gated"}, "`markov_head.gate_proj.weight` is missing (16×80)"),
        ("dspark", {"markov_head_type": "lstm"}, "`markov_type` must be one of 'vanilla', 'gated', 'rnn'"),
        ("dflash", {"markov_rank": 8}, "`markov_head.markov_w1.weight` is missing (512×8)"),
        ("dflash2", {"selector_top_k": 600}, "`selector_top_k`=600"),
        ("dflash2", {"speculators_model_type": "dflash9"}, "`speculators_model_type`='dflash9'"),
        ("dflash2", {"transformer_layer_config": None}, "`transformer_layer_config`"),
        ("dflash2", {"aux_hidden_state_layer_ids": [-1, 2, 4]}, "must be a list of layer numbers"),
        ("peagle", {"mask_token_id": None}, "`mask_token_id` is missing"),
        ("peagle", {"mask_token_id": 600}, "`mask_token_id`=600 is outside the vocabulary"),
        ("peagle", {"fc_norm": True}, "`fc_norm.0.weight` is missing (64)"),
        ("peagle", {"speculators_config": None, "num_depths": 1}, "`block_size` must be a whole number of at least 2"),
    ],
)
def test_other_configs(golden, changes, message, tmp_path):
    config, weights = published(golden)
    refused(publish(tmp_path, config | changes, weights), message)


def test_width_of_the_confidence_head(tmp_path):
    config, weights = published("dspark")
    weights["confidence_head.proj.weight"] = torch.ones(1, 70, dtype=torch.bfloat16)
    refused(publish(tmp_path, config, weights), "`confidence_head.proj.weight` reads 70 values", "64", "16")


def test_no_map_of_the_draft_vocabulary(tmp_path):
    config, weights = published("dspark")
    weights["lm_head.weight"] = weights["lm_head.weight"][:100]
    refused(publish(tmp_path, config, weights), "100 rows and the vocabulary 512 tokens", "no `d2t`")


def test_missing_mask_token_as_an_argument(tmp_path):
    for golden in ("dflash", "peagle"):
        config, weights = published(golden)
        del config.get("dflash_config", config)["mask_token_id"]
        head = BlockHead.from_pretrained(publish(tmp_path, config, weights), mask_token_id=13)
        assert head.block_tokens(torch.tensor([2])).tolist()[0][-1] == 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_token_id": 512}, "`mask_token_id`=512 is outside"),
        ({"block_size": 1}, "a block of one row has no masks"),
        ({"anchor_first": "yes"}, "`anchor_first` must be True or False"),
        ({"aux_layer_ids": [1, 2, 3]}, "has 3 layers, but the head reads 2"),
        ({"aux_layer_ids": [-1, 2]}, "must be a list of layer numbers"),
        ({"rope_theta": -1}, "`rope_theta` must be a positive number"),
        ({"output_multiplier": 0.0}, "`output_multiplier` must be a positive number"),
    ],
)
def test_arguments(arguments, message):
    refused(GOLDENS / "dflash", message, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"confidence_with_markov": True}, "`markov_rank` is 0"),
        ({"markov_rank": 4, "selector_rank": 4}, "not both"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "`conv_group_size`=7 must divide the hidden size"),
        ({"text_config": 3}, "`text_config` must be a config or a dict"),
        ({"final_logit_softcapping": -1.0}, "`final_logit_softcapping` must be a positive number"),
    ],
)
def test_new_configs(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockConfig(**fields)


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_layers_of_another_kind(kind):
    with pytest.raises(ValueError, match="`text_config.model_type`=.* must be of one of 'qwen3', 'gemma4_text'"):
        BlockHead(BlockConfig(text_config={"model_type": kind}))


def test_our_own_format(tmp_path):
    BlockHead.from_pretrained(GOLDENS / "dflash").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mask_token_id": 600}))
    refused(tmp_path, "config.json", "`mask_token_id`=600")


# ------------------------------------------------------------------------------------------------------ other models


@pytest.mark.parametrize("golden", ALL)
def test_passed_as_an_eagle_head(golden, tmp_path):
    refused(GOLDENS / golden, "block head", "hf_specdec.BlockHead.from_pretrained", load=EagleHead.from_pretrained)
    BlockHead.from_pretrained(GOLDENS / golden).save_pretrained(tmp_path)
    refused(tmp_path, "hf_specdec.BlockHead.from_pretrained", load=EagleHead.from_pretrained)


@pytest.mark.parametrize("golden", ["safeailab_eagle1", "safeailab_eagle3", "specforge_eagle3", "speculators_eagle3"])
def test_eagle_heads(golden, tmp_path):
    refused(GOLDENS / golden, "an EAGLE head", "hf_specdec.EagleHead.from_pretrained")
    EagleHead.from_pretrained(GOLDENS / golden).save_pretrained(tmp_path)
    refused(tmp_path, "hf_specdec.EagleHead.from_pretrained")


def test_medusa_heads(tmp_path):
    refused(GOLDENS / "medusa", "MedusaHeads", error=OSError)
    MedusaHeads.from_pretrained(GOLDENS / "medusa").save_pretrained(tmp_path)
    refused(tmp_path, "hf_specdec.MedusaHeads.from_pretrained")


def test_language_models():
    refused(TINY_TARGET, "whole language model", "AutoModelForCausalLM")


@pytest.mark.parametrize("prefix", ["", "logit_head."])
def test_domino(prefix, tmp_path):
    config, weights = published("dflash")
    weights[f"{prefix}prefix_gru.weight_ih_l0"] = torch.ones(3, 3)
    refused(publish(tmp_path, config, weights), "Domino")


@pytest.mark.parametrize("golden", CONTEXT)
def test_first_norm_of_eagle_is_told_from_the_contexts(golden):
    """EAGLE-3's first layer has a `hidden_norm`, too."""
    assert "hidden_norm.weight" in BlockHead.from_pretrained(GOLDENS / golden).state_dict()


def test_a_target_of_another_depth():
    head, config = BlockHead.from_pretrained(GOLDENS / "dspark"), copy.deepcopy(trained_target().config)
    config.num_hidden_layers, config.layer_types = 7, None
    target, tree = type(trained_target())(config), TokenTree.chain(1)
    with pytest.raises(ValueError, match="a target of 8 layers .* has 7.*num_target_layers=None"):
        BlockDrafter(head).check(target, tree)
    any_depth = BlockHead.from_pretrained(GOLDENS / "dspark", num_target_layers=None)
    BlockDrafter(any_depth).check(target, tree)
    BlockDrafter(head).check(trained_target(), tree)


@pytest.mark.parametrize("load, golden", [(BlockHead, "dspark"), (EagleHead, "safeailab_eagle3")])
def test_arguments_that_nobody_knows(load, golden):
    with pytest.raises(TypeError, match="aux_layer_idx=….*no field.*Did you mean `aux_layer_ids`"):
        load.from_pretrained(GOLDENS / golden, aux_layer_idx=[1])
    with pytest.raises(TypeError, match="zzz=….*The fields are .*aux_layer_ids"):
        load.from_pretrained(GOLDENS / golden, zzz=1)


def test_what_a_block_of_one_row_lacks_is_said_of_no_other_size():
    for size, is_said in ((1, True), (0, False), ("8", False)):
        with pytest.raises(ValueError, match="`block_size` must be") as caught:
            BlockHead.from_pretrained(GOLDENS / "dspark", block_size=size)
        assert ("one row" in str(caught.value)) is is_said


def test_nothing_there(tmp_path):
    refused(tmp_path, "config.json", error=OSError)
    refused(tmp_path / "nowhere", error=OSError)
