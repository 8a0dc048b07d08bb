"""
hf_specdec: lossless tree speculative decoding for Hugging Face transformers.

Importing it lets `model.generate` take `tree=` and `speculative_config=` beside `assistant_model=`:

    model.generate(**inputs, assistant_model=draft, tree="[(0,), (1,), (0, 0)]")
"""

from .cards import Measurement
from .config import SpeculativeConfig
from .drafters import Drafter, DraftRequest, NgramDraft
from .eagle import EagleConfig, EagleHead
from .hook import install
from .medusa import MedusaConfig, MedusaHeads
from .metrics import SpeculationMetrics, last_metrics
from .recording import SpeculativeGenerateOutput
from .trees import DraftTree, DynamicTree, TokenTree, Topology


__version__ = "0.1.0"
__all__ = [
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DynamicTree",
    "EagleConfig",
    "EagleHead",
    "Measurement",
    "MedusaConfig",
    "MedusaHeads",
    "NgramDraft",
    "SpeculationMetrics",
    "SpeculativeConfig",
    "SpeculativeGenerateOutput",
    "TokenTree",
    "Topology",
    "last_metrics",
]

install()
