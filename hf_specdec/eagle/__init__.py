"""EAGLE heads: their configuration, their arithmetic, and the formats they are published in."""

from transformers import AutoConfig, AutoModel

from .configuration_eagle import EagleConfig
from .modeling_eagle import EagleHead, EagleOutput


__all__ = ["EagleConfig", "EagleHead", "EagleOutput"]

AutoConfig.register(EagleConfig.model_type, EagleConfig, exist_ok=True)
AutoModel.register(EagleConfig, EagleHead, exist_ok=True)
