"""Noting which linear layers are merged where models are compiled."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.compiling import merged_linears


def noted_merges(monkeypatch: pytest.MonkeyPatch, on_cpu: bool = True) -> list[int]:
    """A list to which the number of calls in every merge is added; `on_cpu` lets float32 layers on a CPU be merged."""
    sizes: list[int] = []
    merge = merged_linears._merge

    def noted(graph: torch.fx.Graph, calls: list[torch.fx.Node]) -> None:
        sizes.append(len(calls))
        merge(graph, calls)

    monkeypatch.setattr(merged_linears, "_merge", noted)
    if on_cpu:
        monkeypatch.setattr(merged_linears, "DTYPES", {"cpu": (torch.float32,)})
    return sizes
