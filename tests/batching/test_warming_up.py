"""Steps that are captured before requests come, with a stand-in for CUDA's graphs."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, text_alone
from support.graphs import StandIn, install_stand_in
from support.models import noisy_copy, tiny_model
from support.sampling import TREE, a_head, the_target

from hf_specdec import NgramDraft, TokenTree
from hf_specdec.batching import warming_up
from hf_specdec.engine.captured import device_steps
from hf_specdec_kernels import operators_rest


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

CHAIN = TokenTree.chain(2)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.mark.usefixtures("few_trees")
@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["static", "auto"])
@pytest.mark.some_cases(1)
def test_warming_up(tree: Any, kind: str) -> None:
    """All sizes are there before the first request, which finds nothing else changed."""
    target = copy.deepcopy(the_target()).float()
    draft = copy.deepcopy(a_head(None)).float() if kind == "head" else noisy_copy(target, 0.05)
    manager = target.init_continuous_batching(
        assistant_model=draft, tree=tree, continuous_batching_config=limits(60, max_requests_per_batch=2)
    )
    manager.warmup(at_once=True)
    with manager:
        name = manager.add_request([4, 5, 6], max_new_tokens=12)
        output = manager.get_result(name, timeout=120)
        assert output.generated_tokens == text_alone(target, [4, 5, 6], max_new_tokens=12)
        state, steps = manager.state, set(manager.engine.device_steps.stored)
        assert state.num_generation_tokens == 12 and state.speculation.num_drafts == output.speculation.num_drafts
        drawn = {"do_sample": True}
        for count, options in [(3, {}), (3, drawn), (2, drawn | {"top_k": 0}), (1, drawn | {"top_p": 0.9}), (1, {})]:
            manager.add_requests([[4, 5, 6]] * count, max_new_tokens=12, **options)
            for _ in range(count):
                assert manager.get_result(timeout=60).error is None
        assert {size.rows for _, size in steps} == {1, 2}
        assert set(manager.engine.device_steps.stored) == steps
        with pytest.raises(RuntimeError, match="`warmup`: the manager is running already"):
            manager.warmup()
    assert_nothing_left(manager)


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_kernels_are_compiled_first(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of every step of the first part, with a function that leaves nothing behind; a failure is no matter."""
    ran = list[int]()

    def compile_kernels(run: Any, device: torch.device, pool: Any = None) -> Any:
        ran.append(manager.engine.device_steps.num_captures)
        if fails:
            raise RuntimeError("no such instruction")
        with operators_rest():
            run()
        return (lambda: None), []

    monkeypatch.setattr(device_steps, "compile_kernels", compile_kernels)
    monkeypatch.setattr(warming_up, "COMPILES_AHEAD", {"cpu"})
    target = copy.deepcopy(the_target()).float()
    manager = target.init_continuous_batching(
        assistant_model=copy.deepcopy(a_head(None)).float(),
        tree=TREE,
        continuous_batching_config=limits(60, max_requests_per_batch=2),
    )
    manager.warmup(at_once=True)
    with manager:
        name = manager.add_request([4, 5, 6], max_new_tokens=12)
        output = manager.get_result(name, timeout=120)
    steps = manager.engine.device_steps
    assert output.generated_tokens == text_alone(target, [4, 5, 6], max_new_tokens=12)
    assert ran == [ran[0]] * (len(steps.stored) + len(steps.prompts.stored) - ran[0])


def test_warming_up_with_stop_strings() -> None:
    """They need the tokenizer that requests bring along."""
    target = tiny_model(dtype=torch.float32)
    config = copy.deepcopy(target.generation_config)
    config.stop_strings = ["stop"]
    manager = target.init_continuous_batching(
        config,
        assistant_model=noisy_copy(target),
        tree=CHAIN,
        continuous_batching_config=limits(400, max_requests_per_batch=2),
    )
    assert len(manager._admission.dummy_requests(2, do_sample=True)) == 2


def test_warming_up_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and a manager that serves all the same."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("nothing works")

    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target), tree=CHAIN, continuous_batching_config=limits(400)
    )
    monkeypatch.setattr(manager._admission, "dummy_requests", fails)
    manager.warmup()
    with pytest.warns(UserWarning, match="could not warm up, and starts cold: RuntimeError: nothing works"), manager:
        output = manager.get_result(manager.add_request([4, 5], max_new_tokens=9), timeout=60)
    assert output.generated_tokens == text_alone(target, [4, 5], max_new_tokens=9)
    assert_nothing_left(manager)


def test_warming_up_where_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model()  # in float64
    manager = target.init_continuous_batching(assistant_model=NgramDraft(), continuous_batching_config=limits())
    manager.warmup()
    with manager:
        assert manager.get_result(manager.add_request([4, 5], max_new_tokens=3)).error is None
        assert manager.engine.num_steps < 5


@pytest.mark.slow
def test_a_pause_puts_the_warm_up_off() -> None:
    """It does not wait for the end of it, and the rest is captured afterwards."""
    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=noisy_copy(target),
        tree=CHAIN,
        continuous_batching_config=limits(400, max_requests_per_batch=8),
    )
    manager.warmup()
    paused_at: list[int] = []
    new_requests = manager._admission.dummy_requests

    def pause_soon(*args: Any, **options: Any) -> Any:
        if not paused_at:
            paused_at.append(0)
            threading.Thread(target=pause).start()
            while not manager._loop.pauses.are_wanted:
                time.sleep(0.001)
        return new_requests(*args, **options)

    def pause() -> None:
        with manager.pause():
            paused_at.append(len(manager.engine.device_steps.stored))

    manager._admission.dummy_requests = pause_soon
    with manager:
        output = manager.get_result(manager.add_request([4, 5], max_new_tokens=3), timeout=60)
        assert output.generated_tokens == text_alone(target, [4, 5], max_new_tokens=3)  # the request is not lost
        assert len(paused_at) == 2 and paused_at[1] < len(manager.engine.device_steps.stored) - 4
    assert manager._loop.prepare is None
