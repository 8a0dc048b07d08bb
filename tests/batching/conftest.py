"""What tests of requests in flight share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.batches import assert_nothing_left, manager_of, runs_of_steps
from transformers import PreTrainedModel

from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.engine.captured.running import Repeats
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.trees.candidate_trees import CandidateTrees


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[InFlightStep]:
    """The whole steps that have run, one after the other."""
    return runs_of_steps(monkeypatch)


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidate trees, the small one of trials among them: the others would be captured alike."""
    (peaked, _), (average, _), (flat, _) = CandidateTrees.DRAFTS
    monkeypatch.setattr(
        CandidateTrees, "DRAFTS", ((peaked, ((1, 1), (2, 2), (4, 4))), (average, ((8, 3),)), (flat, ((4, 2),)))
    )


@pytest.fixture
def manager(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[SpeculativeBatchingManager]:
    """A running manager, which must hold nothing when it has stopped."""
    with manager_of(target, draft) as manager:
        yield manager
    assert_nothing_left(manager)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[Repeats]:
    """The runs that were launched before the last one was read."""
    found: list[Repeats] = []
    launch = Repeats.launch

    def noted(self: Repeats) -> None:
        found.append(self)
        launch(self)

    monkeypatch.setattr(Repeats, "launch", noted)
    return found
