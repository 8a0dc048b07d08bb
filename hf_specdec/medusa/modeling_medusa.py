"""
`MedusaHeads`: heads that predict several tokens at once from the target's last hidden state (arXiv 2401.10774).

Published checkpoints hold `medusa_lm_head.pt` and a config that says little: heads, blocks and sizes are counted in
the weights (the reference builds five heads whatever its config says).
"""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import AutoModel

from ..checkpoints.pretrained import PublishedModel
from ..checkpoints.reading import Checkpoint, HubOptions
from .configuration_medusa import MedusaConfig


WEIGHT_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)


class MedusaHead(nn.Module):
    """One head: residual blocks x + silu(W x + b), then logits without bias."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features `[…, H]` to logits `[…, vocab]`."""
        for block in self.blocks:
            features = features + nn.functional.silu(block(features))
        return self.lm_head(features)


class MedusaHeads(PublishedModel):
    """
    Medusa heads (arXiv 2401.10774), to be passed as `generate(assistant_model=heads)`.

    `from_pretrained` reads what FasterDecoding/Medusa publishes and what `save_pretrained` writes. Fields of
    `MedusaConfig` among its arguments override the checkpoint's, such as `default_tree=`.

    Args:
        config (`MedusaConfig`): their number and sizes.
    """

    config_class = MedusaConfig
    config_arguments = tuple(MedusaConfig.__annotations__)
    kind = "Medusa heads"
    base_model_prefix = ""
    main_input_name = "features"

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))
        self.post_init()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """
        Args:
            features (`torch.Tensor` of shape `[…, H]`): the target's last hidden state, after its final norm.

        Returns:
            `torch.Tensor` of shape `[heads, …, vocab]`: logits; head d at position t predicts the token at t + 2 + d.
        """
        return torch.stack([head(features) for head in self.heads])

    @classmethod
    def read_published(
        cls, name: str, options: HubOptions
    ) -> tuple[MedusaConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Config and weights of Medusa heads, see `_renamed`; none of the weights is left out."""
        checkpoint = Checkpoint.read(name, options, WEIGHT_FILES)
        weights = _renamed(checkpoint)
        return _config_of(checkpoint, weights), weights, {}


def _renamed(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """
    The weights under the names they have here. Published ones are numbered: `{head}.{block}.linear.…` are the blocks,
    and the block after the last is the lm_head, `{head}.{block}.weight`.
    """
    weights = {}
    for key, tensor in checkpoint.weights.items():
        plain = key.removeprefix("medusa_head.")
        if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", plain):
            plain = "heads.{}.blocks.{}.{}".format(*match.groups())
        elif match := re.fullmatch(r"(\d+)\.\d+\.weight", plain):
            plain = f"heads.{match[1]}.lm_head.weight"
        weights[plain] = tensor
    return weights


def _config_of(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> MedusaConfig:
    if checkpoint.config.get("model_type") == MedusaConfig.model_type:
        return MedusaConfig.from_dict(dict(checkpoint.config))
    lm_head = weights.get("heads.0.lm_head.weight")
    if lm_head is None or lm_head.dim() != 2:
        raise ValueError(
            f"{checkpoint.name}: the checkpoint has no `0.1.weight`, the first head's matrix of logits `[vocab, H]`. "
            f"It holds no Medusa heads, but: {', '.join(sorted(checkpoint.weights)[:6])}, …"
        )
    return MedusaConfig(
        hidden_size=lm_head.shape[1],
        vocab_size=lm_head.shape[0],
        num_heads=1 + max(int(key.split(".")[1]) for key in weights if re.match(r"heads\.\d+\.", key)),
        num_layers=len({key.split(".")[3] for key in weights if key.startswith("heads.0.blocks.")}),
        target_name=checkpoint.config.get("base_model_name_or_path"),
    )


AutoModel.register(MedusaConfig, MedusaHeads, exist_ok=True)
