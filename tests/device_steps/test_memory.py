"""What a captured step reads must stay where it is for as long as the step lives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_steps import BY_ATTENTION, Steps
from support.heads import tiny_head
from support.hybrids import draft_of, hybrid
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specdec import DynamicTree, attention, graphs
from hf_specdec.drafters import growth
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.forwards import node_inputs
from hf_specdec.trees import draft_tree


class Inputs(TorchDispatchMode):
    """Collects the memory that operations inside read, but did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, tuple[str, StorageWeakRef]] = {}
        self._made: list[Any] = []  # alive, so that no address comes twice
        self._own: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_constant = function is torch.ops.aten.lift_fresh.default  # made inside, by plain versions of kernels
        for value in tree_leaves((args, kwargs or {})) if not is_constant else ():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._own:
                    what = f"{tuple(value.shape)} in {function}"
                    self.read.setdefault(storage._cdata, (what, StorageWeakRef(storage)))
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in self.read:
                self._made.append(value)
                self._own.add(value.untyped_storage()._cdata)
        return result


@BY_ATTENTION
@pytest.mark.parametrize(
    "kind", ["model", "head", "head with a draft vocabulary", "head that borrows an lm_head", "states"]
)
@pytest.mark.parametrize("tree", [IRREGULAR, DynamicTree(depth=3, top_k=3, num_nodes=9)], ids=["static", "dynamic"])
@pytest.mark.some_cases(4)
def test_all_that_a_step_reads_is_held(kind: str, tree: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs()
    record = graphs.RECORDERS["cpu"]

    def watched(run: Callable[[], Any], device: torch.device, pool: Any = None) -> Any:
        with inputs:
            run()
        return record(run, device, pool)

    capture = InFlightStep.capture

    def gone(self: InFlightStep, *args: Any) -> None:
        capture(self, watched, None)
        self._replay = lambda: None  # the function is gone, as that of a real graph is

    monkeypatch.setattr(InFlightStep, "capture", gone)
    target = hybrid("qwen3_5_text") if kind == "states" else tiny_model(dtype=torch.float32)
    vocabulary = {"draft_vocab_size": 20} if "vocabulary" in kind or "borrows" in kind else {}
    if kind == "model":
        draft: Any = noisy_copy(target, 0.05)
    elif kind == "states":
        draft = draft_of([])
    else:
        draft = tiny_head(target, **vocabulary, **({"has_lm_head": False} if "borrows" in kind else {}))
    target.generate(**prompts(2, 9, padding=True), max_new_tokens=8, do_sample=False, assistant_model=draft, tree=tree)
    for cached in (growth.static._levels, draft_tree._of_tree, node_inputs._short_causal_chain, attention.mask_values):
        cached.cache_clear()
    gc.collect()
    assert len(inputs.read) > 20
    assert not [what for what, storage in inputs.read.values() if storage.expired()]
