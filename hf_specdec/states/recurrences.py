"""The kinds of recurrences that run over trees."""

from __future__ import annotations

from .delta_rule import DeltaRule, KimiDeltaAttention
from .mamba1 import Mamba1
from .mamba2 import Mamba2
from .recurrence import Recurrence


RECURRENCES: tuple[Recurrence, ...] = (DeltaRule(), KimiDeltaAttention(), Mamba2(), Mamba1())
