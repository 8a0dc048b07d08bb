"""What the sweep finds of layers with states, in whatever release is installed."""

from __future__ import annotations

import re

import pytest
import transformers

from hf_specdec.states.recurrences import RECURRENCES

from .registry import Pair, all_pairs
from .running import runner_of
from .state_modes import PADDED, TOGETHER, outcome_of
from .states import pairs_to_serve, state_files, states_of


WITHOUT_FUNCTIONS = {"zaya"}
"""Files whose layers change states by code of their own: they run level by level."""


def test_every_file_has_functions_that_follow_trees() -> None:
    """The functions that are replaced are still those of transformers' files."""
    functions = {name for recurrence in RECURRENCES for name in recurrence.functions} | {"causal_conv1d_fn"}
    found = {name: functions & set(re.findall(r"^def (\w+)\(", text, re.M)) for name, text in state_files().items()}
    assert set().union(*found.values()) == functions
    assert {name for name, own in found.items() if not own} <= WITHOUT_FUNCTIONS


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs_to_serve(), ids=str)
def test_every_family(pair: Pair) -> None:
    """What the installed release has with states or caches of its own is exact, or refused by name."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    runner = runner_of(pair)
    if runner.outcome("n-grams").kind == "refused":
        return
    outcomes = {mode: outcome_of(runner, mode, seed=2) for mode in (PADDED, TOGETHER)}
    ran = [outcome for outcome in outcomes.values() if not outcome.detail.startswith("plain generate: ")]
    assert {outcome.kind for outcome in ran} <= {"exact", "refused"}, outcomes


@pytest.mark.slow
def test_every_file_has_a_pair() -> None:
    """Nothing with states escapes the sweep."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    assert set(state_files()) == set().union(*map(states_of, all_pairs()))
