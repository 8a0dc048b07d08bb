"""Pauses, in which the models are somebody else's."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, text_alone
from support.graphs import StandIn, install_stand_in
from support.heads import tiny_head
from support.models import noisy_copy, take_weights, tiny_model

from hf_specdec import NgramDraft
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.generation import draft_refusals


PROMPT, OTHER = [5, 6, 7, 8], [9, 3, 4]
LONG = 150


def make(model: Any, draft: Any) -> SpeculativeBatchingManager:
    return model.init_continuous_batching(
        assistant_model=draft, tree="[(0,), (0, 0)]", continuous_batching_config=limits()
    )


def wait_for_tokens(manager: SpeculativeBatchingManager, name: str, count: int) -> None:
    for result in manager.request_id_iter(name):
        if len(result.generated_tokens) >= count:
            return


@pytest.mark.parametrize(
    "graphs, how, kind",
    [
        pytest.param(True, "in place", "draft", id="graphs-in place-draft"),
        pytest.param(True, "replaced", "head", id="graphs-replaced-head"),
        pytest.param(False, "in place", "head", id="no graphs-in place-head"),
        pytest.param(False, "replaced", "draft", id="no graphs-replaced-draft"),
    ],
)
@pytest.mark.some_cases(1)
def test_weights_are_changed(kind: str, how: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests after it are written with the new ones, also by graphs that were captured before it."""
    stand_in = install_stand_in(monkeypatch, with_kernel=True) if graphs else StandIn()
    model, other = tiny_model(), tiny_model(seed=1)
    draft = noisy_copy(model) if kind == "draft" else tiny_head(model)
    expected = [text_alone(one, PROMPT, max_new_tokens=20) for one in (model, other)]
    assert expected[0] != expected[1]
    with make(model, draft) as manager:
        captures = []
        for text in expected:
            before = stand_in.captures
            for _ in range(3):
                name = manager.add_request(PROMPT, max_new_tokens=20, do_sample=False)
                assert manager.get_result(name).generated_tokens == text
            captures.append(stand_in.captures - before)
            with manager.pause():
                take_weights(model, other, in_place=how == "in place")
    # The stand-in for graphs reads the new weights wherever they are, real ones would not.
    if graphs:
        before, after = captures
        assert after >= before // 2 > 2 if how == "replaced" else after <= 2 < before
    assert_nothing_left(manager)


def test_nothing_happens_inside_and_all_goes_on_after_it() -> None:
    model = tiny_model()
    with make(model, NgramDraft()) as manager:
        first = manager.add_request(PROMPT, max_new_tokens=LONG, do_sample=False, streaming=True)
        wait_for_tokens(manager, first, 5)
        with manager.pause():
            assert model.config._attn_implementation == "sdpa" and manager.is_running()
            steps = manager.engine.num_steps
            second = manager.add_request(OTHER, max_new_tokens=9, do_sample=False)
            # The model does what it does without a manager, with gradients as well.
            texts = [text_alone(model, OTHER, anew, max_new_tokens=9) for anew in (True, False)]
            assert texts[0] == texts[1]
            model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
            time.sleep(0.1)
            assert manager.engine.num_steps == steps and manager.get_result(second, timeout=0.05) is None
        assert manager.get_result(second).generated_tokens == text_alone(model, OTHER, max_new_tokens=9)
        *_, last = manager.request_id_iter(first)
        assert last.generated_tokens == text_alone(model, PROMPT, max_new_tokens=LONG)
    assert_nothing_left(manager)


def test_several_threads_are_inside() -> None:
    """Who leaves first leaves the others their pause."""
    model, inside, leaves = tiny_model(), threading.Barrier(3), threading.Event()

    def hold(first: bool) -> None:
        with manager.pause():
            inside.wait(30)
            if not first:
                assert leaves.wait(30)

    with make(model, NgramDraft()) as manager:
        name = manager.add_request(PROMPT, max_new_tokens=LONG, do_sample=False)
        threads = [threading.Thread(target=hold, args=(number == 0,)) for number in range(2)]
        for thread in threads:
            thread.start()
        inside.wait(30)
        threads[0].join()
        steps = manager.engine.num_steps
        time.sleep(0.1)
        assert manager.engine.num_steps == steps
        leaves.set()
        threads[1].join()
        assert manager.get_result(name).generated_tokens == text_alone(model, PROMPT, max_new_tokens=LONG)


def test_an_error_inside_ends_the_pause() -> None:
    model = tiny_model()
    with make(model, NgramDraft()) as manager:
        with pytest.raises(OSError, match="mine"), manager.pause():
            raise OSError("mine")
        name = manager.add_request(PROMPT, max_new_tokens=8, do_sample=False)
        assert manager.get_result(name).generated_tokens == text_alone(model, PROMPT, max_new_tokens=8)


@pytest.mark.parametrize("kind", ["another dtype", "some rows"])
def test_drafts_are_those_of_the_new_weights(kind: str) -> None:
    """Also what a head has copied: itself in the target's dtype, and rows of the target's lm_head."""
    model, other = tiny_model(), tiny_model(seed=1)
    head = tiny_head(model, **({"draft_vocab_size": 30, "has_lm_head": False} if kind == "some rows" else {}))
    if kind == "another dtype":
        head = head.float()
        assert head.dtype != model.dtype
    with make(model, head) as manager:
        manager.get_result(manager.add_request(PROMPT, max_new_tokens=5))
        drafter = manager.engine.drafting.drafter
        held = drafter.head.layers[0].mlp.up_proj.weight if kind == "another dtype" else drafter._lm_head.rows[0]
        places = held.data_ptr()
        with manager.pause(), torch.no_grad():
            model.load_state_dict(other.state_dict())
            for weight in head.parameters():
                weight.mul_(-1.5)
        manager.get_result(manager.add_request(PROMPT, max_new_tokens=5))
    drafter = manager.engine.drafting.drafter
    if kind == "another dtype":
        held, expected = drafter.head.layers[0].mlp.up_proj.weight, head.layers[0].mlp.up_proj.weight
    else:
        held, expected = drafter._lm_head.rows[0], model.lm_head.weight[head.target_ids]
    assert torch.equal(held, expected.to(held.dtype))
    assert held.data_ptr() == places  # where graphs read it


@pytest.mark.parametrize("stops", [False, True])
def test_a_pause_given_up_before_it_begins(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: the thread goes on, and comes to its end with nothing left undone."""
    model = tiny_model()
    manager = make(model, NgramDraft())
    running, given_up = manager.engine.running, threading.Event()

    @contextmanager
    def leaves_late() -> Any:
        with running():
            yield
        if not given_up.is_set():
            given_up.set()
            manager._loop.pauses._holders.clear()
            if stops:
                manager.stop(block=False)

    monkeypatch.setattr(manager.engine, "running", leaves_late)
    name = manager.add_request(PROMPT, max_new_tokens=60, do_sample=False)
    with manager:
        manager._loop.pauses._holders[0] = 1
        manager._loop.inbox.news.set()
        assert given_up.wait(30)
        assert manager.get_result(name).generated_tokens == text_alone(model, PROMPT, max_new_tokens=60)
    assert_nothing_left(manager)


def test_pauses_that_are_refused() -> None:
    manager = make(tiny_model(), NgramDraft())
    with pytest.raises(RuntimeError, match="not running"), manager.pause():
        raise AssertionError("it has begun")
    found: list[BaseException] = []

    def listen(_: Any) -> None:
        try:
            with manager.pause():
                raise AssertionError("it has begun")
        except RuntimeError as error:
            found.append(error)

    manager.listen(listen)
    with manager:
        manager.add_request(PROMPT, max_new_tokens=3)
        while not found:
            time.sleep(0.01)
        assert "wait for itself" in str(found[0])
        with manager.pause(), pytest.raises(RuntimeError, match="inside a `pause`"):
            manager.stop()


def test_a_manager_that_is_stopped_from_elsewhere() -> None:
    """Its thread ends when the pause does; what asks for one that can never begin is told."""
    model = tiny_model()
    manager = make(model, NgramDraft())
    manager.start()
    name = manager.add_request(PROMPT, max_new_tokens=LONG)
    with manager.pause():
        stopping = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
        stopping.start()
        time.sleep(0.1)
        assert manager.is_running()
    stopping.join(30)
    assert not manager.is_running() and "stopped" in manager.get_result(name).error
    assert_nothing_left(manager)


def test_models_are_checked_when_they_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once while the manager runs, again after a pause, and for every request while it does not run."""
    model, checked, check = tiny_model(), [], draft_refusals._check_keeps_cache
    monkeypatch.setattr(draft_refusals, "_check_keeps_cache", lambda *args: (checked.append(args[1]), check(*args)))
    manager = make(model, noisy_copy(model))
    del checked[:]
    for _ in range(2):
        manager.add_request(PROMPT, max_new_tokens=2)
    assert checked == ["target", "draft"] * 2
    with manager:
        manager.get_result(timeout=60)
        del checked[:]
        for _ in range(3):
            manager.get_result(manager.add_request(OTHER, max_new_tokens=2), timeout=60)
        assert checked == ["target", "draft"]
        with manager.pause():
            model.gradient_checkpointing_enable()
            model.train()
        with pytest.raises(ValueError, match="in training mode with gradient checkpointing"):
            manager.add_request(OTHER, max_new_tokens=2)
        with manager.pause():
            model.eval()
        manager.get_result(manager.add_request(OTHER, max_new_tokens=2), timeout=60)
    assert_nothing_left(manager)
