"""Block heads in the formats of others: the same logits bit for bit, all fields, and what a format cannot say."""

import json

import pytest
import torch
from block.test_gemma import CONFIG as GEMMA
from block.test_gemma import weights_of as gemma_weights
from support.blocks import ALL, block_head, golden_blocks
from support.eagle import GOLDENS, equal_weights, publish
from support.goldens import TINY_TARGET

from hf_specdec import BlockConfig, BlockHead
from hf_specdec.block.formats import WRITERS, write_block
from hf_specdec.checkpoints.target_files import TargetFiles


TARGET = TargetFiles(TINY_TARGET)
FORMATS = {
    "dflash": ["zlab", "speculators"],
    "jetspec": ["zlab"],
    "dspark": ["deepspec", "speculators"],
    "dflash2": ["zlab", "speculators"],
    "peagle": ["speculators"],
}
LAYERS = {
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 64}
DFLASH2 = {"conv_kernel_size": 2, "selector_rank": 4, "selector_top_k": 8}


def new_head(layers=None, **fields):
    torch.manual_seed(0)
    values = {"mask_token_id": 3, "aux_layer_ids": [1, 3], "text_config": LAYERS | (layers or {})} | fields
    return BlockHead(BlockConfig(**values)).eval()


def written(head, folder, format, target=None):
    write_block(head, folder, format, target)
    return BlockHead.from_pretrained(folder).eval()


@pytest.mark.parametrize(("golden", "format"), [(golden, format) for golden in ALL for format in FORMATS[golden]])
def test_goldens(golden, format, tmp_path):
    """And back into our own format."""
    head = block_head(golden)
    again = written(head, tmp_path / "there", format)
    again.save_pretrained(tmp_path / "back")
    back = block_head(tmp_path / "back")
    expected = golden_blocks(head, golden)
    for other in (again, back):
        assert equal_weights(head, other)
        for name, array in golden_blocks(other, golden).items():
            assert torch.equal(array, expected[name])
    assert again.config.source_format.startswith(format if golden != "peagle" else "peagle")
    assert again.config.target_name == head.config.target_name


@pytest.mark.parametrize("golden", ALL)
@pytest.mark.parametrize("format", WRITERS)
def test_formats_of_other_kinds(golden, format, tmp_path):
    if format not in FORMATS[golden]:
        with pytest.raises(ValueError, match=rf"the format {format} cannot say so.*hf_specdec"):
            write_block(block_head(golden), tmp_path / "new", format)
        assert not (tmp_path / "new").exists()


HEADS = {
    "windows": ({}, WINDOWS, ["zlab", "speculators"]),
    "open windows": ({"window_is_causal": False}, WINDOWS, ["zlab", "speculators"]),
    "causal": ({"causal": True}, WINDOWS, ["zlab"]),
    "another size": ({"target_hidden_size": 20}, {}, ["zlab", "speculators"]),
    "yarn": (
        {},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
        ["zlab", "speculators"],
    ),
    "own embeddings": ({"has_embeddings": True}, {}, ["speculators"]),
    "draft vocabulary": ({"draft_vocab_size": 40, "has_lm_head": True}, {}, ["speculators"]),
    "anchor first": ({"anchor_first": True, "has_embeddings": True, "has_lm_head": True}, {}, ["deepspec"]),
    "gated": ({"markov_rank": 4, "markov_type": "gated", "anchor_first": True}, {}, ["speculators"]),
    "rnn": ({"markov_rank": 4, "markov_type": "rnn", "has_confidence_head": True}, {}, ["speculators"]),
    "confidence": ({"has_confidence_head": True, "anchor_first": True}, {}, ["speculators"]),
    "dflash2": (DFLASH2 | {"window_is_causal": False}, WINDOWS, ["zlab", "speculators"]),
    "scales": (DFLASH2 | {"embedding_scale": 2.0, "output_multiplier": 0.5}, {}, ["zlab"]),
    "soft cap": (DFLASH2 | {"final_logit_softcapping": 30.0}, {}, ["zlab"]),
}


@pytest.mark.parametrize(("head", "format"), [(name, format) for name in HEADS for format in HEADS[name][2]])
def test_all_that_a_head_may_be(head, format, tmp_path):
    fields, layers, _ = HEADS[head]
    head = new_head(layers, **fields)
    again = written(head, tmp_path, format)
    assert equal_weights(head, again)
    assert {name: getattr(again.config, name) for name in fields} == fields
    inputs = {"inputs_embeds": torch.randn(1, 8, 32), "lm_head": torch.nn.Linear(32, 60)}
    with torch.no_grad():
        assert torch.equal(head(**inputs).hidden_states, again(**inputs).hidden_states)
        assert torch.equal(head(**inputs).logits, again(**inputs).logits)


REFUSED = [
    ("zlab", {"anchor_first": True}, {}, "`anchor_first`=True"),
    ("zlab", {"has_lm_head": True}, {}, "`has_lm_head`=True"),
    ("zlab", {"has_embeddings": True}, {}, "`has_embeddings`=True"),
    ("zlab", {"draft_vocab_size": 40}, {}, "`draft_vocab_size`=40"),
    ("zlab", {"markov_rank": 4, "markov_type": "gated"}, {}, "`markov_rank`=4"),
    ("zlab", {"has_confidence_head": True}, {}, "`has_confidence_head`=True"),
    ("zlab", {"aux_layer_ids": [0, 3]}, {}, "`aux_layer_ids`=\\[0, 3\\].*embeddings"),
    ("zlab", DFLASH2 | {"window_is_causal": True}, WINDOWS, "`window_is_causal`=True"),
    ("zlab", {"conv_kernel_size": 2}, {}, "`selector_rank`=0"),
    ("zlab", {"output_multiplier": 0.5}, {}, "`output_multiplier`=0.5"),
    ("deepspec", {"anchor_first": False}, {}, "`anchor_first`=False"),
    ("deepspec", {"anchor_first": True, "causal": True}, {}, "`causal`=True"),
    ("deepspec", {"anchor_first": True, "draft_vocab_size": 40}, {}, "`draft_vocab_size`=40"),
    ("deepspec", {"anchor_first": True} | DFLASH2, {}, "`conv_kernel_size`=2"),
    ("deepspec", {"anchor_first": True}, WINDOWS, "`sliding_window`=9"),
    ("deepspec", {"anchor_first": True, "aux_layer_ids": None}, {}, "`aux_layer_ids`=None.*`--target`"),
    ("deepspec", {"anchor_first": True}, {}, "uses the target's embed.*`--target`"),
    ("speculators", {"causal": True}, {}, "`causal`=True"),
    ("speculators", {"aux_layer_ids": None}, {}, "`aux_layer_ids`=None.*`--target`"),
    ("speculators", {"draft_vocab_size": 40}, {}, "uses the target's lm_head.*`--target`"),
    ("speculators", DFLASH2 | {"embedding_scale": 2.0}, {}, "`embedding_scale`=2.0"),
    ("speculators", {"selector_rank": 4}, {}, "`conv_kernel_size`=0"),
]


@pytest.mark.parametrize(("format", "fields", "layers", "message"), REFUSED)
def test_what_a_format_cannot_say(format, fields, layers, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_block(new_head(layers, **fields), tmp_path / "new", format)
    assert not (tmp_path / "new").exists()


def test_a_target_of_another_depth(tmp_path):
    depth = TARGET.num_layers
    head = new_head(num_target_layers=depth + 1)
    with pytest.raises(ValueError, match=f"has {depth} layers, but the head was trained for a target of {depth + 1}"):
        write_block(head, tmp_path / "zlab", "zlab", TARGET)
    assert not list(tmp_path.iterdir())


def test_unknown_formats(tmp_path):
    with pytest.raises(ValueError, match="`format` must be one of 'zlab', 'deepspec', 'speculators', but is 'vllm'"):
        write_block(new_head(), tmp_path, "vllm")


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_fields_without_a_place(format, tmp_path):
    """They are carried in an object of ours."""
    recipe = {"steps": 3, "data": ["a", "b"]}
    head = new_head(default_tree="[(0,), (1,), (0, 0)]", target_name="some/model", recipe=recipe)
    config = written(head, tmp_path, format).config
    assert (config.target_name, config.recipe) == ("some/model", recipe)
    carried = json.loads((tmp_path / "config.json").read_text())["hf_specdec"]
    assert carried == {"default_tree": config.default_tree, "target_name": "some/model", "recipe": recipe}
    carried["default_tree"] = "deep"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hf_specdec": carried}))
    with pytest.raises(ValueError, match="`default_tree`='deep' in `hf_specdec` of config.json is no tree"):
        BlockHead.from_pretrained(tmp_path)


def test_layers_and_tensors_of_a_given_target(tmp_path):
    """Layers are named, and what the format stores is copied."""
    sizes = {"hidden_size": 64, "vocab_size": 512, "head_dim": 16}
    head = new_head(sizes, aux_layer_ids=None, anchor_first=True)
    for format, copied in (("deepspec", True), ("speculators", False)):
        again = written(head, tmp_path / format, format, TARGET)
        assert again.config.aux_layer_ids == head.config.aux_boundaries(8) == [2, 6]
        assert again.config.target_name == str(TINY_TARGET)
        assert (again.config.has_embeddings, again.config.has_lm_head) == (copied, copied)
        if copied:
            assert torch.equal(again.embed_tokens.weight, TARGET.embeddings())
            assert torch.equal(again.lm_head.weight, TARGET.lm_head())
    small = new_head(sizes, draft_vocab_size=20)
    small.d2t.copy_(torch.arange(20))
    again = written(small, tmp_path / "small", "speculators", TARGET)
    assert torch.equal(again.lm_head.weight, TARGET.lm_head()[::2][:20])
    last = new_head(sizes, aux_layer_ids=[2, 8], anchor_first=True)
    with pytest.raises(ValueError, match=r"`aux_layer_ids`=\[2, 8\].*last layer"):
        write_block(last, tmp_path / "last", "deepspec", TARGET)


def test_gemma(tmp_path):
    publish(tmp_path / "source", GEMMA | {"num_key_value_heads": 2}, gemma_weights())
    head = BlockHead.from_pretrained(tmp_path / "source").eval()
    again = written(head, tmp_path / "again", "deepspec")
    assert equal_weights(head, again)
    inputs = {"input_ids": head.block_tokens(torch.tensor([5]))}
    with torch.no_grad():
        assert torch.equal(head(**inputs).logits, again(**inputs).logits)
    for format in ("zlab", "speculators"):
        with pytest.raises(ValueError, match="the format .* cannot say so"):
            write_block(head, tmp_path / "new", format)


def test_bfloat16(tmp_path):
    head = BlockHead.from_pretrained(GOLDENS / "dspark")
    assert head.dtype == torch.bfloat16
    assert written(head, tmp_path, "speculators").dtype == torch.bfloat16
