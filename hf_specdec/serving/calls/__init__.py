"""
Calls of functions, as a model writes them.

    syntax.py           how: what the chat template writes of an example, and what reads that
    templates.py        response templates that may read it
    forms.py            forms of calls: JSON, tags, JSON with marks for quotes; grammars of each
    python_form.py      calls in Python
    python_reading.py   what they say
    values.py           grammars of values in which strings are not JSON's
    schemas.py          JSON schemas of arguments
    lark.py             grammars, rule by rule
    reading.py          calls that a grammar has demanded, piece by piece
"""

from .reading import CallPiece, CallReader, Demanded
from .syntax import CallSyntax


__all__ = ["CallPiece", "CallReader", "CallSyntax", "Demanded"]
