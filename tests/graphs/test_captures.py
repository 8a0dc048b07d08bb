"""What is captured when, what a capture keeps, and what becomes of one that fails."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import BY_ATTENTION, TREE, ReadFromOutside, StandIn, graphed, make_up_cuda
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model

import hf_specdec
from hf_specdec import graphs


@BY_ATTENTION
def test_what_a_graph_reads_is_kept(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses alone: it does not keep what was made before it was captured, nor the function."""
    captured: list[tuple[ReadFromOutside, Any]] = []

    def record(run: Callable[[], list[torch.Tensor]], device: torch.device, pool: Any = None) -> Any:
        run()
        with ReadFromOutside() as reads:
            tensors = [tensor.clone() for tensor in run()]
        captured.append((reads, tensors))
        return lambda: None, tensors  # of no use: what is generated does not count

    monkeypatch.setitem(graphs.RECORDERS, "cpu", record)
    target = tiny_model()
    draft = noisy_copy(target)
    target.generate(**prompts(2, 9), max_new_tokens=20, do_sample=False, assistant_model=draft, **graphed(TREE))
    gc.collect()
    assert captured and all(reads.found for reads, _ in captured)
    assert not [what for reads, _ in captured for what in reads.gone()]


def test_what_a_failed_capture_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning; the text is right, and later calls go without."""

    def fails(run: Callable, device: torch.device, pool: Any = None) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setitem(graphs.RECORDERS, "cpu", fails)
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**prompts(2, 9), max_new_tokens=30, do_sample=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            output = target.generate(
                **prompts(2, 9), max_new_tokens=30, do_sample=False, assistant_model=draft, **graphed(TREE)
            )
            assert torch.equal(output, plain)
    messages = [str(warning.message) for warning in caught if "CUDA graph" in str(warning.message)]
    assert len(messages) == 2  # target and draft
    assert messages[0].endswith("operation not permitted when stream is capturing")


def test_a_capture_that_runs_out_of_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its end fails, too: then torch is told of the end. (What runs it on a device is made up here.)"""
    runs: list[str] = []

    class Graph:
        begun = 0

        def capture_begin(self, *pool: Any) -> None:
            Graph.begun += 1

        def capture_end(self) -> None:
            if Graph.begun == 1:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None:
            runs.append("replay")

    def run() -> list[torch.Tensor]:
        runs.append("run")
        if Graph.begun == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return []

    told = make_up_cuda(monkeypatch, Graph)
    replay, _ = graphs.record_cuda_graph(run, torch.device("cuda"))
    replay()
    assert runs == ["run", "run", "run", "replay"]
    assert told == ["_cuda_endAllocateToPool", "_cuda_releasePool", "_capture_something", "empty_cache"]


def test_a_capture_that_fails_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self, *pool: Any) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    told = make_up_cuda(monkeypatch, Graph)
    with pytest.raises(RuntimeError, match="due to a previous error"):
        graphs.record_cuda_graph(list, torch.device("cuda"))
    assert told == ["_cuda_endAllocateToPool", "_cuda_releasePool", "_capture_something"]


def test_graphs_go_with_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Keeps no function.
    monkeypatch.setitem(graphs.RECORDERS, "cpu", lambda run, device, pool=None: (lambda: None, run()))
    target = tiny_model()
    head = tiny_head(target)
    target.generate(**prompts(1, 9), max_new_tokens=30, do_sample=False, assistant_model=head, **graphed(TREE))
    stores = [
        weakref.ref(store) for model in (target, head) for store in graphs.stores._shelves[model].stores.values()
    ]
    assert len(stores) == 2 and any(store()._graphs for store in stores)
    del target, head
    gc.collect()
    assert all(store() is None for store in stores)


def test_few_stores_are_kept(stand_in: StandIn) -> None:
    target = tiny_model()
    for length in (9, 140, 9):
        for batch_size in (1, 2, 3):
            inputs = prompts(batch_size, length)
            ngrams = hf_specdec.NgramDraft(3, 1)
            target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=ngrams, **graphed(TREE))
    stores = graphs.stores._shelves[target].stores
    assert len(stores) == graphs.stores.STORES_PER_MODEL and not graphs.stores._shelves[target].lent
    assert all((batch_size, 128, False) in stores for batch_size in (1, 2, 3))  # the ones used last


def test_other_weights_are_captured_anew(stand_in: StandIn) -> None:
    target, other = tiny_model(), tiny_model(seed=1)
    draft = noisy_copy(target, 0.05)
    for _ in range(2):
        inputs = prompts(1, 9)
        plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        output = target.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=draft, **graphed(TREE))
        assert torch.equal(output, plain)
        captured, first = stand_in.captures, graphs.stores._shelves[target].stores
        for parameter, new in zip(target.parameters(), other.parameters(), strict=True):
            parameter.data = new.data  # as loading or merging adapters may do
    assert captured > 0 and graphs.stores._shelves[target].stores is first


def test_models_with_hooks_are_refused(stand_in: StandIn) -> None:
    """A graph would pass by them."""
    target = tiny_model()
    target.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="cuda_graphs=True.*has forward hooks"):
        target.generate(**prompts(1, 9), assistant_model=noisy_copy(target, 0.05), **graphed(TREE))


def test_drafts_with_hooks_are_refused(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the target reads the prompt."""
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    draft.get_decoder().register_forward_hook(lambda *_: None)
    monkeypatch.setattr(type(target), "_prefill", lambda *args: pytest.fail("the prompt was read"))
    with pytest.raises(ValueError, match="cuda_graphs=True.*has forward hooks"):
        target.generate(**prompts(1, 9), assistant_model=draft, **graphed(TREE))


@BY_ATTENTION
def test_auto_takes_what_can_be_captured(stand_in: StandIn) -> None:
    """And goes without graphs, with a word about it, where hooks of the user's would be passed by: before or after."""
    target, inputs = tiny_model(), prompts(1, 9)
    draft, config = noisy_copy(target, 0.05), hf_specdec.SpeculativeConfig(tree=TREE)
    options = {"max_new_tokens": 20, "do_sample": False, "speculative_config": config}
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    with pytest.warns(UserWarning, match="the target LlamaForCausalLM has forward hooks"):
        handle = target.get_decoder().register_forward_hook(lambda *args: None)
        assert torch.equal(plain, target.generate(**inputs, assistant_model=draft, **options))
    assert stand_in.replays > 0
    before = stand_in.replays
    assert torch.equal(plain, target.generate(**inputs, assistant_model=hf_specdec.NgramDraft(), **options))
    assert stand_in.replays == before
    handle.remove()
    assert torch.equal(plain, target.generate(**inputs, assistant_model=hf_specdec.NgramDraft(), **options))
    assert stand_in.replays > before
    before, seen = stand_in.replays, []
    target.lm_head.register_forward_hook(lambda *args: seen.append(1))
    with pytest.warns(UserWarning, match="at lm_head"):
        target.generate(**inputs, assistant_model=hf_specdec.NgramDraft(), **options)
    assert stand_in.replays == before and seen


def test_demanding_graphs_where_there_are_none() -> None:
    target = tiny_model()
    config = hf_specdec.SpeculativeConfig(tree=TREE, cuda_graphs=True)
    with pytest.raises(ValueError, match="`cuda_graphs=True`: LlamaForCausalLM runs on cpu"):
        target.generate(**prompts(1, 9), assistant_model=noisy_copy(target, 0.1), speculative_config=config)
