"""Random block heads of every kind that is trained, and the blocks that drafting runs with them."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec import BlockConfig, BlockHead

from .blocks import Blocks


LAYERS = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOWED = LAYERS | {
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "jetspec": {"causal": True},
    "anchor first": {"anchor_first": True, "block_size": 7},
    "vanilla": {"anchor_first": True, "markov_rank": 8, "has_confidence_head": True, "confidence_with_markov": True},
    "gated": {"anchor_first": True, "markov_rank": 8, "markov_type": "gated", "has_confidence_head": True},
    "rnn": {"markov_rank": 8, "markov_type": "rnn"},
    "draft vocabulary": {"draft_vocab_size": 40, "has_lm_head": True, "markov_rank": 4},
    "windows": {"text_config": WINDOWED},
    "windows from the anchor": {"text_config": WINDOWED, "window_from_anchor": True, "has_mask_embedding": True},
    "windows that see later rows": {"text_config": WINDOWED, "window_is_causal": False},
}


def random_block_head(**fields: Any) -> BlockHead:
    """A head whose weights, norms included, all make a difference."""
    config = BlockConfig(**{"text_config": LAYERS, "block_size": 6, "mask_token_id": 13, **fields})
    head = BlockHead(config).float().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1))
        if head.d2t is not None:
            ids = torch.randperm(512)[: len(head.d2t)].sort().values
            head.d2t.copy_(ids - torch.arange(len(ids)))
    return head


@torch.no_grad()
def drafted(head: BlockHead, text: torch.Tensor, prefix: int) -> list[torch.Tensor | None]:
    """States, base logits, logits given the text's tokens, and confidence of the block after a prefix of the text."""
    blocks = Blocks(head, text)
    states, logits = blocks.after(prefix)
    states, logits, found, carried = states[None], logits[None], [], None
    parents = text[:, prefix : prefix + head.num_drafts]
    for depth in range(parents.shape[1]):
        one = slice(depth, depth + 1)
        given, carried = head.conditional_logits(logits[:, one], states[:, one], parents[:, one], carried)
        found.append(given)
    known = parents.shape[1]  # the text may end within the block
    confidence = head.confidence_logits(states[:, :known], parents)
    return [blocks.states, logits[0], torch.cat(found, dim=1)[0], None if confidence is None else confidence[0]]
