"""DSpark heads for Gemma 4 targets: layers of Gemma 4 around the same context."""

import pytest
import torch
from support.eagle import equal_weights, publish
from transformers import DynamicCache

from hf_specdec import BlockHead


SIZE, HEADS, KV, DIM, MLP, VOCAB = 32, 4, 2, 8, 48, 60
CONFIG = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "block_size": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "markov_rank": 6,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": KV,
    "head_dim": 16,
    "global_head_dim": DIM,
    "hidden_size": SIZE,
    "hidden_size_per_layer_input": 0,
    "vocab_size": VOCAB,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 512,
    "attention_k_eq_v": True,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 5.0,
    "num_kv_shared_layers": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
WIDE, MORE_KV = 16, 4
"""Width and number of the key heads of layers with a window."""


def weights_of(k_eq_v=True, slides=False):
    torch.manual_seed(0)
    weights = {
        "embed_tokens.weight": torch.randn(VOCAB, SIZE) * 0.2,
        "lm_head.weight": torch.randn(VOCAB, SIZE),
        "fc.weight": torch.randn(SIZE, 2 * SIZE) * 0.2,
        "hidden_norm.weight": torch.rand(SIZE) + 0.5,
        "norm.weight": torch.rand(SIZE) + 0.5,
        "markov_head.markov_w1.weight": torch.randn(VOCAB, 6),
        "markov_head.markov_w2.weight": torch.randn(VOCAB, 6),
        "markov_head.gate_proj.weight": torch.randn(6, SIZE + 6),
        "markov_head.gate_proj.bias": torch.randn(6),
        "confidence_head.proj.weight": torch.randn(1, SIZE),
        "confidence_head.proj.bias": torch.randn(1),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for index in range(2):
        layer, is_sliding = f"layers.{index}.", slides and index == 0
        dim, kv = (WIDE, MORE_KV) if is_sliding else (DIM, KV)
        shapes = {"q_proj": (HEADS * dim, SIZE), "k_proj": (kv * dim, SIZE), "o_proj": (SIZE, HEADS * dim)}
        shapes |= {} if k_eq_v and not is_sliding else {"v_proj": (kv * dim, SIZE)}
        weights |= {f"{layer}self_attn.{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
        weights |= {f"{layer}self_attn.{name}_norm.weight": torch.rand(dim) + 0.5 for name in "qk"}
        weights |= {f"{layer}{name}.weight": torch.rand(SIZE) + 0.5 for name in norms}
        weights |= {f"{layer}mlp.{name}_proj.weight": torch.randn(MLP, SIZE) * 0.3 for name in ("gate", "up")}
        weights |= {
            f"{layer}mlp.down_proj.weight": torch.randn(SIZE, MLP) * 0.3,
            f"{layer}layer_scalar": torch.rand(1),
        }
    return weights


@pytest.fixture(params=["k is v", "v of its own", "windows"])
def case(request, tmp_path):
    k_eq_v, slides = request.param != "v of its own", request.param == "windows"
    weights = weights_of(k_eq_v, slides)
    fields = SLIDING if slides else {"num_key_value_heads": KV}
    publish(tmp_path, CONFIG | {"attention_k_eq_v": k_eq_v} | fields, weights)
    return BlockHead.from_pretrained(tmp_path).eval(), weights


def norm(states, weight=1.0):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(states, positions, is_sliding):
    """Half of the pairs are rotated in full layers (`partial_rotary_factor`), at angles of the whole width."""
    half = states.shape[-1] // 2
    frequencies = (10.0 if is_sliding else 1000.0) ** (-torch.arange(half) / half)
    if not is_sliding:
        frequencies[half // 2 :] = 0
    angles = positions[:, None, None] * frequencies
    left, right = states[..., :half], states[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def written_out(weights, features, tokens):
    """States of a block after its context, from the arithmetic of DeepSpec's Gemma 4 model."""
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    states = weights["embed_tokens.weight"][tokens] * SIZE**0.5
    positions = torch.arange(len(context) + len(tokens)).float()
    for index in range(2):
        w = {key.removeprefix(f"layers.{index}."): tensor for key, tensor in weights.items()}
        inputs = norm(states, w["input_layernorm.weight"])
        both = torch.cat([context, inputs])
        k_proj = w["self_attn.k_proj.weight"]
        dim = len(w["self_attn.q_norm.weight"])
        is_sliding, kv = dim == WIDE, len(k_proj) // dim
        q = norm((inputs @ w["self_attn.q_proj.weight"].T).view(-1, HEADS, dim), w["self_attn.q_norm.weight"])
        k = norm((both @ k_proj.T).view(-1, kv, dim), w["self_attn.k_norm.weight"])
        v = norm((both @ w.get("self_attn.v_proj.weight", k_proj).T).view(-1, kv, dim))
        q, k = rotated(q, positions[len(context) :], is_sliding), rotated(k, positions, is_sliding)
        k, v = (part.repeat_interleave(HEADS // kv, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k)
        if is_sliding:  # causal there, as in servers
            distances = positions[len(context) :, None] - positions
            scores = scores.masked_fill((distances < 0) | (distances >= SLIDING["sliding_window"]), -torch.inf)
        attended = scores.softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", attended, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        states = states + norm(attended, w["post_attention_layernorm.weight"])
        inputs = norm(states, w["pre_feedforward_layernorm.weight"])
        gate = torch.nn.functional.gelu(inputs @ w["mlp.gate_proj.weight"].T, approximate="tanh")
        out = (gate * (inputs @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        states = (states + norm(out, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"]
    return norm(states, weights["norm.weight"])


@torch.no_grad()
def run(head, features, tokens):
    cache = DynamicCache()
    head(features=features[None], past_key_values=cache)
    output = head(input_ids=tokens, past_key_values=cache)
    return output.hidden_states[0], output.logits[0]


def test_written_out(case):
    head, weights = case
    features, tokens = torch.randn(6, 2 * SIZE), head.block_tokens(torch.tensor([7]))
    states, logits = run(head, features, tokens)
    expected = written_out(weights, features, tokens[0])
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=0)
    expected = 5 * torch.tanh(expected @ weights["lm_head.weight"].T / 5)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_config(case):
    config = case[0].config
    assert (config.kind, config.anchor_first, config.num_drafts) == ("dspark", True, 4)
    assert config.aux_layer_ids == [1, 3] and config.markov_type == "gated"
    assert config.embedding_scale == pytest.approx(SIZE**0.5)
    assert "1000.0" in config.conventions["rope_theta"]


def test_saved_and_read_again(case, tmp_path):
    head, _ = case
    head.save_pretrained(tmp_path / "saved")
    again = BlockHead.from_pretrained(tmp_path / "saved").eval()
    assert equal_weights(head, again)
    features, tokens = torch.randn(6, 2 * SIZE), torch.tensor([[7, 3, 3, 3]])
    for one, other in zip(run(head, features, tokens), run(again, features, tokens), strict=True):
        assert torch.equal(one, other)


def test_another_rope(case, tmp_path):
    head, weights = case
    fields = SLIDING if len(weights["layers.0.self_attn.q_norm.weight"]) == WIDE else {}
    k_eq_v = head.layers[1].self_attn.v_proj is None
    publish(tmp_path / "head", CONFIG | {"attention_k_eq_v": k_eq_v} | fields, weights)
    other = BlockHead.from_pretrained(tmp_path / "head", rope_theta=5.0).eval()
    features, tokens = torch.randn(6, 2 * SIZE), torch.tensor([[7, 3, 3, 3]])
    assert (run(head, features, tokens)[0] - run(other, features, tokens)[0]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "must say 'full_attention' or 'sliding_attention'"),
        ({"layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None}, "`sliding_window`=None"),
        ({"rope_parameters": {"rope_theta": 3.0}}, "must hold an object `full_attention`"),
        ({"num_hidden_layers": 3}, "`num_hidden_layers`=3"),
        ({"hidden_activation": "gelooo"}, "gelooo"),
        ({"attention_k_eq_v": False}, "`layers.0.self_attn.v_proj.weight`"),
    ],
)
def test_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        BlockHead.from_pretrained(publish(tmp_path, CONFIG | change, weights_of()))
