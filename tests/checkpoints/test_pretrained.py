"""What the heads' `from_pretrained` have in common: dtypes, arguments of the config, and what becomes of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.eagle import GOLDENS, publish, published

from hf_specdec import BlockHead, DynamicTree, EagleHead, MedusaHeads
from hf_specdec.checkpoints.pretrained import PublishedModel
from hf_specdec.trees import as_tree


HEADS = [(EagleHead, GOLDENS / "speculators_eagle3"), (MedusaHeads, GOLDENS / "medusa")]


def dtypes(head: PublishedModel) -> set[torch.dtype]:
    return {parameter.dtype for parameter in head.parameters()}


@pytest.mark.parametrize("kind, folder", HEADS)
def test_dtype_by_either_name(kind: type[PublishedModel], folder: Path) -> None:
    for options in ({"torch_dtype": torch.float64}, {"torch_dtype": "float64"}, {"dtype": torch.float64}):
        head = kind.from_pretrained(folder, **options)
        assert dtypes(head) == {torch.float64} and not head.follows_target_dtype
    head = kind.from_pretrained(folder, torch_dtype="auto")
    assert dtypes(head) == {torch.float32} and head.follows_target_dtype
    head = kind.from_pretrained(folder, dtype=torch.bfloat16, torch_dtype=torch.float64)
    assert dtypes(head) == {torch.bfloat16}


@pytest.mark.parametrize("kind, folder", HEADS)
def test_fields_of_the_config(kind: type[PublishedModel], folder: Path, tmp_path: Path) -> None:
    head = kind.from_pretrained(folder, default_tree=[[0], [1]], target_name="some/model", device_map="cpu")
    assert head.config.default_tree == [[0], [1]] and head.config.target_name == "some/model"
    assert head.name_or_path == str(folder)
    head.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert again.config.default_tree == [[0], [1]] and again.config.target_name == "some/model"
    config = again.config
    assert kind.from_pretrained(tmp_path, config=config, target_name="another").config.target_name == "another"
    assert config.target_name == "some/model"


@pytest.mark.parametrize("kind, folder", [*HEADS, (BlockHead, GOLDENS / "dspark")])
def test_a_default_tree_given_as_an_object(kind: type[PublishedModel], folder: Path, tmp_path: Path) -> None:
    tree = DynamicTree(depth=3, top_k=2, num_nodes=6)
    kind.from_pretrained(folder, default_tree=tree).save_pretrained(tmp_path)
    assert as_tree(kind.from_pretrained(tmp_path).config.default_tree) == tree


def test_medusa_heads_of_several_dtypes(tmp_path: Path) -> None:
    """Nothing is rounded: the widest is taken for all."""
    weights = torch.load(GOLDENS / "medusa" / "medusa_lm_head.pt", weights_only=True)
    weights = {key: tensor.half() if key == "0.1.weight" else tensor for key, tensor in weights.items()}
    heads = MedusaHeads.from_pretrained(publish(tmp_path, {}, weights, "medusa_lm_head.pt"))
    assert dtypes(heads) == {torch.float32}
    assert torch.equal(heads.heads[1].lm_head.weight, weights["1.1.weight"])


def test_fewer_medusa_heads() -> None:
    whole, first = (MedusaHeads.from_pretrained(GOLDENS / "medusa", **options) for options in ({}, {"num_heads": 1}))
    assert len(whole.heads) > len(first.heads) == 1
    assert torch.equal(whole.heads[0].lm_head.weight, first.heads[0].lm_head.weight)


@pytest.mark.parametrize(
    "golden, field, key",
    [
        ("safeailab_eagle3", "final_norm", "norm.weight"),
        ("safeailab_eagle3", "norm_embeddings", "layers.0.input_layernorm.weight"),
        ("safeailab_eagle3", "has_lm_head", "lm_head.weight"),
        ("speculators_eagle3", "has_embeddings", "embed_tokens.weight"),  # left out as it is read
        ("safeailab_eagle1", "has_embeddings", "embed_tokens.weight"),
    ],
)
def test_tensors_that_a_field_takes_in_or_leaves_out(golden: str, field: str, key: str) -> None:
    """Every field of the config can be set while loading, and decides whether a tensor of the checkpoint is used."""
    _, weights = published(golden)
    for value in (True, False):
        head = EagleHead.from_pretrained(GOLDENS / golden, **{field: value})
        assert getattr(head.config, field) == value and (key in head.state_dict()) == value
        if value:
            found = head.state_dict()[key]
            published_key = key if key in weights else key.replace("layers.0.", "midlayer.")
            assert torch.equal(found, weights[published_key].to(found.dtype))


def test_fields_of_the_layers(tmp_path: Path) -> None:
    """A dict changes the fields that it names."""
    as_read = EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3").config.text_config.to_dict()
    config = EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3", text_config={"rms_norm_eps": 0.5}).config
    assert config.text_config.to_dict() == as_read | {"rms_norm_eps": 0.5}


def test_a_tensor_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="`embed_tokens.weight` is missing"):
        EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3", has_embeddings=True)


def test_medusa_heads_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="`heads.5.lm_head.weight` is missing"):
        MedusaHeads.from_pretrained(GOLDENS / "medusa", num_heads=6)


def test_rope_theta_of_a_head(tmp_path: Path) -> None:
    """An argument on its own: published configs have it at different places."""
    config, weights = published("safeailab_eagle3")
    for number, fields in enumerate(
        ({}, {"rope_theta": 7.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    ):
        folder = publish(tmp_path / str(number), config | fields, weights)
        head = EagleHead.from_pretrained(folder, rope_theta=500_000)
        assert head.config.text_config.rope_parameters["rope_theta"] == 500_000.0
        expected = 500_000.0 ** -(torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(head.rotary_emb.inv_freq, expected)
        assert "rope_theta" not in head.config.conventions
    head.save_pretrained(tmp_path / "saved")
    saved = EagleHead.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved.rotary_emb.inv_freq, head.rotary_emb.inv_freq)


@pytest.mark.parametrize("theta", [0, -1.0, True, "10000", float("inf")])
def test_an_impossible_rope_theta(theta: object) -> None:
    with pytest.raises(ValueError, match="`rope_theta` must be a positive number, but is"):
        EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3", rope_theta=theta)
