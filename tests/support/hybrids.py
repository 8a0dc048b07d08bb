"""Tiny models with recurrent or convolutional layers, and a drafter of random trees that are right in part."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import Drafter, DraftTree, TokenTree, Topology

from .models import VOCAB, prompts, tiny_model


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
"""Gated DeltaNet."""
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_CONV = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 8,
}
_MAMBA1 = {"mamba_d_state": 6, "mamba_dt_rank": 5}
_ZAMBA = {
    "num_key_value_heads": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "layer_types": _MIXED},
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": _MIXED,
    },
    "lfm2": _CONV,
    "qwen3_next": {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "layer_types": _MIXED},
    "qwen3_5_moe_text": {**DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "layer_types": _MIXED},
    "olmo_hybrid": {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {**_EXPERTS, **_LATENT, "q_lora_rank": 8, "layer_types": _MIXED},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "bamba": {**_MAMBA2, "attn_layer_indices": [2]},
    "granitemoehybrid": {**_MAMBA2, **_EXPERTS, "shared_intermediate_size": 16, "layer_types": _MIXED},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 6, "chunk_size": 8},
    "nemotron_h": {
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 6,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "time_step_min": 0.5,  # bounds many steps of prompts
    },
    "zamba2": {
        **_ZAMBA,
        "mamba_d_state": 6,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "time_step_min": 0.5,
    },
    "jamba": {**_MAMBA1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "zamba": {**_ZAMBA, **_MAMBA1, "n_mamba_heads": 2},
    "mamba": {"state_size": 6, "time_step_rank": 5},
    "falcon_mamba": {"state_size": 6, "time_step_rank": 5},
    "inkling_text": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 12,
        "log_scaling_n_floor": 4,
        "log_scaling_alpha": 0.5,
        "logits_mup_width_multiplier": 1.0,
    },
    "zaya": {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 8,
        "attention_bias": True,
    },
}
"""Families with states: config values that differ from the small default."""
ONE_OF_EACH = ("qwen3_5_text", "kimi_linear", "lfm2", "bamba", "zamba", "zaya")
"""One family for each kind of layer; the last one has code of its own, which runs level by level."""


CAPTURED = (
    "qwen3_5_text",
    "lfm2",
    "qwen3_next",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "jamba",
    "mamba2",
)
"""Families whose whole steps are captured, one for each kind of attention and of states."""


def is_known(family: str) -> bool:
    """Whether this release of transformers has the family."""
    try:
        AutoConfig.for_model(family)
    except ValueError as error:
        if "Unrecognized model identifier" in str(error):
            return False
        raise
    return True


@cache
def hybrid(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """
    A random model in float32, which reacts to what stands where; no test changes it. `changes`: values of its config,
    lists as tuples.
    """
    torch.manual_seed(seed)
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    config = AutoConfig.for_model(family, **(SMALL | HYBRIDS[family] | own))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.5 if "conv" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
    return model


def padded(batch_size: int, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts, later rows with more padding on their left."""
    return prompts(batch_size, length, seed, padding=True)


def draft_of(texts: list[list[int]]) -> PreTrainedModel:
    """A model without states that follows a token by what most often follows it in these texts, or else by itself."""
    draft = copy.deepcopy(tiny_model(hidden_size=64, num_hidden_layers=1, dtype=torch.float32))
    follows = torch.eye(VOCAB, 64) * 0.5
    for text in texts:
        for token, following in zip(text, text[1:], strict=False):
            follows[following, token] += 1.0
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        draft.get_input_embeddings().weight.copy_(torch.eye(VOCAB, 64))
        draft.get_output_embeddings().weight.copy_(follows)
    return draft


class Oracle(Drafter):
    """
    Proposes another part of the tree in every step, of random shape, in which one path is right for a while, and in
    some steps nothing.

    Args:
        texts (`list[list[int]]`): what the target writes, prompts included.
        seed (`int`): of the shapes.
        rests (`float`): share of the steps without a draft.
    """

    default_tree = TokenTree.from_branching((3, 2, 2, 1, 1))

    def __init__(self, texts: list[list[int]], seed: int = 0, rests: float = 0.3):
        self.texts, self.rests, self._random = texts, rests, random.Random(seed)

    def propose(self, sequences: Any) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None or self._random.random() < self.rests:
            return None
        tree = self._part_of(tree)
        tokens = torch.tensor([self._tokens(sequences, row, tree) for row in range(sequences.batch_size)])
        topology = Topology.of_tree(tree, sequences.device)
        return DraftTree(tokens.to(sequences.device), topology).within(room)

    def _part_of(self, tree: TokenTree) -> TokenTree:
        kept: list[tuple[int, ...]] = []
        for path in tree.paths:
            if (len(path) == 1 or path[:-1] in kept) and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in kept):
                if not kept or self._random.random() < 0.75:
                    kept.append(path)
        return TokenTree(tuple(kept))

    def _tokens(self, sequences: Any, row: int, tree: TokenTree) -> list[int]:
        length, known = sequences.lengths[row], sequences.row(row)[0].tolist()
        text = next((text for text in self.texts if text[:length] == known), known)
        siblings: dict[tuple[int, ...], int] = {}
        for path in tree.paths:
            siblings[path[:-1]] = path[-1] + 1
        chosen = {parent: self._random.randrange(count) for parent, count in siblings.items()}
        right, tokens = {()}, []
        for path in tree.paths:
            place = length + len(path) - 1
            token = text[place] if place < len(text) else 3
            if path[:-1] in right and path[-1] == chosen[path[:-1]]:
                right.add(path)
            else:
                token = 3 + (token + path[-1] + self._random.randrange(20)) % (VOCAB - 4)
            tokens.append(token)
        return tokens
