"""
Each way in which published loaders silently lose acceptance moves a golden far beyond its tolerance: were one of them
made here, the goldens would show it.
"""

import pytest
import torch
from support.eagle import (
    EAGLE_1,
    MODELOPTS,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    Rows,
    arrays,
    features_of,
    golden_rows,
    head_of,
    largest_difference,
)
from support.goldens import trained_target
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.eagle import EagleConfig, EagleHead


VISIBLE = 0.1


def difference(golden, **options):
    return max(largest_difference(golden_rows(head_of(golden, **options), golden), golden).values())


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECULATORS, SPECFORGE, *MODELOPTS])
@pytest.mark.parametrize("ids", [[1, 3, 4], [3, 5, 6]])
def test_layer_ids_off_by_one(golden, ids):
    assert difference(golden, aux_layer_ids=ids) > VISIBLE


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECULATORS, SPECFORGE, *MODELOPTS])
def test_norm_before_residual_flipped(golden):
    flipped = not head_of(golden).config.norm_before_residual
    assert difference(golden, norm_before_residual=flipped) > VISIBLE


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECULATORS, SPECFORGE, *MODELOPTS])
def test_norm_output_flipped(golden):
    """Moves only the chain, since the first rows read the target's features."""
    found = largest_difference(golden_rows(head_of(golden, norm_output=True), golden), golden)
    assert found["head_logits"] < 1e-4
    assert found["chain_logits"] > VISIBLE


@pytest.mark.parametrize("golden", MODELOPTS)
def test_hidden_norm_once_or_twice(golden):
    assert difference(golden, norm_hidden_twice=False) > VISIBLE


@pytest.mark.parametrize("golden", [SAFEAILAB, SPECULATORS, SPECFORGE])
def test_hidden_norm_twice(golden):
    assert difference(golden, norm_hidden_twice=True) > VISIBLE


def with_rope(golden, **rope):
    config = head_of(golden).config
    config.text_config.rope_parameters = rope
    return max(largest_difference(golden_rows(head_of(golden, config=config), golden), golden).values())


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB, SPECULATORS, SPECFORGE])
def test_rope_theta_of_another_model(golden):
    assert with_rope(golden, rope_type="default", rope_theta=500000.0) > VISIBLE


def test_yarn_ignored():
    assert with_rope("modelopt_eagle3_yarn", rope_type="default", rope_theta=10000.0) > VISIBLE


@pytest.mark.parametrize("golden", [EAGLE_1, SAFEAILAB])
def test_embedding_and_hidden_state_swapped(golden):
    head = head_of(golden)
    linears = [head.fc] if golden == EAGLE_1 else [getattr(head.layers[0].self_attn, f"{x}_proj") for x in "qkv"]
    for linear in linears:
        linear.weight.data = linear.weight.data.roll(linear.in_features // 2, dims=1)
    assert max(largest_difference(golden_rows(head, golden), golden).values()) > VISIBLE


def test_token_not_shifted():
    expected, head = arrays(SAFEAILAB), head_of(SAFEAILAB)
    rows = Rows(head).feed(expected["input_ids"], features_of(head, expected["input_ids"]))
    assert (rows.logits - expected["head_logits"]).abs().max() > VISIBLE


def test_last_hidden_state_before_the_norm():
    expected, head, before_norm = arrays(EAGLE_1), head_of(EAGLE_1), []
    hook = trained_target().model.norm.register_forward_hook(lambda module, args, output: before_norm.append(args[0]))
    try:
        features_of(head, expected["input_ids"])
    finally:
        hook.remove()
    found = golden_rows(head, EAGLE_1, features=before_norm[0])
    assert max(largest_difference(found, EAGLE_1).values()) > VISIBLE


def test_fc_applied_to_fed_back_states():
    """What happens where the kind of a row is told by its width: a state is repeated to the features' width."""
    expected, head = arrays(SAFEAILAB), head_of(SAFEAILAB)
    rows = Rows(head).feed(expected["head_input_ids"], features_of(head, expected["input_ids"]))
    rows.feed(expected["chain_tokens"][:, :1], features=rows.fed_back[:, -1:].repeat(1, 1, 3))
    assert (rows.logits[0, 0] - expected["chain_logits"][0]).abs().max() > VISIBLE


def test_fc_bias_dropped():
    """No golden has one; a head that has one must use it."""
    head = head_of(EAGLE_1)
    biased = torch.nn.Linear(head.fc.in_features, head.fc.out_features)
    biased.weight.data, biased.bias.data = head.fc.weight.data, torch.full((head.fc.out_features,), 0.5)
    head.fc = biased
    assert max(largest_difference(golden_rows(head, EAGLE_1), EAGLE_1).values()) > VISIBLE


def test_window_moves_with_the_position():
    """Against attention written out: with a window of 8, rows see the last 8 positions, in one forward or many."""
    head, expected = head_of(SPECULATORS), arrays(SPECULATORS)
    config = head.config
    config.text_config.sliding_window, config.text_config.layer_types = 8, ["sliding_attention"]
    windowed = head_of(SPECULATORS, config=config)
    tokens, features = expected["head_input_ids"], features_of(head, expected["input_ids"])
    together = Rows(windowed).feed(tokens, features).logits

    steps, embeddings = tokens.shape[1], trained_target().get_input_embeddings()(tokens)
    distance = torch.arange(steps)[:, None] - torch.arange(steps)
    mask = torch.where((distance >= 0) & (distance < 8), 0.0, torch.finfo(torch.float32).min)[None, None]
    written_out = head_of(SPECULATORS)(inputs_embeds=embeddings, features=features, attention_mask=mask).logits
    torch.testing.assert_close(together, written_out, atol=1e-5, rtol=0)
    assert (together - expected["head_logits"]).abs().max() > VISIBLE

    rows = Rows(windowed)
    one_by_one = torch.cat([rows.feed(tokens[:, i : i + 1], features[:, i : i + 1]).logits for i in range(steps)], 1)
    torch.testing.assert_close(one_by_one, together, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_window_without_a_mask(kind):
    """Flash attention takes no mask, and has to be told the window."""
    windows = []

    def recording(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
        windows.append(sliding_window)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    layers = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers |= {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
    layers |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    head = EagleHead(EagleConfig(text_config=layers))
    AttentionInterface.register("recording", recording)
    head.set_attn_implementation("recording")
    head(inputs_embeds=torch.randn(1, 5, 64), features=torch.randn(1, 5, 192))
    assert windows == [8, None]
