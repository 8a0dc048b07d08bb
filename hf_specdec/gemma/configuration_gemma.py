"""`GemmaAssistantConfig`: what an assistant of a Gemma 4 is."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..checkpoints.kinds import GEMMA_ASSISTANTS
from ..head_config import WithDefaultTree


class GemmaAssistantConfig(WithDefaultTree, PreTrainedConfig):
    """
    The configuration of a `GemmaAssistant`.

    Args:
        text_config (`PreTrainedConfig`): the config of its layers, of the target's kind.
        backbone_hidden_size (`int`, *optional*, defaults to 1536): hidden size H of the target.
        use_ordered_embeddings (`bool`, *optional*, defaults to `False`): whether logits are computed for the tokens of
            the best centroids alone.
        num_centroids (`int`, *optional*, defaults to 2048): centroids, each of equally many tokens.
        centroid_intermediate_top_k (`int`, *optional*, defaults to 32): how many of them are the best.
        position_of_feature (`bool`, *optional*, defaults to `False`): whether queries are at the position of the
            feature, as in vLLM, and not at that of the token after it, as in transformers.
        default_tree (`dict` or `list`, *optional*): the tree that a call without `tree=` takes.
        target_name (`str`, *optional*): the model that the assistant is for.
    """

    model_type = GEMMA_ASSISTANTS[0]
    sub_configs = {"text_config": AutoConfig}

    text_config: Any = None
    backbone_hidden_size: int = 1536
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    position_of_feature: bool = False
    default_tree: Any = None
    target_name: str | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.text_config.vocab_size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that it can propose."""
        return self.vocab_size

    def aux_boundaries(self, num_target_layers: int) -> list[int]:
        """None: it reads the target's last hidden states, after the final norm."""
        return []


def config_of(name: str, published: dict[str, Any]) -> GemmaAssistantConfig:
    """
    The config of a published assistant, from the content of its config.json.

    Raises:
        ValueError: if it is that of something else, or of layers that this release of transformers does not have.
    """
    if published.get("model_type") not in GEMMA_ASSISTANTS:
        raise ValueError(
            f"{name}: `model_type`={published.get('model_type')!r} in config.json: not one of Gemma 4's assistants "
            f"({', '.join(GEMMA_ASSISTANTS)}). Use `hf_specdec.load_draft`, which takes drafts of all kinds."
        )
    text = dict(published.get("text_config") or {})
    kind = str(text.pop("model_type", published["model_type"].replace("assistant", "text")))
    refused = [field for field in _ABSENT if text.get(field)]
    if refused:
        raise ValueError(
            f"{name}: `text_config.{refused[0]}`={text[refused[0]]!r} in config.json: assistants with it are not "
            "known. Name a published one, google/gemma-4-…-it-assistant."
        )
    text |= dict.fromkeys(("num_kv_shared_layers", *_ABSENT), 0)  # all layers share: config classes may refuse that
    text["enable_moe_block"] = text["use_double_wide_mlp"] = False
    try:
        layers = AutoConfig.for_model(kind, **text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: `text_config` of config.json describes no layers of Gemma 4 ({error}).") from error
    known = GemmaAssistantConfig.__annotations__.keys() - {"text_config"}
    values = {field: value for field, value in published.items() if field in known}
    _check_centroids(name, values, layers.vocab_size)
    return GemmaAssistantConfig(text_config=layers, **values)


_ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


def _check_centroids(name: str, values: dict[str, Any], vocab_size: int) -> None:
    if not values.get("use_ordered_embeddings"):
        return
    number, best = values.get("num_centroids", 2048), values.get("centroid_intermediate_top_k", 32)
    if number < 1 or vocab_size % number or not 1 <= best <= number:
        raise ValueError(
            f"{name}: `num_centroids`={number} and `centroid_intermediate_top_k`={best} in config.json do not fit a "
            f"vocabulary of {vocab_size} tokens, of which each centroid must have equally many. Download it again."
        )
