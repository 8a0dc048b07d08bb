"""What is read of a target's checkpoint, how often, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.goldens import TINY_TARGET, trained_target
from support.mtp import load_target, write_checkpoint
from support.plain import greedy_text
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import MtpHead, load_draft
from hf_specdec.drafters import as_drafter
from hf_specdec.mtp import modeling_mtp
from hf_specdec.mtp.layouts import LAYOUTS, find_modules
from hf_specdec.trees import TokenTree


FAMILY, MODULE = "deepseek_v3", "model.layers.2."
Tensors = dict[str, torch.Tensor]


@cache
def published() -> tuple[PreTrainedModel, Tensors, dict[str, bytes]]:
    """A target, the tensors of its checkpoint, and its other files."""
    with TemporaryDirectory() as folder:
        write_checkpoint(FAMILY, Path(folder))
        weights = load_file(Path(folder) / "model.safetensors")
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}
        return load_target(Path(folder)), weights, files


def write(folder: Path, weights: Tensors, **config: Any) -> Path:
    for name, content in published()[2].items():
        (folder / name).write_bytes(content)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | config))
    save_file(weights, folder / "model.safetensors")
    return folder


def the_head(folder: Path) -> MtpHead:
    return MtpHead.from_target(published()[0], checkpoint=folder)


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {name: one for name, one in weights.items() if not name.endswith(ends)}


def with_one(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda weights: weights | {MODULE + name: tensor}


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no modules": (
        without("eh_proj.weight"),
        r"holds no MTP modules; looked for `mtp\.fc\.weight`.*`model\.layers\.2\.eh_proj\.weight`",
    ),
    "no last norm": (without("shared_head.norm.weight"), r"module 0 .* is incomplete.*`model\.layers\.2\.shared_head"),
    "no output projection": (
        lambda weights: {name: one for name, one in weights.items() if name != f"{MODULE}self_attn.o_proj.weight"},
        r"does not hold a layer of DeepseekV3Model: `layers\.0\.self_attn\.o_proj\.weight` is missing",
    ),
    "a tensor too many": (
        with_one("self_attn.gate.weight", torch.ones(2)),
        "`layers.0.self_attn.gate.weight` is unknown",
    ),
    "another shape": (with_one("input_layernorm.weight", torch.ones(7)), r"has shape \(7,\), not \(32,\)"),
    "packed weights": (
        with_one("self_attn.o_proj.weight", torch.ones(32, 16, dtype=torch.uint8)),
        r"quantized in a way that is not read: `model\.layers\.2\.self_attn\.o_proj\.weight` is uint8",
    ),
    "scales of whole numbers": (
        with_one("self_attn.o_proj.weight_scale", torch.ones(32, 1)),
        "quantized in a way that is not read",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_refusals(fault: str, tmp_path: Path) -> None:
    change, words = WRONG[fault]
    folder, state = write(tmp_path, change(published()[1])), torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        the_head(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_damaged_file(tmp_path: Path) -> None:
    file = write(tmp_path, published()[1]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        the_head(tmp_path)


def test_targets_without_a_checkpoint(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_config(copy.deepcopy(trained_target().config))
    target.name_or_path = target.config._name_or_path = ""
    with pytest.raises(ValueError, match="`target`: LlamaForCausalLM was not loaded from files"):
        MtpHead.from_target(target)
    with pytest.raises(ValueError, match="holds no MTP modules"):
        MtpHead.from_target(target, checkpoint=TINY_TARGET)
    with pytest.raises(ValueError, match="from_target"):
        MtpHead.from_pretrained(TINY_TARGET)


@pytest.mark.parametrize("end", ["weight_scale_inv", "weight_scale"])
def test_8_bit_floats(end: str, tmp_path: Path) -> None:
    """Blocks of 12 by 16, the last ones cut; or a scale for every row."""
    weights, dense, blocks = dict(published()[1]), dict(published()[1]), (12, 16)
    for name, tensor in published()[1].items():
        if not name.startswith(MODULE) or not name.endswith("proj.weight") or "eh_proj" in name:
            continue
        rows, columns = tensor.shape
        if end == "weight_scale":
            scale = tensor.abs().amax(dim=1, keepdim=True) / 300
            each = scale
        else:
            scale = torch.rand(-(-rows // blocks[0]), -(-columns // blocks[1])) * 0.01 + 0.01
            each = scale.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[:rows, :columns]
        weights[name] = (tensor / each).clamp(-400, 400).to(torch.float8_e4m3fn)
        weights[name.removesuffix("weight") + end] = scale
        dense[name] = (weights[name].float() * each).to(torch.bfloat16)
    one, other = tmp_path / "quantized", tmp_path / "dense"
    for folder in (one, other):
        folder.mkdir()
    quantization = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    found = the_head(write(one, weights, quantization_config=quantization)).state_dict()
    expected = the_head(write(other, dense)).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)


def test_read_once_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in another dtype, and with nothing else of the target changed."""
    with TemporaryDirectory() as folder:
        write(Path(folder), published()[1])
        target = load_target(Path(folder))
        reads, before = [], copy.deepcopy(target.config.to_dict())
        read = modeling_mtp.read_modules
        monkeypatch.setattr(modeling_mtp, "read_modules", lambda *options: reads.append(1) or read(*options))
        inputs, state = {"input_ids": torch.tensor([[5, 6, 7]])}, torch.get_rng_state()
        options = {"max_new_tokens": 8, "tree": "chain:2", "assistant_model": "mtp"}
        first = greedy_text(target, inputs, **options)
        assert torch.equal(torch.get_rng_state(), state)
    assert greedy_text(target, inputs, **options).equal(first)
    assert target.config.to_dict() == before
    half = target.to(torch.bfloat16)
    expected = half.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert half.generate(**inputs, do_sample=False, **options).shape == expected.shape
    assert len(reads) == 1


def test_only_the_tensors_of_modules_are_read(tmp_path: Path) -> None:
    """Of shards that hold none, not even the files must be there."""
    weights = published()[1]
    write(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    save_file({name: one for name, one in weights.items() if name.startswith(MODULE)}, tmp_path / "last.safetensors")
    places = {name: "last.safetensors" if name.startswith(MODULE) else "first.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    head = load_draft("mtp", target=published()[0], checkpoint=tmp_path)
    expected = MtpHead.from_target(published()[0], checkpoint=write_whole(tmp_path))
    assert all(one.equal(other) for one, other in zip(head.parameters(), expected.parameters(), strict=True))


def write_whole(folder: Path) -> Path:
    (folder / "whole").mkdir()
    return write(folder / "whole", published()[1])


def test_other_sizes_are_refused() -> None:
    drafter = as_drafter(a_head())
    with pytest.raises(ValueError, match="the MtpHead is for a vocabulary of 64 tokens, but the target"):
        drafter.check(trained_target(), TokenTree.chain(1))


@cache
def a_head() -> MtpHead:
    with TemporaryDirectory() as folder:
        return the_head(write(Path(folder), published()[1]))


def test_names_of_layers_that_are_the_targets_own() -> None:
    """A layer with a number below the target's is no module, and families do not take each other's names."""
    assert find_modules(["model.layers.1.eh_proj.weight"], 2) is None
    for layout in LAYOUTS:
        name = layout.example.format(layers=2)
        names = [name, "mtp.layers.0.input_layernorm.weight"] if name.startswith("mtp.") else [name]
        found = find_modules(names, 2)
        assert found is not None and found[0] is layout and len(found[1]) == 1
