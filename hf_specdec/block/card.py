"""The model card of a block head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from ..cards.heads import conventions_section, head_card


if TYPE_CHECKING:
    from .modeling_block import BlockHead

_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2", "peagle": "P-EAGLE"}


def model_card(head: BlockHead, repo_id: str | None = None, **fields: Any) -> ModelCard:
    """
    The model card of a block head.

    Args:
        head (`BlockHead`): the head.
        repo_id (`str`, *optional*): the Hub repository that the head will be in.
        fields: `measurements`, `license`, `language`, `datasets` and `tags`; see `hf_specdec.cards.heads.head_card`.
    """
    config, method = head.config, _NAMES[head.config.kind]
    read = (
        f"hidden states {config.aux_layer_ids}" if config.aux_layer_ids else f"{config.num_aux_features} hidden states"
    )
    return head_card(
        head,
        repo_id,
        method=method,
        name=f"{method} head",
        tag=config.kind,
        reads=f"the target's {read} (boundaries)",
        drafts=f"{config.num_drafts} at once, of {config.num_draft_tokens} of {config.vocab_size} tokens",
        conventions=conventions_section("How it is read", config.conventions),
        **fields,
    )
