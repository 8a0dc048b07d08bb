"""Whisper, whose decoder reads what its encoder has made of the sound."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration

import hf_specdec


TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
DRAFT = {"assistant_model": hf_specdec.NgramDraft(), "tree": TREE}


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "vocab_size": 60}
    lengths = {"max_source_positions": 10, "max_target_positions": 64}
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**heads, **sizes, **lengths, **tokens)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    for option in ("suppress_tokens", "begin_suppress_tokens", "eos_token_id"):
        setattr(model.generation_config, option, None)
    return model


def sound(rows: int) -> dict[str, Any]:
    features = torch.randn(rows, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "max_new_tokens": 30, "do_sample": False}


@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_texts(whisper: WhisperForConditionalGeneration, rows: int) -> None:
    expected = whisper.generate(**sound(rows))
    assert torch.equal(whisper.generate(**sound(rows), **DRAFT), expected)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("columns", [20, 50], ids=["short", "long"])
def test_timestamps(whisper: WhisperForConditionalGeneration, columns: int) -> None:
    """Their processor reads the whole text. Sound of over 20 columns is decoded by segments."""
    config = copy.deepcopy(whisper.generation_config)
    config.no_timestamps_token_id, config.is_multilingual, config.eos_token_id = 39, False, 2
    features = torch.randn(2, 8, columns, generator=torch.Generator().manual_seed(2))
    options = {"return_timestamps": True, "generation_config": config, "max_new_tokens": 30}
    options |= {"input_features": features, "attention_mask": torch.ones(2, columns, dtype=torch.long)}
    expected = whisper.generate(**options)
    assert torch.equal(whisper.generate(**options, **DRAFT), expected)


def test_the_cache_that_is_returned(whisper: WhisperForConditionalGeneration) -> None:
    def tensors(**options: Any) -> list[torch.Tensor]:
        output = whisper.generate(**sound(3), force_unique_generate_call=True, return_dict_in_generate=True, **options)
        cache = output.past_key_values
        assert isinstance(cache, EncoderDecoderCache)
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    for found, expected in zip(tensors(**DRAFT), tensors(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_others_draft_for_no_encoder(whisper: WhisperForConditionalGeneration) -> None:
    with pytest.raises(ValueError, match="encoder-decoder model, for which DraftModelDrafter"):
        whisper.generate(**sound(1), assistant_model=whisper, tree=TREE)
    with pytest.raises(ValueError, match="`output_attentions`=True with `assistant_model`"):
        whisper.generate(**sound(1), **DRAFT, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="is an encoder-decoder model"):
        whisper.generate_batch([[3]], **DRAFT)
