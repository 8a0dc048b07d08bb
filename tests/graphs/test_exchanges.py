"""Graphs with exchanges between ranks are freed before the process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_specdec.graphs import exchanges
from hf_specdec.ranks import Ranks


class Graph:
    """A graph that tells when it is freed."""

    def __init__(self, name: str, told: list[str]):
        self.name, self.told = name, told

    def reset(self) -> None:
        self.told.append(self.name)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is done, in its order."""
    told: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: told.append(f"destroy {group}"))
    monkeypatch.setattr(dist.distributed_c10d, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.setattr(exchanges.atexit, "register", lambda function: told.append("registered"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    exchanges._free_before_the_group.cache_clear()
    yield told
    exchanges._free_before_the_group.cache_clear()


def test_graphs_of_ranks_are_freed_before_their_group(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "on_all", lambda ranks, holds: holds)
    graphs: list[Any] = []
    for group in (None, "a", "a", "b"):
        with exchanges.captured_together(Ranks(group, torch.device("cpu"))):  # type: ignore[arg-type]
            graphs.append(Graph(f"graph of {group}", told))
            exchanges.note(graphs[-1])
    dist.destroy_process_group("a")
    dist.destroy_process_group()
    assert told == ["registered", "graph of a", "graph of a", "destroy a", "graph of b", "destroy None"]


def test_a_capture_fails_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, said = Ranks(None, torch.device("cpu")), []
    monkeypatch.setattr(Ranks, "on_all", lambda ranks, holds: bool(said.append(holds)))
    with pytest.raises(KeyError), exchanges.captured_together(ranks):
        raise KeyError
    with pytest.raises(RuntimeError, match="another rank"), exchanges.captured_together(ranks):
        pass
    assert said == [False, True] and exchanges._group() is None
