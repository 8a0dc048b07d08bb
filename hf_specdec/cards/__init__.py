"""Model cards: measurements, common sections, and the card of a draft model."""

from .draft_model import draft_model_card
from .measurement import Measurement


__all__ = ["Measurement", "draft_model_card"]
