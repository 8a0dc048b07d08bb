"""`hf-specdec convert`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.eagle import EAGLE_1, GOLDENS, equal_weights
from support.goldens import TINY_TARGET
from typer.testing import CliRunner

from hf_specdec import BlockHead
from hf_specdec.cli import build_app
from hf_specdec.eagle import EagleHead


def convert(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `hf-specdec convert …`; line breaks of boxes removed."""
    words = ["convert", *map(str, arguments)]
    result = CliRunner().invoke(build_app(), words, env={"COLUMNS": "400"})
    return result.exit_code, result.output


@pytest.mark.parametrize("format", ["hf_specdec", "safeailab", "speculators", "specforge"])
def test_formats(format: str, tmp_path: Path) -> None:
    source, output = GOLDENS / "safeailab_eagle3", tmp_path / "new" / "folder"
    code, text = convert(source, output, "--to", format)
    assert code == 0, text
    assert f"safeailab_eagle3 → {format}" in text
    assert "assumed rope_theta" in text
    assert equal_weights(EagleHead.from_pretrained(source), EagleHead.from_pretrained(output))


def test_ours_by_default(tmp_path: Path) -> None:
    code, _ = convert(GOLDENS / EAGLE_1, tmp_path, "--target", TINY_TARGET)
    assert code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "hf_specdec_eagle"
    assert config["target_name"] == str(TINY_TARGET)


def test_the_tree_of_the_head_and_its_layers(tmp_path: Path) -> None:
    """A head keeps its own tree through another format and back; what is said of its layers is what it has."""
    tree = [[0], [1], [0, 0]]
    steps = (
        (GOLDENS / "speculators_eagle3", "ours", f"--set=default_tree={tree}", "--set=aux_layer_ids=[1, 4, 5]"),
        (tmp_path / "ours", "theirs", "--to", "speculators"),
        (tmp_path / "theirs", "again", "--to", "speculators"),
        (tmp_path / "again", "back"),
    )
    for first, last, *options in steps:
        code, text = convert(first, tmp_path / last, *options)
        assert code == 0, text
        assert "none" not in text
    assert "assumed aux_layer_ids: [1, 4, 5]: boundaries" in text
    config = EagleHead.from_pretrained(tmp_path / "back").config
    assert config.default_tree == tree and config.aux_layer_ids == [1, 4, 5]


@pytest.mark.parametrize("golden, format", [("dflash2", "zlab"), ("dspark", "speculators"), ("jetspec", "hf_specdec")])
def test_block_heads(golden: str, format: str, tmp_path: Path) -> None:
    code, text = convert(GOLDENS / golden, tmp_path, "--to", format, "--set", "block_size=5")
    assert code == 0, text
    assert f"→ {format}" in text and "read block_size: 5" in text
    source, head = BlockHead.from_pretrained(GOLDENS / golden), BlockHead.from_pretrained(tmp_path)
    assert equal_weights(source, head) and head.config.block_size == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "safeailab"), "'safeailab' is not one of hf_specdec, zlab, deepspec, speculators"),
        (("--to", "zlab", "--set", "anchor_first=true"), "`anchor_first`=True: the format zlab cannot say so"),
        (("--set", "norm_output=true"), "must be NAME=VALUE with a field of BlockConfig"),
    ],
)
def test_what_block_heads_cannot_be(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, text = convert(GOLDENS / "dflash", tmp_path / "output", *arguments)
    assert code == 2 and message in text
    assert not (tmp_path / "output").exists()


def test_target(tmp_path: Path) -> None:
    code, text = convert(GOLDENS / EAGLE_1, tmp_path, "--to", "safeailab")
    assert code == 2 and "--target" in text
    code, text = convert(GOLDENS / EAGLE_1, tmp_path, "--to", "safeailab", "--target", TINY_TARGET)
    assert code == 0, text


def test_fields_read_otherwise(tmp_path: Path) -> None:
    modelopt = GOLDENS / "modelopt_eagle3"
    arguments = (modelopt, tmp_path, "--to", "speculators", "--target", TINY_TARGET)
    code, text = convert(*arguments)
    assert code == 2 and "`norm_hidden_twice`=True" in text
    assert not list(tmp_path.iterdir())
    code, text = convert(*arguments, "--set", "norm_hidden_twice=false", "--set", "aux_layer_ids=[2, 4, 6]")
    assert code == 0, text
    assert EagleHead.from_pretrained(tmp_path).config.aux_layer_ids == [2, 4, 6]


def test_rope_theta(tmp_path: Path) -> None:
    code, text = convert(GOLDENS / EAGLE_1, tmp_path, "--set", "rope_theta=500000")
    assert code == 0, text
    config = EagleHead.from_pretrained(tmp_path).config
    assert config.text_config.rope_parameters["rope_theta"] == 500_000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "medusa"), "'medusa' is not one of hf_specdec, safeailab, speculators, specforge"),
        (("--set", "norm_hidden_twice"), "must be NAME=VALUE"),
        (("--set", "nothing=3"), "must be NAME=VALUE with a field of EagleConfig"),
        (("--set", "eagle_version=7"), "`eagle_version` must be 1 or 3"),
        (("--target", "no/such/folder", "--to", "speculators"), "no/such/folder"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, text = convert(GOLDENS / "safeailab_eagle3", tmp_path / "output", *arguments)
    assert code == 2
    assert message in text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    code, text = convert(GOLDENS / "safeailab_eagle3", tmp_path)
    assert code == 2 and "not an empty folder" in text


def test_source_that_is_no_head(tmp_path: Path) -> None:
    code, text = convert(TINY_TARGET, tmp_path)
    assert code == 2 and "whole language model" in text
    code, text = convert(tmp_path / "nowhere", tmp_path)
    assert code == 2 and "nowhere" in text
