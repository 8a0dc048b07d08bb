"""What stands in transformers' model files, and the names of what runs over nodes."""

from __future__ import annotations

import sys

import pytest
import torch
from support.hybrids import hybrid

from hf_specdec.states import Path, hook


def test_an_interrupt_while_functions_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that were replaced before it stand in the model's file again."""
    model = hybrid("qwen3_5_text")
    (name,) = hook.files_with_mixers(model)
    before = {function: vars(sys.modules[name])[function] for function in hook._functions_of(name)}

    def interrupted(original: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(hook._replacements, list(before)[-1], interrupted)
        with pytest.raises(KeyboardInterrupt), hook.states_over_trees(model):
            pass
    assert {function: vars(sys.modules[name])[function] for function in before} == before
    assert name not in hook._replaced
    with hook.states_over_trees(model), hook.states_over_trees(model):
        assert all(vars(sys.modules[name])[function] is not one for function, one in before.items())
    assert {function: vars(sys.modules[name])[function] for function in before} == before


def test_paths_that_commit_nothing() -> None:
    path = Path.of([[], []], torch.device("cpu"))
    assert (path.nodes.dtype, path.is_on.dtype) == (torch.long, torch.bool)
    assert path.of_nodes(torch.ones(2, 3, 4)).shape == (2, 0, 4)
