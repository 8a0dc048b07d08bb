"""The pairs of architecture and class that the sweep goes through, from transformers' registry."""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto


MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)


@dataclass(frozen=True, order=True)
class Pair:
    """A `model_type` and the name of a class that the registry maps it to."""

    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.model_type}:{self.class_name}"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The class itself."""
        return getattr(transformers, self.class_name)

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        """The config class of the architecture, which may hold that of the model."""
        return CONFIG_MAPPING[self.model_type]


def all_pairs() -> list[Pair]:
    """Every pair of the installed transformers, sorted."""
    pairs = set()
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            for name in names if isinstance(names, tuple) else (names,):
                pairs.add(Pair(model_type, name))
    return sorted(pairs)
