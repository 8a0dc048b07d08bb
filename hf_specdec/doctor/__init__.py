"""
Diagnosis of a head: how its checkpoint was read, and how often it agrees with its target under other readings.

Published heads of one format differ in conventions that raise no error (which hidden states, which norms, whose rotary
embedding); a wrong convention only lowers acceptance. The doctor tries alternatives on text that the target writes.
"""

from .diagnosis import Agreement, Diagnosis
from .examination import PROMPTS, diagnose


__all__ = ["PROMPTS", "Agreement", "Diagnosis", "diagnose"]
