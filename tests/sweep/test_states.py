"""What the sweep finds of layers with states, in whatever release is installed."""

from __future__ import annotations

import re

import pytest
import transformers

from hf_specdec.states.recurrences import RECURRENCES

from .registry import all_pairs
from .states import state_files, states_of


WITHOUT_FUNCTIONS = {"zaya"}
"""Files whose layers change states by code of their own: refused."""


def test_every_file_has_functions_that_follow_trees() -> None:
    """The functions that are replaced are still those of transformers' files."""
    functions = {name for recurrence in RECURRENCES for name in recurrence.functions} | {"causal_conv1d_fn"}
    found = {name: functions & set(re.findall(r"^def (\w+)\(", text, re.M)) for name, text in state_files().items()}
    assert set().union(*found.values()) == functions
    assert {name for name, own in found.items() if not own} <= WITHOUT_FUNCTIONS


@pytest.mark.slow
def test_every_file_has_a_pair() -> None:
    """Nothing with states escapes the sweep."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    assert set(state_files()) == set().union(*map(states_of, all_pairs()))
