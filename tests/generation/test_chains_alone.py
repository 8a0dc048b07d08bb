"""Models that can read no branches: exact with a chain in one row, and everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, BartConfig, PreTrainedModel, RoFormerConfig

import hf_specdec
from hf_specdec import NgramDraft, SpeculativeConfig


SIZES = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
ROFORMER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WINDOWS = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
CONFIGS = {
    "bloom": lambda: tiny_config("bloom", n_head=4, n_layer=2),
    "mpt": lambda: tiny_config("mpt", d_model=32, n_heads=4, n_layers=2),
    "falcon with alibi": lambda: tiny_config("falcon", alibi=True, new_decoder_architecture=False),
    "gpt_neo": lambda: tiny_config("gpt_neo", **WINDOWS),
    "bart's decoder": lambda: BartConfig(**SIZES, **BART, max_position_embeddings=40),
    "roformer": lambda: RoFormerConfig(**SIZES, **ROFORMER, is_decoder=True, max_position_embeddings=64),
}


def model_of(family: str) -> PreTrainedModel:
    """A model whose text is varied."""
    torch.manual_seed(3)
    sharpness = 8.0 if family == "roformer" else 25.0
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpness if parameter.dim() > 1 else 1.0)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


@pytest.mark.parametrize("asked", ["chain:4", "auto", None])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.some_cases(3)
def test_chains(family: str, asked: str | None) -> None:
    target, draft = model_of(family), noisy_copy(model_of(family), 0.02)
    inputs = prompts(1, 12)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert len(plain[0, 12:].unique()) > 3
    for assistant in (draft, NgramDraft(min_ngram=1)):
        options = {"speculative_config": SpeculativeConfig(tree=asked)} if asked or assistant is draft else {}
        text = target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=assistant, **options)
        assert torch.equal(text, plain)
    if asked == "chain:4":
        target.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=draft, tree=asked)
        assert hf_specdec.last_metrics().num_accepted_tokens > 3


@pytest.mark.parametrize("family", ["bloom", "gpt_neo"])
def test_padding_in_front_of_one_row(family: str) -> None:
    target, inputs = model_of(family), prompts(1, 12)
    inputs["input_ids"][0, :5], inputs["attention_mask"][0, :5] = 0, 0
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(**inputs, **options)
    found = target.generate(**inputs, **options, assistant_model=noisy_copy(target, 0.02), tree="chain:3")
    assert torch.equal(found.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(plain.logits), atol=2e-3, rtol=0.0)


def test_a_text_to_the_last_position() -> None:
    """40 learned positions: no node is behind them. BART's decoder reads trees, too, as its slots may be."""
    target, inputs = model_of("bart's decoder"), prompts(1, 12)
    plain = target.generate(**inputs, max_new_tokens=28, do_sample=False)
    for assistant in (noisy_copy(target, 0.02), NgramDraft(min_ngram=1)):
        for tree in ("chain:5", "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]"):
            text = target.generate(**inputs, max_new_tokens=28, do_sample=False, assistant_model=assistant, tree=tree)
            assert torch.equal(text, plain)


def fail(*_: Any) -> None:
    raise AssertionError("a forward ran before the refusal")


@pytest.mark.filterwarnings("ignore:.*has forward hooks")
@pytest.mark.parametrize("family", ["bloom", "roformer"])
def test_refusals(family: str) -> None:
    target, draft = model_of(family), tiny_model("llama")
    for model in (target, draft):
        model.register_forward_pre_hook(fail)
    name, tree = type(target).__name__, "[(0,), (1,)]"

    def refused(match: str, rows: int = 1, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            target.generate(**prompts(rows, 9), max_new_tokens=4, assistant_model=draft, **options)

    refused(rf"`tree`=.*target {name}.*chain:5", tree=tree)
    refused(rf"`tree`=.*target {name}.*chain:5", tree=[(0, "[(0,)]"), (20, tree)])
    refused(rf"`assistant_model`.*target {name}.*unequal length.*one row", rows=2, tree="chain:2")
    with pytest.raises(ValueError, match=rf"`assistant_model`.*target {name}.*`generate` with one row"):
        target.generate_batch([[3, 4, 5]], assistant_model=draft, tree="chain:2", max_new_tokens=4)
    with pytest.raises(ValueError, match=rf"`tree`=.*draft {name}.*chain:5"):
        draft.generate(**prompts(1, 9), max_new_tokens=4, assistant_model=target, tree=tree)
