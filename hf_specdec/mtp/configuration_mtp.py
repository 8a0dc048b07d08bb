"""`MtpConfig`: what the MTP modules of a target are."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..head_config import HeadSizes


class MtpConfig(HeadSizes, PreTrainedConfig):
    """
    The configuration of an `MtpHead`, made from its target's by `MtpHead.from_target`.

    Args:
        text_config (`PreTrainedConfig`): the target's config, with one layer for each module.
        num_modules (`int`, *optional*, defaults to 1): how many modules there are: the n-th one was trained to predict
            the n-th token after the target's.
        hidden_first (`bool`, *optional*, defaults to `False`): whether `fc` reads the hidden state before the
            embedding.
        default_tree (`dict` or `list`, *optional*): the tree that a call without `tree=` takes.
        target_name (`str`, *optional*): the model that the modules are part of.
    """

    model_type = "hf_specdec_mtp"
    sub_configs = {"text_config": AutoConfig}

    text_config: Any = None
    num_modules: int = 1
    hidden_first: bool = False
    default_tree: Any = None
    target_name: str | None = None

    num_aux_features = 0
    target_hidden_size = None
    draft_vocab_size = None
    recipe = None

    def __post_init__(self, **kwargs):
        from . import modeling_mtp  # noqa: F401  (which tells AutoModel what it makes of such a config)

        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        super().__post_init__(**kwargs)

    @property
    def size_between_steps(self) -> int:  # type: ignore[override]
        return self.num_modules * self.hidden_size if self.num_modules > 1 else 0

    def aux_boundaries(self, num_layers: int) -> list[int]:
        """None: the modules read the target's last hidden state, after its final norm."""
        return []


AutoConfig.register(MtpConfig.model_type, MtpConfig, exist_ok=True)
