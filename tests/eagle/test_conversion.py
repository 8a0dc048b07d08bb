"""Heads written in the formats of others: read again they are the same bits and give the same logits."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.eagle import (
    ALL,
    EAGLE_1,
    GOLDENS,
    MODELOPTS,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    equal_weights,
    golden_rows,
    largest_difference,
    publish,
    published,
)
from support.goldens import TINY_TARGET, trained_target

from hf_specdec.eagle import EagleConfig, EagleHead
from hf_specdec.eagle.formats import WRITERS, TargetFiles, write_head
from hf_specdec.trees import DynamicTree, as_tree


TARGET = TargetFiles(TINY_TARGET)
# ModelOpt's own reading of its heads is one that no other format has; the servers' is.
READINGS = {golden: ("_singlenorm", {"norm_hidden_twice": False}) for golden in MODELOPTS}


def source(golden, **options):
    suffix, reading = READINGS.get(golden, ("", {}))
    return EagleHead.from_pretrained(GOLDENS / golden, **reading | options), suffix


CONVERSIONS = [
    (golden, format)
    for golden in ALL
    for format in WRITERS
    if (golden == EAGLE_1) <= (format == "safeailab")  # EAGLE-1 is SafeAILab's alone
    and not (golden == SPECULATORS and format != "speculators")  # norm_before_residual is theirs alone
    and not (golden == "modelopt_eagle3_yarn" and format == "safeailab")
]


@pytest.mark.parametrize(("golden", "format"), CONVERSIONS)
def test_round_trip(golden, format, tmp_path):
    head, suffix = source(golden)
    write_head(head, tmp_path, format, TARGET)
    again = EagleHead.from_pretrained(tmp_path)
    assert again.config.source_format.startswith(format)
    assert equal_weights(head, again)
    assert again.config.aux_boundaries(8) == head.config.aux_boundaries(8)
    found = golden_rows(again.float().eval(), golden)
    assert max(largest_difference(found, golden, suffix).values()) < 1e-4


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECFORGE])
def test_there_and_back_through_all(golden, tmp_path):
    first, _ = source(golden)
    head = first
    for number, format in enumerate([*WRITERS, "hf_specdec", *reversed(WRITERS)]):
        folder = tmp_path / str(number)
        if format == "hf_specdec":
            head.save_pretrained(folder)
        else:
            write_head(head, folder, format)
        head = EagleHead.from_pretrained(folder)
    assert equal_weights(first, head)
    left_out = {"source_format", "conventions", "aux_layer_convention"}
    kept = [{k: v for k, v in h.config.to_dict().items() if k[0] != "_" and k not in left_out} for h in (first, head)]
    assert kept[0] == kept[1]


TREE = {"depth": 3, "top_k": 2, "num_nodes": 5}
# For every field a value that is not the default, and what must come with it.
OTHER_VALUES = {
    "text_config": {"layers": {"rms_norm_eps": 1e-3, "max_position_embeddings": 77, "hidden_act": "gelu"}},
    "eagle_version": {"eagle_version": 1},
    "target_hidden_size": {"target_hidden_size": 48, "has_embeddings": True},
    "num_aux_features": {"num_aux_features": 2, "aux_layer_ids": [1, 4]},
    "aux_layer_ids": {"aux_layer_ids": [1, 4, 6]},
    "aux_layer_convention": {"aux_layer_ids": [1, 4, 6], "aux_layer_convention": "outputs"},
    "draft_vocab_size": {"draft_vocab_size": 100},
    "has_fc": {"has_fc": False, "num_aux_features": 1, "aux_layer_ids": [3]},
    "fc_bias": {"fc_bias": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_hidden_twice": {"norm_hidden_twice": True},
    "norm_embeddings": {"norm_embeddings": False},
    "norm_output": {"norm_output": True},
    "final_norm": {"final_norm": False},
    "has_embeddings": {"has_embeddings": True},
    "has_lm_head": {"has_lm_head": False},
    "default_tree": {"default_tree": TREE},
    "target_name": {"target_name": "some/model"},
    "recipe": {"recipe": {"steps": 3, "data": ["a", "b"]}},
}


def test_all_fields_are_tried():
    assert OTHER_VALUES.keys() | {"source_format", "conventions"} == EagleConfig.__annotations__.keys()


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("field", OTHER_VALUES)
def test_every_field_survives_or_is_named(field, format, tmp_path, caplog):
    """For EAGLE-3 and EAGLE-1 heads: what is written is read again as the same head, or nothing is written."""
    for version in (3, 1):
        fields = {"eagle_version": version} | OTHER_VALUES[field]
        if version == 1 and field not in ("text_config", "default_tree", "recipe", "has_embeddings"):
            continue
        head, folder = EagleHead(new_config(**fields)), tmp_path / str(version)
        target = TARGET if fields["eagle_version"] == 1 or field == "has_lm_head" else None
        try:
            write_head(head, folder, format, target)
        except ValueError as error:
            named = set(fields) | set(fields.get("layers", ()))
            assert any(f"`{name}`=" in str(error) or f".{name}`=" in str(error) for name in named), error
            assert not folder.exists()
            continue
        again = EagleHead.from_pretrained(folder)
        if field == "has_lm_head":
            assert again.config.has_lm_head and "`has_lm_head`=False" in caplog.text
            continue
        assert equal_weights(head, again)
        left_out = {"source_format", "conventions", "aux_layer_ids", "aux_layer_convention", "text_config"}
        left_out |= set() if target is None else {"target_name"}
        for name in EagleConfig.__annotations__.keys() - left_out:
            assert getattr(again.config, name) == getattr(head.config, name), name
        assert again.config.aux_boundaries(8) == head.config.aux_boundaries(8)
        for name in fields.get("layers", ()):
            assert getattr(again.config.text_config, name) == getattr(head.config.text_config, name), name


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("tree", ["[(0,), (1,), (0, 0)]", [(0,), (0, 0)], "auto", DynamicTree(**TREE)])
def test_trees_in_any_spelling(tree, format, tmp_path):
    head, _ = source(SAFEAILAB, default_tree=tree)
    write_head(head, tmp_path, format)
    assert as_tree(EagleHead.from_pretrained(tmp_path).config.default_tree) == as_tree(tree)


def test_a_tree_that_is_none(tmp_path):
    config, weights = published(SAFEAILAB)
    publish(tmp_path, config | {"hf_specdec": {"default_tree": [[0, 1]]}}, weights)
    with pytest.raises(ValueError, match=r"`default_tree`=\[\[0, 1\]\] in `hf_specdec` of config.json is no tree"):
        EagleHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECFORGE])
def test_as_the_format_itself_writes_it(golden, tmp_path):
    """The same keys, and the same tensors, as in the published checkpoint."""
    head, _ = source(golden)
    path = write_head(head, tmp_path, golden.split("_")[0])
    read = load_file if path.suffix == ".safetensors" else torch.load
    written, published = read(path), read(GOLDENS / golden / path.name)
    assert written.keys() == published.keys()
    assert all(torch.equal(written[key], published[key]) for key in published)
    config, reference = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, GOLDENS / golden))
    assert config["architectures"] == reference["architectures"]
    for field in (
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "draft_vocab_size",
        "rms_norm_eps",
        "model_type",
    ):
        assert config[field] == reference[field], field
    assert config["rope_theta"] == reference.get("rope_theta", 10000.0)


def test_as_speculators_writes_it(tmp_path):
    head, _ = source(SPECULATORS)
    path = write_head(head, tmp_path, "speculators", TARGET)
    written, published = load_file(path), load_file(GOLDENS / SPECULATORS / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[key], published[key]) for key in published)
    config, reference = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, GOLDENS / SPECULATORS)
    )
    for field in set(reference) - {"auto_map", "dtype", "transformers_version", "speculators_version"}:
        if field not in ("transformer_layer_config", "speculators_config"):
            assert config[field] == reference[field], field
    layers, expected = config["transformer_layer_config"], reference["transformer_layer_config"]
    assert {name: layers[name] for name in expected if name in layers} == {
        name: expected[name] for name in expected if name in layers
    }
    assert expected.keys() - layers.keys() == {"pretraining_tp", "use_cache"}
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("format", ["speculators", "specforge"])
@pytest.mark.parametrize(
    ("ids", "convention"), [([1, 3, 6], "outputs"), ([3, 5, 8], "boundaries"), ([1, 4, 7], "auto")]
)
def test_layer_ids_are_translated(format, ids, convention, tmp_path):
    head, _ = source(SAFEAILAB, aux_layer_ids=ids, aux_layer_convention=convention)
    boundaries = head.config.aux_boundaries(8)
    write_head(head, tmp_path, format, TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    options = config if format == "speculators" else config["eagle_config"]
    written = options["eagle_aux_hidden_state_layer_ids"]
    assert written == (boundaries if format == "speculators" else [layer - 1 for layer in boundaries])
    assert EagleHead.from_pretrained(tmp_path).config.aux_boundaries(8) == boundaries


@pytest.mark.parametrize("format", WRITERS)
def test_layer_ids_that_need_the_target(format, tmp_path):
    head, _ = source("modelopt_eagle3")
    assert head.config.aux_layer_convention == "auto"
    with pytest.raises(ValueError, match=r"`aux_layer_ids`=\[1, 3, 4\]: .* Give it \(`--target`\)"):
        write_head(head, tmp_path, format)
    assert not list(tmp_path.iterdir())


def test_safeailab_knows_the_default_layers_only(tmp_path):
    head, _ = source(SAFEAILAB, aux_layer_ids=[1, 3, 4])
    with pytest.raises(
        ValueError, match=r"`aux_layer_ids`=\[1, 3, 4\]: the format safeailab cannot say so.*\[2, 4, 5\]"
    ):
        write_head(head, tmp_path, "safeailab", TARGET)
    head, _ = source(SAFEAILAB, aux_layer_ids=[2, 4, 5])
    write_head(head, tmp_path, "safeailab", TARGET)
    with pytest.raises(ValueError, match="`--target` tells L"):
        write_head(head, tmp_path, "safeailab")


def test_specforge_has_no_number_for_the_embeddings(tmp_path):
    head, _ = source(SAFEAILAB, aux_layer_ids=[0, 3, 4])
    with pytest.raises(ValueError, match="boundary 0 is the embeddings"):
        write_head(head, tmp_path, "specforge")


REFUSED = [
    (SPECULATORS, {}, "safeailab", "`norm_before_residual`=True: the format safeailab cannot say so; it knows False"),
    (SPECULATORS, {}, "specforge", "`norm_before_residual`=True"),
    (SPECFORGE, {"norm_output": True}, "safeailab", "`norm_output`=True"),
    (SPECFORGE, {"norm_output": True}, "specforge", "`norm_output`=True"),
    (SPECFORGE, {"norm_hidden_twice": True}, "speculators", "`norm_hidden_twice`=True"),
    ("modelopt_eagle3", {"norm_hidden_twice": True}, "safeailab", "`norm_hidden_twice`=True"),
    ("modelopt_eagle3_yarn", {}, "safeailab", "`rope_type`='yarn'"),
    (EAGLE_1, {}, "speculators", "`eagle_version`=1: the format speculators cannot say so; it knows 3"),
    (EAGLE_1, {}, "specforge", "`eagle_version`=1"),
]


@pytest.mark.parametrize(("golden", "options", "format", "message"), REFUSED)
def test_what_a_format_cannot_say(golden, options, format, message, tmp_path):
    head, _ = source(golden, **options)
    with pytest.raises(ValueError) as caught:
        write_head(head, tmp_path, format, TARGET)
    assert message in str(caught.value)
    assert "hf_specdec" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "format", "message"),
    [
        ({"fc_bias": True}, "speculators", "`fc_bias`=True"),
        ({"norm_before_fc": True}, "specforge", "`norm_before_fc`=True"),
        ({"fc_norm": True}, "safeailab", "`fc_norm`=True"),
        ({"norm_before_fc": True, "fc_norm": True}, "speculators", "speculators with `norm_before_fc`"),
        ({"final_norm": False}, "speculators", "`final_norm`=False"),
        ({"num_aux_features": 0, "has_fc": False}, "speculators", "`has_fc`=False"),
        ({"num_aux_features": 4, "aux_layer_ids": [1, 2, 3, 4]}, "specforge", "`num_aux_features`=4"),
        ({"layers": {"num_hidden_layers": 2}}, "safeailab", "`num_hidden_layers`=2"),
        ({"layers": {"model_type": "qwen3", "head_dim": 16}}, "specforge", "`model_type`='qwen3'"),
        ({"layers": {"model_type": "qwen2"}}, "speculators", "`model_type`='qwen2'"),
        ({"layers": {"attention_bias": True}}, "safeailab", "`attention_bias`=True"),
        ({"layers": {"sliding_window": 8, "layer_types": ["sliding_attention"]}}, "specforge", "`sliding_window`=8"),
    ],
)
def test_what_other_heads_have(fields, format, message, tmp_path):
    head = EagleHead(new_config(**fields))
    with pytest.raises(ValueError) as caught:
        write_head(head, tmp_path, format, TARGET)
    assert message in str(caught.value)


def new_config(layers=None, **fields):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 512} | (layers or {})
    return EagleConfig(text_config=sizes, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"norm_before_fc": True, "draft_vocab_size": 100, "has_embeddings": True},
        {"num_aux_features": 4, "aux_layer_ids": [1, 2, 3, 8]},
        {"layers": {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 2}},
        {"layers": {"sliding_window": 8, "layer_types": ["sliding_attention"]}},
        {"layers": {"attention_bias": True, "mlp_bias": True}},
        {"layers": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}},
        {"target_hidden_size": 48, "has_embeddings": True},
    ],
)
def test_speculators_says_nearly_all(fields, tmp_path):
    head = EagleHead(new_config(**fields)).eval()
    write_head(head, tmp_path, "speculators")
    again = EagleHead.from_pretrained(tmp_path).eval()
    assert equal_weights(head, again)
    features, embeddings = torch.randn(1, 20, head.config.feature_size), torch.randn(1, 20, 64)
    outputs = [model(inputs_embeds=embeddings, features=features) for model in (head, again)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].hidden_states, outputs[1].hidden_states)


def test_specforges_norms_of_features(tmp_path):
    head = EagleHead(new_config(fc_norm=True, draft_vocab_size=100))
    write_head(head, tmp_path, "specforge")
    assert equal_weights(head, EagleHead.from_pretrained(tmp_path))


def test_eagle_1_holds_the_targets_embeddings(tmp_path):
    head, _ = source(EAGLE_1)
    with pytest.raises(ValueError, match="stores the target's embeddings .*`--target`"):
        write_head(head, tmp_path, "safeailab")
    path = write_head(head, tmp_path, "safeailab", TARGET)
    written, published = torch.load(path), torch.load(GOLDENS / EAGLE_1 / "pytorch_model.bin")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[key], published[key]) for key in published)
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is False


@pytest.mark.parametrize("format", ["safeailab", "speculators", "specforge"])
def test_an_lm_head_that_is_the_targets_is_copied(format, tmp_path):
    head = EagleHead(new_config(has_lm_head=False)).eval()
    with pytest.raises(ValueError, match="uses the target's lm_head"):
        write_head(head, tmp_path, format)
    write_head(head, tmp_path, format, TARGET)
    again = EagleHead.from_pretrained(tmp_path).eval()
    assert torch.equal(again.lm_head.weight, trained_target().lm_head.weight)
    features, embeddings = torch.randn(1, 5, 192), torch.randn(1, 5, 64)
    expected = head(inputs_embeds=embeddings, features=features, lm_head=trained_target().lm_head).logits
    torch.testing.assert_close(again(inputs_embeds=embeddings, features=features).logits, expected)


def test_tied_targets(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    target = TargetFiles(tmp_path)
    assert torch.equal(target.lm_head(), target.embeddings())
    assert target.embeddings().shape == (50, 16)


def test_targets_without_such_a_tensor(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs one tensor `…embed_tokens.weight`, but has none"):
        TargetFiles(tmp_path).embeddings()


def test_no_such_format(tmp_path):
    head, _ = source(SAFEAILAB)
    with pytest.raises(
        ValueError, match="`format` must be one of 'safeailab', 'speculators', 'specforge', but is 'x'"
    ):
        write_head(head, tmp_path, "x")
