"""
What is wrong with a head: how it was read, and how often it agrees with its target under that and other readings.

Published heads of one form differ in conventions that no error betrays (which hidden states, which norms, whose rotary
embedding); a wrong one costs acceptance only. The doctor tries the alternatives on text that the target writes.
"""

from .diagnosis import Agreement, Diagnosis
from .examination import PROMPTS, diagnose


__all__ = ["PROMPTS", "Agreement", "Diagnosis", "diagnose"]
