"""The model card of an EAGLE head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from ..cards.heads import conventions_section, head_card


if TYPE_CHECKING:
    from .modeling_eagle import EagleHead


def model_card(head: EagleHead, repo_id: str | None = None, **fields: Any) -> ModelCard:
    """
    The model card of an EAGLE head.

    Args:
        head (`EagleHead`): the head.
        repo_id (`str`, *optional*): the Hub repository that the head will be in.
        fields: `measurements`, `license`, `language`, `datasets` and `tags`; see `hf_specdec.cards.heads.head_card`.
    """
    config = head.config
    is_third = config.eagle_version == 3
    return head_card(
        head,
        repo_id,
        method="EAGLE-3" if is_third else "EAGLE",
        name="EAGLE head",
        tag="eagle3" if is_third else "eagle",
        reads=_features(config),
        drafts=f"{config.num_draft_tokens} of {config.vocab_size} tokens",
        conventions=conventions_section("Assumed when the original checkpoint was read", config.conventions),
        **fields,
    )


def _features(config: Any) -> str:
    if config.num_aux_features == 0:
        return "the target's last hidden state, after its final norm"
    if config.aux_layer_ids is None:
        return "the target's hidden states 2, L/2 and L−3 of L layers"
    return f"the target's hidden states {config.aux_layer_ids} ({config.aux_layer_convention})"
