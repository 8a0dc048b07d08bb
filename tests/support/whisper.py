"""A tiny Whisper, drafts for it, and sound."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from .models import noisy_copy


FRAMES, MELS = 20, 8


def tiny_whisper(**overrides: Any) -> WhisperForConditionalGeneration:
    """A Whisper whose decoder has more layers than its encoder, and whose text is varied."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": MELS, "vocab_size": 60}
    lengths = {"max_source_positions": FRAMES // 2, "max_target_positions": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    torch.manual_seed(0)
    config = WhisperConfig(**heads | sizes | lengths | tokens | overrides)  # type: ignore[arg-type]
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    for option in ("suppress_tokens", "begin_suppress_tokens", "eos_token_id"):
        setattr(model.generation_config, option, None)
    return model


def drafts_of(target: WhisperForConditionalGeneration, noise: float = 0.1) -> dict[str, Any]:
    """Draft models: one with an encoder of its own, one with the target's, and a decoder that has none."""
    own, shared = noisy_copy(target, noise), noisy_copy(target, noise)
    shared.model.encoder = target.model.encoder  # type: ignore[union-attr]
    decoder = WhisperForCausalLM(target.config.__class__.from_dict(target.config.to_dict())).eval()
    decoder.load_state_dict({name: value for name, value in own.state_dict().items() if ".encoder." not in name})
    return {"own encoder": own, "shared encoder": shared, "decoder": decoder}


def sound(rows: int, frames: int = FRAMES, seed: int = 1) -> torch.Tensor:
    """Features of sound, `[rows, mels, frames]`."""
    return torch.randn(rows, MELS, frames, generator=torch.Generator().manual_seed(seed))


def processor_parts() -> dict[str, Any]:
    """A tokenizer and a feature extractor of `tiny_whisper`, which hears a second of sound."""
    special = {"<|pad|>": 0, "<|bos|>": 1, "<|endoftext|>": 2, "<|startoftranscript|>": 3, "<|notimestamps|>": 39}
    letters = {chr(ord("A") + number): 4 + number for number in range(35)}
    vocab = special | letters | {f"<|{number}|>": number for number in range(40, 60)}
    tokens: dict[str, Any] = {"unk_token": "<|endoftext|>", "bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    tokens |= {"pad_token": "<|pad|>", "extra_special_tokens": ["<|startoftranscript|>", "<|notimestamps|>"]}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[], **tokens)
    extractor = WhisperFeatureExtractor(feature_size=MELS, hop_length=800, chunk_length=1, n_fft=1600)
    return {"tokenizer": tokenizer, "feature_extractor": extractor}
