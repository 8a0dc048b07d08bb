"""The kinds of recurrences that run over trees."""

from __future__ import annotations

from .delta_rule import DeltaRule, KimiDeltaAttention
from .recurrence import Recurrence


RECURRENCES: tuple[Recurrence, ...] = (DeltaRule(), KimiDeltaAttention())
