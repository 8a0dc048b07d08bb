"""
Each way in which loaders of block heads silently lose acceptance moves a golden far beyond its tolerance: were one of
them made here, the goldens would show it.
"""

import pytest
import torch
from support.blocks import ALL, CONTEXT, IN_PLACE, Blocks, block_head, difference, golden_blocks, keep
from support.eagle import arrays, features_of
from transformers import DynamicCache

from hf_specdec.head_layers import keys_and_values


VISIBLE = 0.1


@pytest.mark.parametrize("golden", ALL)
@pytest.mark.parametrize("step", [-1, 1])
def test_layer_ids_off_by_one(golden, step):
    ids = [layer + step for layer in block_head(golden).config.aux_layer_ids]
    assert difference(block_head(golden, aux_layer_ids=ids), golden) > VISIBLE


@pytest.mark.parametrize("golden", CONTEXT)
def test_row_off_by_one(golden):
    """The rows that predict, and with them the number of drafts: other shapes, and other numbers in what is left."""
    head = block_head(golden, anchor_first=golden != "dspark")
    assert head.first_row == (1 if golden == "dspark" else 0)
    found, expected = golden_blocks(head, golden)["block_logits"], arrays(golden)["block_logits"]
    rows = min(found.shape[1], expected.shape[1])
    assert found.shape != expected.shape
    assert (found[:, :rows] - expected[:, :rows]).abs().max() > VISIBLE


@pytest.mark.parametrize("golden", CONTEXT)
def test_other_mask_of_the_block(golden):
    causal = not block_head(golden).config.causal
    assert difference(block_head(golden, causal=causal), golden) > VISIBLE


@pytest.mark.parametrize("golden", ALL)
def test_other_mask_token(golden):
    assert difference(block_head(golden, mask_token_id=14), golden) > VISIBLE


@pytest.mark.parametrize("golden", ALL)
def test_rope_theta_of_another_model(golden):
    assert difference(block_head(golden, rope_theta=500000.0), golden) > VISIBLE


@pytest.mark.parametrize("golden", ["dflash", "dspark", "dflash2"])
def test_shorter_block(golden):
    """With bidirectional rows, a block that is cut before it is drafted is another block."""
    size = block_head(golden).config.block_size
    found = golden_blocks(block_head(golden, block_size=size - 2), golden)["block_logits"]
    assert (found - arrays(golden)["block_logits"][:, :-2]).abs().max() > VISIBLE


def test_shorter_causal_block():
    """Causal rows do not change."""
    found = golden_blocks(block_head("jetspec", block_size=6), "jetspec")["block_logits"]
    torch.testing.assert_close(found, arrays("jetspec")["block_logits"][:, :-2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("golden", CONTEXT)
def test_context_without_k_norm(golden, monkeypatch):
    def without_norm(attentions, *args):
        norms = [attention.k_norm for attention in attentions]
        for attention in attentions:
            attention.k_norm = torch.nn.Identity()
        try:
            return keys_and_values(attentions, *args)
        finally:
            for attention, norm in zip(attentions, norms, strict=True):
                attention.k_norm = norm

    monkeypatch.setattr("hf_specdec.block.modeling_block.keys_and_values", without_norm)
    assert difference(block_head(golden), golden) > VISIBLE


@pytest.mark.parametrize("golden", CONTEXT)
def test_context_without_hidden_norm(golden):
    head = block_head(golden)
    head.hidden_norm = None
    assert difference(head, golden) > VISIBLE


@pytest.mark.parametrize("golden", CONTEXT)
def test_context_through_the_layers_norm(golden):
    head = block_head(golden)
    head.hidden_norm = torch.nn.Sequential(head.hidden_norm, head.layers[0].input_layernorm)
    assert difference(head, golden) > VISIBLE


@pytest.mark.parametrize("golden", ALL)
def test_positions_off_by_one(golden, monkeypatch):
    head, forward = block_head(golden), type(block_head(golden)).forward

    def shifted(self, position_ids, features=None, **kwargs):
        return forward(self, position_ids=position_ids + (features is None), features=features, **kwargs)

    monkeypatch.setattr(type(head), "forward", shifted)
    assert difference(head, golden) > VISIBLE


@pytest.mark.parametrize("golden", ALL)
def test_rows_of_blocks_left_in_the_cache(golden, monkeypatch):
    """Invisible in the first step."""
    monkeypatch.setattr("support.blocks.keep", lambda cache, length: None)
    found = golden_blocks(block_head(golden), golden)["block_logits"] - arrays(golden)["block_logits"]
    assert found[0].abs().max() < 1e-4
    assert found[1].abs().max() > VISIBLE


def test_keep_crops():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    keep(cache, 3)
    assert cache.get_seq_length() == 3


def test_markov_head_left_out():
    head = block_head("dspark")
    head.markov_head = None
    assert difference(head, "dspark", "chain_logits") > VISIBLE


def test_predecessor_off_by_one(monkeypatch):
    """Every token given itself in place of the one before."""
    monkeypatch.setattr("support.blocks.parents_of", lambda golden, step: arrays(golden)["spec_draft_tokens"][[step]])
    for golden, array in (("dspark", "chain_logits"), ("dflash2", "chain_scores")):
        assert difference(block_head(golden), golden, array) > VISIBLE


@pytest.mark.parametrize("part", ["attention_conv", "mlp_conv"])
def test_convolution_left_out(part):
    head = block_head("dflash2")
    convolution = getattr(head.layers[0], part)
    convolution.base_kernel.data.zero_()[:, 0] = 1
    convolution.kernel_projection.weight.data.zero_()
    assert difference(head, "dflash2") > VISIBLE


def test_kernels_of_the_two_convolutions_exchanged():
    head = block_head("dflash2")
    kernel = head.layers[0].attention_conv.base_kernel
    kernel.data = kernel.data.flip(0)
    assert difference(head, "dflash2") > VISIBLE


@pytest.mark.parametrize("name", ["norm_before_residual"])
def test_options_of_eagle(name):
    assert difference(block_head("peagle", **{name: True}), "peagle") > VISIBLE


def test_mask_rows_with_the_last_feature():
    """In place of `mask_hidden`."""
    head = block_head("peagle")
    head.mask_hidden.data.zero_()
    assert difference(head, "peagle") > VISIBLE


@pytest.mark.parametrize("field", ["embed_tokens", "lm_head"])
def test_the_targets_embeddings_and_lm_head(field):
    """DeepSpec rounds its copies to bf16, so the target's own are not the same."""
    head = block_head("dspark", **{"has_embeddings" if field == "embed_tokens" else "has_lm_head": False})
    assert getattr(head, field) is None
    assert difference(head, "dspark") > 1e-3


@pytest.mark.parametrize("golden", IN_PLACE)
def test_features_in_another_order(golden):
    head = block_head(golden)
    blocks = Blocks(head, arrays(golden)["greedy_ids"])
    features = features_of(head, arrays(golden)["greedy_ids"])
    blocks.features = features.roll(64, dims=-1)
    _, logits = blocks.after(int(arrays(golden)["spec_prefix_len"][0]))
    assert (logits - arrays(golden)["block_logits"][0]).abs().max() > VISIBLE
