"""
Converted heads inside the speculators library itself. It wants versions of its own, so in an environment of its own:

    pip install speculators==0.9.0 pytest hypothesis && pytest tests/eagle/test_with_speculators.py
"""

import pytest
import torch
from support.eagle import MODELOPTS, arrays, head_of
from support.goldens import TINY_TARGET

from hf_specdec.eagle import EagleConfig, EagleHead
from hf_specdec.eagle.formats import TargetFiles, write_head


pytest.importorskip("speculators", reason="speculators is not installed")

from speculators import SpeculatorModel, SpeculatorModelConfig  # noqa: E402


def logits_in_speculators(folder, tokens, features):
    """`[1, rows, draft vocab]` of the library's model for the first forward, all of its computation."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    found = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        model(features, tokens, documents, ttt_steps=1)
    return found[0]


def golden_inputs(golden):
    expected = arrays(golden)
    features = torch.cat([expected[f"aux_{level}"] for level in ("low", "mid", "high")], dim=-1)
    return expected["head_input_ids"], features


@pytest.mark.parametrize(
    ("golden", "suffix", "options"),
    [
        ("speculators_eagle3", "", {}),
        ("safeailab_eagle3", "", {}),
        ("specforge_eagle3", "", {}),
        *((golden, "_singlenorm", {"norm_hidden_twice": False}) for golden in MODELOPTS),
    ],
)
def test_goldens(golden, suffix, options, tmp_path):
    write_head(head_of(golden, **options), tmp_path, "speculators", TargetFiles(TINY_TARGET))
    logits = logits_in_speculators(tmp_path, *golden_inputs(golden))
    torch.testing.assert_close(logits, arrays(golden)[f"head_logits{suffix}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_before_residual": True, "fc_norm": True},
        {"norm_before_fc": True, "norm_output": True, "draft_vocab_size": 100},
        {"aux_layer_ids": [1, 2, 3, 8]},
        {"layers": {"model_type": "qwen3", "num_hidden_layers": 2}},
        {"layers": {"sliding_window": 5, "layer_types": ["sliding_attention"]}},
        {"layers": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}},
        {"layers": {"attention_bias": True}},
    ],
)
def test_other_heads(fields, tmp_path):
    layers = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    layers |= {"intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512} | fields.pop("layers", {})
    head = EagleHead(EagleConfig(text_config=layers, has_embeddings=True, target_name=str(TINY_TARGET), **fields))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    write_head(head.eval(), tmp_path, "speculators")
    tokens, features = torch.randint(512, (1, 20)), torch.randn(1, 20, head.config.feature_size)
    with torch.no_grad():
        expected = head(input_ids=tokens, features=features).logits
    torch.testing.assert_close(logits_in_speculators(tmp_path, tokens, features), expected, atol=1e-4, rtol=0)
