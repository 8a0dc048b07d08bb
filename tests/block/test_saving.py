"""Heads saved in our own format and read again, by our class and by transformers' `AutoModel`."""

import pytest
import torch
from safetensors.torch import load_file
from support.blocks import ALL, STEPS, block_head, embed, golden_blocks
from support.eagle import GOLDENS, arrays, equal_weights, features_of
from transformers import AutoConfig, AutoModel, DynamicCache

from hf_specdec import BlockConfig, BlockHead


def fields_of(config):
    return {name: getattr(config, name) for name in BlockConfig.__annotations__ if name != "text_config"}


@pytest.mark.parametrize("golden", ALL)
def test_every_field_and_logit(golden, tmp_path):
    recipe = {"held_out_top1": [0.9, 0.5]}
    head = block_head(golden, default_tree=[[0], [0, 0]], target_name="some/model", recipe=recipe)
    head.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == head.state_dict().keys()
    again = BlockHead.from_pretrained(tmp_path, dtype=torch.float32).eval()
    auto = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(auto, BlockHead)
    expected = golden_blocks(head, golden, steps=2)
    for other in (again, auto):
        assert equal_weights(head, other)
        assert fields_of(other.config) == fields_of(head.config)
        assert other.config.text_config.to_dict() == head.config.text_config.to_dict()
        for name, array in golden_blocks(other, golden, steps=2).items():
            assert torch.equal(array, expected[name])
    assert AutoConfig.from_pretrained(tmp_path).conventions == head.config.conventions


def test_arguments_are_saved(tmp_path):
    changes = {"anchor_first": True, "causal": True, "block_size": 5, "mask_token_id": 7, "aux_layer_ids": [3, 4]}
    head = block_head("dflash", rope_theta=123.0, window_is_causal=False, **changes)
    head.save_pretrained(tmp_path)
    config = BlockHead.from_pretrained(tmp_path).config
    assert {name: getattr(config, name) for name in changes} == changes
    assert config.text_config.rope_parameters["rope_theta"] == 123.0 and not config.window_is_causal
    assert (config.num_drafts, config.num_rows) == (5, 5)


def test_card(tmp_path):
    head = block_head("dspark", target_name="some/model", recipe={"steps": 10})
    head.save_pretrained(tmp_path, card=head.model_card("me/dspark"))
    card = (tmp_path / "README.md").read_text()
    for words in (
        "DSpark head",
        "some/model",
        'BlockHead.from_pretrained("me/dspark")',
        "`anchor_first`: True: row 0",
    ):
        assert words in card


@pytest.mark.parametrize(("golden", "dtype"), [("dspark", torch.bfloat16), ("dflash", torch.float32)])
def test_dtype_is_kept_unless_another_is_asked_for(golden, dtype):
    head = BlockHead.from_pretrained(GOLDENS / golden)
    assert {parameter.dtype for parameter in head.parameters()} == {dtype}
    assert head.follows_target_dtype
    head = BlockHead.from_pretrained(GOLDENS / golden, dtype=torch.float16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float16}
    assert not head.follows_target_dtype


@torch.no_grad()
@pytest.mark.parametrize("golden", ALL)
def test_half_precision_is_near(golden):
    head, expected = block_head(golden, dtype=torch.bfloat16), arrays(golden)
    text, prefix = expected["greedy_ids"], int(expected["spec_prefix_len"][0])
    features = features_of(head, text[:, :prefix]).bfloat16()
    cache, inputs = DynamicCache(), {}
    if golden == "peagle":
        inputs["inputs_embeds"] = embed(head, text[:, 1 : prefix + 1]).bfloat16()
    first = head(features=features, past_key_values=cache, **inputs)
    tokens = head.block_tokens(text[:, prefix])
    embeddings = embed(head, tokens).bfloat16()
    states = head(inputs_embeds=embeddings, past_key_values=cache, logits_to_keep=None).hidden_states
    if golden == "peagle":
        states = torch.cat([first.hidden_states[:, -1:], states], dim=1)
    difference = (states[0].float() - expected["block_hidden"][0]).abs()
    assert difference.mean() < 0.1 * expected["block_hidden"][0].abs().mean()
    assert difference.max() > 1e-3  # it did run in half precision


@torch.no_grad()
def test_conditional_logits_in_half_precision():
    for golden in ("dspark", "dflash2"):
        head = block_head(golden, dtype=torch.bfloat16)
        base, states = torch.randn(1, 3, 512).bfloat16(), torch.randn(1, 3, 64).bfloat16()
        found, _ = head.conditional_logits(base, states, torch.tensor([[1, 2, 3]]))
        assert found.shape == (1, 3, 512)
        expected, _ = head.float().conditional_logits(base.float(), states.float(), torch.tensor([[1, 2, 3]]))
        finite = expected.isfinite()
        torch.testing.assert_close(found.float()[finite], expected[finite], atol=0.2, rtol=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"markov_rank": 8, "markov_type": "rnn", "has_confidence_head": True, "confidence_with_markov": True},
        {"conv_kernel_size": 2, "selector_rank": 8},
        {"is_peagle": True, "fc_norm": True},
        {"draft_vocab_size": 100, "has_lm_head": True, "has_embeddings": True},
    ],
)
def test_new_heads(fields):
    """Initialized as any model of transformers is: they run and learn."""
    layers = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512}
    layers |= {"intermediate_size": 48, "num_hidden_layers": 2}
    head = BlockHead(BlockConfig(text_config=layers, mask_token_id=3, aux_layer_ids=[1, 2, 3], **fields))
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    assert 0.01 < head.layers[1].self_attn.q_proj.weight.std() < 0.03  # initializer_range is 0.02
    features = torch.randn(2, 5, head.config.feature_size)
    embeddings, cache = torch.randn(2, head.config.num_rows, 32), DynamicCache()
    inputs = {"inputs_embeds": torch.randn(2, 5, 32)} if head.config.is_peagle else {}
    head(features=features, past_key_values=cache, **inputs)
    output = head(inputs_embeds=embeddings, past_key_values=cache, lm_head=torch.nn.Linear(32, 512))
    parents = torch.zeros(2, head.config.num_rows, dtype=torch.long)
    logits, _ = head.conditional_logits(output.logits, output.hidden_states, parents)
    assert logits.shape == (2, head.config.num_rows, head.config.num_draft_tokens)
    logits[logits.isfinite()].sum().backward()
    unused = {"embed_tokens.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert all(parameter.grad is not None for name, parameter in head.named_parameters() if name not in unused)


def test_a_new_dflash2_head_starts_as_dflash():
    layers = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512}
    layers |= {"intermediate_size": 48, "num_hidden_layers": 1}
    plain, new = (
        BlockHead(BlockConfig(text_config=layers, mask_token_id=3, aux_layer_ids=[1], **fields)).eval()
        for fields in ({}, {"conv_kernel_size": 2, "selector_rank": 8})
    )
    new.load_state_dict(plain.state_dict(), strict=False)
    embeddings = torch.randn(1, 8, 32)
    with torch.no_grad():
        expected = plain(inputs_embeds=embeddings).hidden_states
        torch.testing.assert_close(new(inputs_embeds=embeddings).hidden_states, expected)


def test_one_row():
    for golden in ALL:
        head = block_head(golden)
        states = head(**head.inputs_of_one_row(torch.float32, head.device)).hidden_states
        assert states.shape == (1, 1, 64)
    assert STEPS == len(arrays("dflash")["block_hidden"])
