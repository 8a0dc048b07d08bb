"""
hf_specdec: lossless tree speculative decoding for Hugging Face transformers.

Importing hf_specdec lets `model.generate` take `tree=` and `speculative_config=` beside `assistant_model=`:

    model.generate(**inputs, assistant_model=draft, tree="[(0,), (1,), (0, 0)]")

Torch, transformers and most submodules are imported only on first use; `hf_specdec.smollm2` or another submodule needs
no import of its own.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import hooks


if TYPE_CHECKING:
    from .block import BlockConfig, BlockHead
    from .cards import Measurement
    from .config import SpeculativeConfig
    from .drafters import Drafter, DraftRequest, NgramDraft
    from .eagle import EagleConfig, EagleHead
    from .gemma import GemmaAssistant, GemmaAssistantConfig
    from .generation.recording import SpeculativeGenerateOutput
    from .loading import load_draft
    from .medusa import MedusaConfig, MedusaHeads
    from .metrics import SpeculationMetrics, last_metrics
    from .mtp import MtpConfig, MtpHead
    from .rl import OnlineHead, rollouts
    from .trees import DraftTree, DynamicTree, TokenTree, Topology

__version__ = "0.2.0"
__all__ = [
    "BlockConfig",
    "BlockHead",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DynamicTree",
    "EagleConfig",
    "EagleHead",
    "GemmaAssistant",
    "GemmaAssistantConfig",
    "Measurement",
    "MedusaConfig",
    "MedusaHeads",
    "MtpConfig",
    "MtpHead",
    "NgramDraft",
    "OnlineHead",
    "SpeculationMetrics",
    "SpeculativeConfig",
    "SpeculativeGenerateOutput",
    "TokenTree",
    "Topology",
    "last_metrics",
    "load_draft",
    "rollouts",
]

_HOMES = {
    "block": ("BlockConfig", "BlockHead"),
    "cards": ("Measurement",),
    "config": ("SpeculativeConfig",),
    "drafters": ("DraftRequest", "Drafter", "NgramDraft"),
    "eagle": ("EagleConfig", "EagleHead"),
    "gemma": ("GemmaAssistant", "GemmaAssistantConfig"),
    "loading": ("load_draft",),
    "medusa": ("MedusaConfig", "MedusaHeads"),
    "metrics": ("SpeculationMetrics", "last_metrics"),
    "mtp": ("MtpConfig", "MtpHead"),
    "rl": ("OnlineHead", "rollouts"),
    "generation.recording": ("SpeculativeGenerateOutput",),
    "trees": ("DraftTree", "DynamicTree", "TokenTree", "Topology"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        globals()[name] = value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


hooks.install_when_needed()
