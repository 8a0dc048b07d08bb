"""What is read from each published format, and the places where formats and their relatives differ."""

import pytest
import torch
from support.blocks import block_head, difference, golden_blocks
from support.eagle import arrays, publish, published

from hf_specdec import BlockHead


TOLERANCE = 1e-4
DSPARK_OPTIONS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "mask_token_id",
    "target_layer_ids",
)


def same_logits(folder, golden, **options):
    return difference(block_head(folder, **options), golden) < TOLERANCE


@pytest.mark.parametrize(
    ("golden", "kind", "source", "fields"),
    [
        ("dflash", "dflash", "zlab_dflash", {"anchor_first": False, "causal": False, "num_drafts": 7}),
        ("jetspec", "dflash", "zlab_jetspec", {"anchor_first": False, "causal": True, "num_drafts": 7}),
        ("dspark", "dspark", "deepspec", {"anchor_first": True, "causal": False, "num_drafts": 6, "markov_rank": 16}),
        ("dflash2", "dflash2", "speculators_dflash2", {"anchor_first": False, "window_is_causal": False}),
        ("peagle", "peagle", "peagle", {"num_drafts": 5, "num_rows": 4, "has_embeddings": True, "has_lm_head": True}),
    ],
)
def test_goldens(golden, kind, source, fields):
    config = block_head(golden).config
    assert (config.kind, config.source_format) == (kind, source)
    assert {name: getattr(config, name) for name in fields} == fields
    assert {"block_size", "mask_token_id", "aux_layer_ids", "rope_theta"} <= config.conventions.keys()
    assert ("anchor_first" in config.conventions) == (golden != "peagle")


def test_conventions_are_told():
    told = block_head("dspark", mask_token_id=14).config.conventions
    assert told["anchor_first"].startswith("True: row 0, the anchor's, predicts the next token")
    assert told["mask_token_id"] == "14 — given as an argument"
    assert told["aux_layer_ids"].startswith("[2, 4, 6] (boundaries) — [1, 3, 5] in config.json, which are outputs")


# ------------------------------------------------------------------------------------------------------------ layers


def test_layer_ids_in_another_order(tmp_path):
    """The columns of `fc` follow their layers."""
    config, weights = published("dflash")
    config["dflash_config"]["target_layer_ids"] = [5, 1]
    weights["fc.weight"] = weights["fc.weight"].roll(64, dims=1)
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.aux_layer_ids == [2, 6]
    assert "ascending order" in head.config.conventions["aux_layer_ids"]
    assert difference(head, "dflash") < TOLERANCE


def test_the_embedding_as_a_layer(tmp_path):
    config, weights = published("dspark")
    config["target_layer_ids"] = [-1, 3, 5]
    assert block_head(publish(tmp_path, config, weights)).config.aux_layer_ids == [0, 4, 6]


@pytest.mark.parametrize("depth", [8, None])
def test_layers_by_default(depth, tmp_path):
    """Two layers of the draft, spread over eight of the target: outputs 1 and 5."""
    config, weights = published("dflash")
    del config["dflash_config"]["target_layer_ids"]
    config["num_target_layers"] = depth
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.aux_layer_ids == ([2, 6] if depth else None)
    assert head.config.aux_boundaries(8) == [2, 6]
    assert head.config.aux_boundaries(36) == ([2, 6] if depth else [2, 34])
    assert difference(head, "dflash") < TOLERANCE


def test_layers_of_published_heads():
    """z-lab's formula for the depths of its own heads; halves are rounded to even."""
    config = block_head("dflash").config
    config.aux_layer_ids = None
    known = ((36, [1, 9, 17, 25, 33]), (28, [14]), (33, [1, 16, 30]), (32, [1, 15, 29]))
    for depth, outputs in known:
        config.num_aux_features = len(outputs)
        assert config.aux_boundaries(depth) == [layer + 1 for layer in outputs]
    config.aux_layer_ids = [2, 40]
    with pytest.raises(ValueError, match=r"`aux_layer_ids`=\[2, 40\].*36 layers does not have"):
        config.aux_boundaries(36)


def test_target_of_another_size(tmp_path):
    config, weights = published("dflash")
    weights["fc.weight"] = torch.randn(64, 96)
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.target_hidden_size == 48 and head.config.feature_size == 96


# ------------------------------------------------------------------------------------------------------- conventions


@pytest.mark.parametrize("place", ["dflash_config", None])
@pytest.mark.parametrize("name", ["causal_head", "causal", "is_causal"])
def test_words_for_a_causal_block(name, place, tmp_path):
    config, weights = published("jetspec")
    del config["dflash_config"]["causal_head"]
    publish(tmp_path, config, weights)
    assert not block_head(tmp_path).config.causal
    (config if place is None else config[place])[name] = True
    assert same_logits(publish(tmp_path, config, weights), "jetspec")


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, (False, True)), ({"causal": False}, (False, False)), ({"causal_head": True}, (True, True))],
)
def test_causality_of_windows(change, expected, tmp_path):
    config, weights = published("dflash")
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    config["dflash_config"] |= change
    config = block_head(publish(tmp_path, config, weights)).config
    assert (config.causal, config.window_is_causal) == expected
    assert "window of 9" in config.conventions["window_is_causal"]


@pytest.mark.parametrize(("said", "expected"), [(True, False), (False, True), (None, False)])
def test_windows_of_speculators(said, expected, tmp_path):
    """DFlash 2 is not causal in sliding layers by default; the word is not about the others."""
    config, weights = published("dflash2")
    config["sliding_window_non_causal"] = said
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 9}
    config = block_head(publish(tmp_path, config, weights)).config
    assert config.window_is_causal == expected
    assert not config.causal


def as_speculators(golden, kind, layer_ids):
    """A golden of another format in the spelling of speculators."""
    config, weights = published(golden)
    options = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": config,
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": layer_ids,
        "mask_token_id": config.get("mask_token_id") or config["dflash_config"]["mask_token_id"],
        "draft_vocab_size": 512,
        "speculators_config": {"verifier": {"name_or_path": "some/model"}},
        **{name: config[name] for name in options & config.keys()},
    }, weights


@pytest.mark.parametrize("said", [True, False, None])
def test_dspark_of_speculators(said, tmp_path):
    config, weights = as_speculators("dspark", "dspark", [2, 4, 6])
    if said is not None:
        config["sample_from_anchor"] = said
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.anchor_first == (said is not False)
    assert head.config.target_name == "some/model"
    assert (difference(head, "dspark") < TOLERANCE) == (said is not False)
    assert "sample_from_anchor" in head.config.conventions["anchor_first"]


def test_dflash_of_speculators(tmp_path):
    config, weights = as_speculators("dflash", "dflash", [2, 6])
    assert same_logits(publish(tmp_path, config, weights), "dflash")
    del config["block_size"]
    config = block_head(publish(tmp_path, config, weights)).config
    assert config.block_size == 8 and "default" in config.conventions["block_size"]


@pytest.mark.parametrize("with_lm_head", [True, False])
def test_draft_vocabulary(with_lm_head, tmp_path):
    """Every second token; predecessors stay the target's."""
    config, weights = as_speculators("dspark", "dspark", [2, 4, 6])
    kept = torch.arange(0, 512, 2)
    config["draft_vocab_size"] = 256
    weights["d2t"] = kept - torch.arange(256)
    weights["t2d"] = torch.zeros(512, dtype=torch.bool).index_fill(0, kept, True)
    weights["lm_head.weight"] = weights["lm_head.weight"][kept]
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][kept]
    if not with_lm_head:
        del weights["lm_head.weight"]
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.num_draft_tokens == 256 and torch.equal(head.target_ids, kept)
    assert (head.lm_head is None) == (not with_lm_head)
    if with_lm_head:
        found, expected = golden_blocks(head, "dspark")["chain_logits"], arrays("dspark")["chain_logits"]
        torch.testing.assert_close(found, expected[..., kept], atol=TOLERANCE, rtol=0)


def as_specforge(old_keys):
    config, weights = published("dspark")
    options = {name: config.pop(name) for name in DSPARK_OPTIONS}
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark", **options}}
    if old_keys:
        weights = {
            f"logit_head.{key}" if key.startswith(("markov_head.", "confidence_head.")) else key: tensor
            for key, tensor in weights.items()
        }
    return config, weights


@pytest.mark.parametrize("old_keys", [False, True])
def test_specforge(old_keys, tmp_path):
    config, weights = as_specforge(old_keys)
    head = block_head(publish(tmp_path, config, weights))
    assert head.config.source_format == "specforge_dspark" and head.config.anchor_first
    assert difference(head, "dspark", "chain_logits") < TOLERANCE
    config.pop("architectures")
    del config["dflash_config"]["projector_type"]
    assert same_logits(publish(tmp_path, config, weights), "dspark")


def test_dflash_of_deepspec(tmp_path):
    """Anchor first, although DFlash."""
    config, weights = published("dspark")
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    weights = {key: tensor for key, tensor in weights.items() if not key.startswith(("markov_", "confidence_"))}
    head = block_head(publish(tmp_path, config, weights))
    assert (head.config.kind, head.config.anchor_first, head.conditions) == ("dflash", True, False)
    assert difference(head, "dspark") < TOLERANCE


def test_dflash2_of_zlab(tmp_path):
    config, weights = published("dflash2")
    options = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "mask_token_id")
    published_config = config["transformer_layer_config"] | {
        "architectures": ["DFlash2DraftModel"],
        "block_size": config["block_size"],
        "dflash_config": {name: config[name] for name in options} | {"target_layer_ids": [1, 3, 5]},
    }
    head = block_head(publish(tmp_path, published_config, weights))
    assert head.config.source_format == "zlab_dflash2" and not head.config.window_is_causal
    assert difference(head, "dflash2", "chain_scores") < TOLERANCE
    published_config["dflash_config"] |= {
        "input_embedding_scale": 2.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    config = block_head(publish(tmp_path, published_config, weights)).config
    assert (config.embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (2.0, 0.5, 30.0)


def test_block_size_by_default(tmp_path):
    for golden, size in (("dflash", 16), ("dspark", 7)):
        config, weights = published(golden)
        del config["block_size"]
        assert block_head(publish(tmp_path / golden, config, weights)).config.block_size == size


# ------------------------------------------------------------------------------------------------------------ P-EAGLE


@pytest.mark.parametrize("token", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_peagle_for_vllm(token, tmp_path):
    """EAGLE-3's spelling: the first layer is `midlayer`, and the layers' fields stand in the config itself."""
    config, weights = published("peagle")
    layers = config["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"], "num_depths": 5}
    layers |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], token: 13}
    weights = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in weights.items()}
    weights["mask_hidden"] = weights["mask_hidden"].view(1, -1)
    assert same_logits(publish(tmp_path, layers, weights), "peagle")
    del layers["num_depths"]
    assert block_head(publish(tmp_path, layers, weights)).config.block_size == 8
    assert same_logits(tmp_path, "peagle", block_size=5)


def test_names_with_a_prefix(tmp_path):
    config, weights = published("dflash")
    weights = {f"model.{key}": tensor for key, tensor in weights.items()}
    assert same_logits(publish(tmp_path, config, weights), "dflash")


def test_repeated_embeddings(tmp_path):
    """Own embeddings and lm_head go by their keys."""
    config, weights = published("dflash")
    weights["embed_tokens.weight"] = torch.zeros(512, 64)
    head = BlockHead.from_pretrained(publish(tmp_path, config, weights))
    assert head.config.has_embeddings and not head.config.has_lm_head
