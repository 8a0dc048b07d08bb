"""Which rows see which, against attention written out."""

import pytest
import torch
from support.blocks import keep
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.block import BlockConfig, BlockHead, masks


LAYERS = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_sliding_window": True,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def small_head(types=(FULL,), window=None, seed=0, **fields) -> BlockHead:
    layers = LAYERS | {"num_hidden_layers": len(types), "layer_types": list(types), "sliding_window": window}
    layers |= fields.pop("layers", {})
    config = BlockConfig(text_config=layers, block_size=5, mask_token_id=1, aux_layer_ids=[1, 2], **fields)
    torch.manual_seed(seed)
    head = BlockHead(config).eval()
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
        else:
            parameter.data.uniform_(0.5, 1.5)
    return head


def norm(states, weight, eps):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(states, positions, theta):
    """`[rows, heads, head_dim]` by the angle of each pair (i, i + head_dim / 2)."""
    half = states.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    left, right = states[..., :half], states[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def written_out(head: BlockHead, features: torch.Tensor, embeddings: torch.Tensor, first: int = 0) -> torch.Tensor:
    """States of a block `[rows, H]` after context `[T, feature_size]`, row by row and key by key."""
    config, layers = head.config, head.config.text_config
    eps, theta = layers.rms_norm_eps, layers.rope_parameters["rope_theta"]
    context = norm(features @ head.fc.weight.T, head.hidden_norm.weight, eps)
    past, rows, window = len(context), len(embeddings), layers.sliding_window
    positions = torch.arange(first, first + past + rows).float()
    states = embeddings
    for layer, kind in zip(head.layers, layers.layer_types, strict=True):
        attention, inputs = layer.self_attn, norm(states, layer.input_layernorm.weight, eps)
        both = torch.cat([context, inputs])
        heads = (-1, layers.head_dim)
        q = norm((inputs @ attention.q_proj.weight.T).unflatten(1, heads), attention.q_norm.weight, eps)
        k = norm((both @ attention.k_proj.weight.T).unflatten(1, heads), attention.k_norm.weight, eps)
        v = (both @ attention.v_proj.weight.T).unflatten(1, heads)
        q, k = rotated(q, positions[past:], theta), rotated(k, positions, theta)
        out = torch.zeros(rows, layers.num_attention_heads, layers.head_dim)
        for row in range(rows):
            seen = [
                key
                for key in range(past + rows)
                if (kind == FULL or (past - key - 1 if config.window_from_anchor else past + row - key) < window)
                and (key <= past + row or not (config.causal or (kind == SLIDING and config.window_is_causal)))
            ]
            for number in range(layers.num_attention_heads):
                group = number * layers.num_key_value_heads // layers.num_attention_heads
                scores = k[seen, group] @ q[row, number] / layers.head_dim**0.5
                out[row, number] = scores.softmax(0) @ v[seen, group]
        states = states + out.flatten(1) @ attention.o_proj.weight.T
        inputs = norm(states, layer.post_attention_layernorm.weight, eps)
        mlp = layer.mlp
        gated = torch.nn.functional.silu(inputs @ mlp.gate_proj.weight.T) * (inputs @ mlp.up_proj.weight.T)
        states = states + gated @ mlp.down_proj.weight.T
    return norm(states, head.norm.weight, eps)


@torch.no_grad()
def states_of(head, features, embeddings, first=0, **kwargs):
    cache = DynamicCache()
    positions = torch.arange(first, first + len(features))[None]
    head(features=features[None], position_ids=positions, past_key_values=cache)
    positions = torch.arange(first + len(features), first + len(features) + len(embeddings))[None]
    return head(inputs_embeds=embeddings[None], position_ids=positions, past_key_values=cache, **kwargs).hidden_states[
        0
    ]


TYPES = {
    "full": (FULL, FULL),
    "sliding": (SLIDING,),
    "mixed": (SLIDING, FULL, SLIDING),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_is_causal", [False, True])
@pytest.mark.parametrize("types", TYPES)
def test_layers_written_out(types, window_is_causal, causal, implementation):
    """Windows shorter than the context, and than the block."""
    for window in (7, 3):
        head = small_head(TYPES[types], window, causal=causal, window_is_causal=window_is_causal)
        head.set_attn_implementation(implementation)
        features, embeddings = torch.randn(9, 64), torch.randn(5, 32)
        with torch.no_grad():
            expected = written_out(head, features, embeddings, first=2)
        found = states_of(head, features, embeddings, first=2)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"window_is_causal": False}])
@torch.no_grad()
def test_windows_from_the_anchor(fields):
    """The anchor is at place 9: with a window of 3, all rows see places 6, 7 and 8, and their own block."""
    head = small_head(TYPES["mixed"], 3, window_from_anchor=True, **fields)
    features, embeddings = torch.randn(9, 64), torch.randn(5, 32)
    torch.testing.assert_close(
        states_of(head, features, embeddings), written_out(head, features, embeddings), atol=2e-5, rtol=0
    )


@torch.no_grad()
def test_each_rule_changes_the_states():
    """So that the test above can fail."""
    features, embeddings = torch.randn(9, 64), torch.randn(5, 32)
    rules = [{}, {"causal": True}, {"window_is_causal": False}, {"window_from_anchor": True}]
    found = [states_of(small_head(TYPES["mixed"], 7, **rule), features, embeddings) for rule in rules]
    found += [states_of(small_head(TYPES["mixed"], window), features, embeddings) for window in (6, 8)]
    for index, one in enumerate(found):
        assert all((one - other).abs().max() > 0.01 for other in found[:index])


@torch.no_grad()
def test_given_masks():
    """An additive mask holds for all layers; padding is left out."""
    head, features, embeddings = small_head((FULL, FULL)), torch.randn(6, 64), torch.randn(5, 32)
    expected = states_of(head, features, embeddings)
    torch.testing.assert_close(
        states_of(head, features, embeddings, attention_mask=torch.zeros(1, 1, 5, 11)), expected
    )
    padded = torch.cat([torch.randn(2, 64), features])
    visible = torch.tensor([[0] * 2 + [1] * 11])
    cache = DynamicCache()
    positions = torch.tensor([[0, 0, *range(6)]])
    head(features=padded[None], position_ids=positions, past_key_values=cache)
    positions = torch.arange(6, 11)[None]
    output = head(
        inputs_embeds=embeddings[None], position_ids=positions, past_key_values=cache, attention_mask=visible
    )
    torch.testing.assert_close(output.hidden_states[0], expected)


@torch.no_grad()
def test_positions_by_default():
    head, features, embeddings = small_head((FULL, FULL)), torch.randn(6, 64), torch.randn(5, 32)
    cache = DynamicCache()
    head(features=features[None, :4], past_key_values=cache)
    head(features=features[None, 4:], past_key_values=cache)
    found = head(inputs_embeds=embeddings[None], past_key_values=cache).hidden_states
    torch.testing.assert_close(found[0], states_of(head, features, embeddings))
    assert cache.get_seq_length() == 11
    keep(cache, 6)
    torch.testing.assert_close(head(inputs_embeds=embeddings[None], past_key_values=cache).hidden_states, found)


@pytest.mark.parametrize("is_peagle", [False, True])
def test_attention_without_a_mask(is_peagle, monkeypatch):
    """Flash attention takes no mask, and has to be told causality and window; the layers hand on other arguments."""
    told = []

    def recording(module, query, key, value, attention_mask, sliding_window=None, of_caller=None, **kwargs):
        told.append((attention_mask is None, module.is_causal, sliding_window, of_caller))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording)
    monkeypatch.setattr(masks, "previous_implementation", lambda config: "flash_attention_2")
    kind = {"is_peagle": True, "layers": {"model_type": "llama"}} if is_peagle else {}
    head = small_head((SLIDING, FULL), 4, **kind)
    head.set_attn_implementation("recording")
    head(inputs_embeds=torch.randn(1, 5, 32), of_caller="this")
    assert told == [(True, True, 4, "this"), (True, is_peagle, None, "this")]


@torch.no_grad()
def test_batches():
    head, features, embeddings = small_head((SLIDING, FULL), 7), torch.randn(2, 6, 64), torch.randn(2, 5, 32)
    cache = DynamicCache()
    head(features=features, past_key_values=cache)
    found = head(inputs_embeds=embeddings, past_key_values=cache).hidden_states
    for row in range(2):
        torch.testing.assert_close(found[row], states_of(head, features[row], embeddings[row]))


def test_arguments_that_do_not_fit():
    head = small_head()
    with pytest.raises(ValueError, match="`past_key_values`: context rows"):
        head(features=torch.zeros(1, 1, 64))
    with pytest.raises(ValueError, match="`only_cache=True`"):
        head(inputs_embeds=torch.zeros(1, 1, 32), only_cache=True)
    with pytest.raises(ValueError, match="either `input_ids` or `inputs_embeds`"):
        head()
    with pytest.raises(ValueError, match="`input_ids`: this head has no token embeddings"):
        head(input_ids=torch.zeros(1, 5, dtype=torch.long))
