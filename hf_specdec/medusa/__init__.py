"""Medusa heads: their configuration, arithmetic and checkpoints."""

from transformers import AutoConfig, AutoModel

from .configuration_medusa import MedusaConfig
from .modeling_medusa import MedusaHeads


__all__ = ["MedusaConfig", "MedusaHeads"]

AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
AutoModel.register(MedusaConfig, MedusaHeads, exist_ok=True)
