"""
Drafting with heads that read the target's hidden states (its *features*) into a K/V cache of their own: what EAGLE
heads and block heads share.

- `drafter`: `FeatureDrafter`, the drafter of a call; `reading`: how its head reads features; `checks`: whether the
  head fits the target.
- `drafting`: `FeatureDrafting`, the same for requests in flight.
- `captured`: `CapturedFeatures`, the draft within a captured step.
- `vocabulary`: `HeldVocabulary`, the tokens that a head can propose, where captured steps find them.
"""

from __future__ import annotations

from .captured import CapturedFeatures
from .drafter import FeatureDrafter
from .drafting import FeatureDrafting


__all__ = ["CapturedFeatures", "FeatureDrafter", "FeatureDrafting"]
