"""`MedusaConfig`: what a set of Medusa heads is."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..head_config import WithDefaultTree


class MedusaConfig(WithDefaultTree, PreTrainedConfig):
    """
    The configuration of `MedusaHeads`.

    Args:
        hidden_size (`int`): hidden size H of the target.
        vocab_size (`int`): tokens of the target's vocabulary.
        num_heads (`int`): heads; head d predicts the token d + 2 positions after its feature.
        num_layers (`int`, *optional*, defaults to 1): residual blocks of each head.
        default_tree (`dict` or `list`, *optional*): the tree that a call without `tree=` takes.
        target_name (`str`, *optional*): the model that the heads were trained for.
    """

    model_type = "hf_specdec_medusa"

    hidden_size: int = 4096
    vocab_size: int = 32000
    num_heads: int = 5
    num_layers: int = 1
    default_tree: Any = None
    target_name: str | None = None

    def __post_init__(self, **kwargs):
        from . import modeling_medusa  # noqa: F401  (which tells AutoModel what it makes of such a config)

        super().__post_init__(**kwargs)


AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
