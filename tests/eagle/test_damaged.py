"""Damaged or foreign checkpoints: an error that names the file or key, and what was expected."""

import json
import pickle

import pytest
import torch
from support.eagle import (
    EAGLE_1,
    MODELOPT,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    publish,
    publish_shards,
    published,
    refused,
)

from hf_specdec.eagle import EagleHead


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 7, 100, 5000, 200_000])
def test_cut_short(file, kept, tmp_path):
    path = publish(tmp_path, *published(SAFEAILAB), file) / file
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, file, "damaged")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_other_bytes(file, tmp_path):
    path = publish(tmp_path, *published(SAFEAILAB), file) / file
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(tmp_path, file, "damaged")


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 64,}', "\x00\x01"])
def test_config_that_is_not_json(text, tmp_path):
    (publish(tmp_path, *published(SAFEAILAB)) / "config.json").write_text(text)
    refused(tmp_path, "config.json is not valid JSON")


def test_config_that_is_not_text(tmp_path):
    (publish(tmp_path, *published(SAFEAILAB)) / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path, "config.json is not valid JSON")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"text"'])
def test_config_that_is_no_object(text, tmp_path):
    (publish(tmp_path, *published(SAFEAILAB)) / "config.json").write_text(text)
    refused(tmp_path, "config.json must hold an object")


class Payload:
    """Would create a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("writes", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_code_in_a_pickle_does_not_run(writes, tmp_path):
    config, weights = published(SAFEAILAB)
    publish(tmp_path / "head", config, {}, "pytorch_model.bin")
    evidence = tmp_path / "evidence"
    writes(weights | {"fc.weight": Payload(evidence)}, tmp_path / "head" / "pytorch_model.bin")
    refused(tmp_path / "head", "pytorch_model.bin", "could run code", "safetensors")
    assert not evidence.exists()


@pytest.mark.parametrize("value", [["a"], {"state_dict": {}}, {"fc.weight": 3}, {1: torch.ones(1)}])
def test_pickles_of_other_things(value, tmp_path):
    publish(tmp_path, published(SAFEAILAB)[0], {}, "pytorch_model.bin")
    torch.save(value, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "must hold a dict of tensors")


def test_no_such_folder(tmp_path):
    with pytest.raises(OSError):
        EagleHead.from_pretrained(tmp_path / "nowhere")


def test_empty_folder(tmp_path):
    refused(tmp_path, "config.json", error=OSError)


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published(SAFEAILAB)[0]))
    refused(tmp_path, "there are no weights", "model.safetensors", "pytorch_model.bin", error=OSError)


def test_weights_without_a_single_tensor(tmp_path):
    refused(publish(tmp_path, published(SAFEAILAB)[0], {}), "layers.0.self_attn.o_proj.weight")


def test_shard_missing(tmp_path):
    publish_shards(tmp_path, *published(SAFEAILAB), "safetensors")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors", error=OSError)


def test_tensor_missing_in_its_shard(tmp_path):
    config, weights = published(SAFEAILAB)
    index = publish_shards(tmp_path, config, weights, "safetensors") / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    keep = {key: weights[key] for key, file in files.items() if file == files["norm.weight"] and key != "norm.weight"}
    publish(tmp_path, config, keep, files["norm.weight"])
    refused(tmp_path, "`norm.weight` is missing (64)")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}']
)
def test_damaged_index(text, tmp_path):
    (publish_shards(tmp_path, *published(SAFEAILAB), "bin") / "pytorch_model.bin.index.json").write_text(text)
    refused(tmp_path, "pytorch_model.bin.index.json", "Download it again")


def test_index_that_names_files_elsewhere(tmp_path):
    publish(tmp_path, *published(SAFEAILAB))
    folder = publish_shards(tmp_path / "head", *published(SAFEAILAB), "safetensors")
    index = {"weight_map": {"fc.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "must name files beside it, but names '../model.safetensors'")


# ------------------------------------------------------------------------------------------------------------- tensors


def test_every_tensor_that_is_missing(tmp_path):
    for golden in (EAGLE_1, SAFEAILAB, SPECULATORS, SPECFORGE, MODELOPT):
        config, weights = published(golden)
        optional = {"t2d", "embed_tokens.weight"}
        for key in weights.keys() - optional:
            damaged = {name: tensor for name, tensor in weights.items() if name != key}
            ours = key.replace("midlayer.", "layers.0.")
            refused(publish(tmp_path, config, damaged, "model.safetensors"), f"`{ours}`")


def test_every_tensor_of_another_shape(tmp_path):
    for golden in (EAGLE_1, SAFEAILAB):
        config, weights = published(golden)
        for key, tensor in weights.items():
            longer = torch.cat([tensor, tensor[:1]])
            if key in ("embed_tokens.weight", "t2d"):
                continue  # these tell the size of the vocabulary
            refused(publish(tmp_path, config, weights | {key: longer}), str(tmp_path))
            refused(publish(tmp_path, config, weights | {key: tensor[None]}), str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["fc.weight", "midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight"])
def test_not_finite(key, value, tmp_path):
    config, weights = published(SAFEAILAB)
    weights[key].view(-1)[3] = value
    refused(publish(tmp_path, config, weights), f"`{key.replace('midlayer', 'layers.0')}`", "not finite")


def test_unknown_tensors(tmp_path):
    config, weights = published(SAFEAILAB)
    refused(publish(tmp_path, config, weights | {"extra": torch.ones(64)}), "`extra` is unknown (64)")


def test_norm_before_the_attention_of_an_eagle_1_head(tmp_path):
    config, weights = published(EAGLE_1)
    weights["layers.0.input_layernorm.weight"] = torch.ones(64)
    refused(publish(tmp_path, config, weights), "`layers.0.input_layernorm.weight` is unknown")


def test_the_same_tensor_twice(tmp_path):
    config, weights = published(SAFEAILAB)
    twice = weights | {"layers.0.hidden_norm.weight": torch.ones(64)}
    refused(publish(tmp_path, config, twice), "`layers.0.hidden_norm.weight` twice")
    twice = weights | {"model.norm.weight": torch.ones(64)}
    refused(publish(tmp_path, config, twice), "with and without `model.`")


def test_layers_with_a_gap(tmp_path):
    config, weights = published(SPECULATORS)
    weights["layers.2.mlp.gate_proj.weight"] = torch.ones(96, 64)
    refused(publish(tmp_path, config, weights), "there are 2 decoder layers", "`layers.2`")


def test_whole_numbers_in_place_of_weights(tmp_path):
    config, weights = published(SAFEAILAB)
    weights["fc.weight"] = weights["fc.weight"].to(torch.int8)
    refused(publish(tmp_path, config, weights), "`fc.weight` must be of a dtype like torch.float32, but is torch.int8")


def test_quantized(tmp_path):
    config, weights = published(SAFEAILAB)
    quantized = weights | {"fc.weight": weights["fc.weight"].to(torch.float8_e4m3fn)}
    refused(publish(tmp_path, config, quantized), "`fc.weight` is quantized (torch.float8_e4m3fn)", "bfloat16")
    scaled = weights | {"fc.weight_scale": torch.ones(1)}
    refused(publish(tmp_path, config, scaled), "`fc.weight_scale` is unknown")


def test_attention_that_reads_neither_width(tmp_path):
    config, weights = published(SAFEAILAB)
    weights["midlayer.self_attn.q_proj.weight"] = torch.ones(64, 96)
    refused(publish(tmp_path, config, weights), "q_proj.weight` reads 96 values", "EAGLE-1 head reads 64", "128")


# -------------------------------------------------------------------------------------------------------- vocabularies


OFFSETS = {
    "beyond the vocabulary": (lambda d2t: d2t.index_fill(0, torch.tensor([9]), 600), "maps draft token 9 to 609"),
    "below zero": (lambda d2t: d2t.index_fill(0, torch.tensor([3]), -4), "maps draft token 3 to -1"),
    "twice the same": (lambda d2t: d2t.clone().index_copy_(0, torch.tensor([1]), d2t[:1] - 1), "several draft tokens"),
    "ids, not offsets": (lambda d2t: d2t + 2 * torch.arange(256), "It must hold offsets"),
    "another length": (lambda d2t: d2t[:-1], "has shape (255,), but `lm_head.weight` has 256 rows"),
    "a matrix": (lambda d2t: d2t[None], "has shape (1, 256)"),
    "fractions": (lambda d2t: d2t.float(), "must hold whole numbers, but is of dtype torch.float32"),
}


@pytest.mark.parametrize("golden", [SAFEAILAB, MODELOPT])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_offsets(golden, offsets, tmp_path):
    config, weights = published(golden)
    change, message = OFFSETS[offsets]
    weights["d2t"] = change(weights["d2t"])
    refused(publish(tmp_path, config, weights), "`d2t`", message)


def test_maps_that_contradict_each_other(tmp_path):
    config, weights = published(SAFEAILAB)
    named = weights["t2d"].nonzero()[0]
    for change in (False, True):
        other = weights["t2d"].clone()
        other[named if not change else (~other).nonzero()[0]] = change
        refused(publish(tmp_path, config, weights | {"t2d": other}), "`t2d` and `d2t` name different target tokens")


def test_no_map(tmp_path):
    config, weights = published(SAFEAILAB)
    for key in ("d2t", "t2d"):
        del weights[key]
    refused(publish(tmp_path, config, weights), "256 rows and the vocabulary 512 tokens", "no `d2t`")


def test_no_vocabulary_at_all(tmp_path):
    config, weights = published(MODELOPT)
    del config["vocab_size"]
    refused(publish(tmp_path, config, weights), "`vocab_size` is missing in config.json")
