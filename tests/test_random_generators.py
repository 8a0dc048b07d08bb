"""Threads that share the random generator of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.batches import limits
from support.graphs import make_up_cuda
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR

import hf_specdec
from hf_specdec import graphs, random_generators
from hf_specdec.drafters.growth import draw_without_replacement
from hf_specdec.verification import choose, choosing, rejection


CUDA = torch.device("cuda")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def in_another_thread(run: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Runs a function beside the block; it is to return soon after the event is set, as it is at the block's end."""
    ends = threading.Event()
    with ThreadPoolExecutor(1) as worker:
        future = worker.submit(run, ends)
        try:
            yield ends
        finally:
            ends.set()
            future.result(60)


# ------------------------------------------------------------------------------------------------------ on any device


def test_draws_wait_for_a_capture() -> None:
    holds, order = threading.Event(), []

    def capture(ends: threading.Event) -> None:
        with (
            random_generators.generator_held(CUDA),
            random_generators.generator_held(CUDA),
        ):  # a captured function draws itself
            holds.set()
            ends.wait(0.2)
            order.append("captured")

    with in_another_thread(capture):
        assert holds.wait(10)
        with random_generators.generator_held(torch.device("cpu")):  # nothing is captured on a CPU
            order.append("drawn on the CPU")
        with random_generators.generator_held(CUDA):
            order.append("drawn")
    assert order == ["drawn on the CPU", "captured", "drawn"]


@pytest.mark.parametrize("fails", [False, True])
def test_draws_undone(fails: bool) -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    for context, undone in ((random_generators.draws_undone, True), (random_generators.draws_undone_on_error, fails)):
        torch.manual_seed(0)
        try:
            with context(torch.device("cpu")):
                torch.rand(4)
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert torch.equal(torch.rand(4), expected) == undone


def test_draws_of_several_devices_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft may draw on a device of its own."""
    cpu, other = torch.device("cpu"), torch.device("cuda", 1)
    numbers = {cpu: 0, CUDA: 0, other: 0}
    monkeypatch.setattr(random_generators, "_state", numbers.__getitem__)
    monkeypatch.setattr(random_generators, "_set_state", lambda state, device: numbers.__setitem__(device, state))
    with pytest.raises(KeyboardInterrupt), random_generators.draws_undone_on_error(CUDA, other):
        numbers.update({cpu: 3, CUDA: 4, other: 5})
        raise KeyboardInterrupt
    assert numbers == {cpu: 0, CUDA: 0, other: 0}


def test_draws_are_undone_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, has_begun = [0], threading.Event()
    monkeypatch.setattr(random_generators, "_state", lambda device: numbers[0])
    monkeypatch.setattr(random_generators, "_set_state", lambda state, device: numbers.__setitem__(0, state))

    def capture(ends: threading.Event) -> None:
        with random_generators.draws_undone(CUDA):
            numbers[0] += 5
            has_begun.set()
            ends.wait(0.2)

    with in_another_thread(capture):
        assert has_begun.wait(10)
        with random_generators.generator_held(CUDA):
            numbers[0] += 1
    assert numbers == [1]


def test_every_draw_of_a_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call draws by steps of the host, it draws while it holds the generator."""
    inside = 0

    @contextmanager
    def generator_held(device: torch.device) -> Iterator[None]:
        nonlocal inside
        inside += 1
        try:
            yield
        finally:
            inside -= 1

    draws: list[tuple[str, bool]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Attention has the tag as well, for its dropout.
            if torch.Tag.nondeterministic_seeded in function.tags and "attention" not in str(function):
                draws.append((str(function), inside > 0))
            return function(*args, **(kwargs or {}))

    for module in (choosing, rejection, hf_specdec.drafters.growth.drawing):
        monkeypatch.setattr(module, "generator_held", generator_held)
    target = tiny_model()
    draft = noisy_copy(target, 0.3)
    inputs, options = prompts(2, 9), {"do_sample": True, "max_new_tokens": 12, "assistant_model": draft}
    with Watch():
        for verification in ("rejection", "target"):
            config = hf_specdec.SpeculativeConfig(tree=IRREGULAR, verification=verification)
            target.generate(**inputs, **options, speculative_config=config)
    assert len(draws) > 20 and all(is_inside for _, is_inside in draws), set(draws)


def test_replays_wait_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch's graph that fails as torch does."""
    is_captured, begun = threading.Event(), threading.Event()

    class Graph:
        def capture_begin(self, *args: Any) -> None:
            is_captured.set()

        def capture_end(self) -> None:
            is_captured.clear()

        def replay(self) -> None:
            if is_captured.is_set():
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    make_up_cuda(monkeypatch, Graph)
    replay, _ = graphs.record_cuda_graph(list, CUDA)
    replay()

    def capture(ends: threading.Event) -> None:
        def run() -> list[torch.Tensor]:
            if is_captured.is_set():  # not in the run before the capture
                begun.set()
                ends.wait(0.2)
            return []

        graphs.record_cuda_graph(run, CUDA)

    with in_another_thread(capture):
        assert begun.wait(10)
        replay()


# ----------------------------------------------------------------------------------------------------------- on a GPU


@NEEDS_CUDA
def test_draws_and_replays_beside_captures() -> None:
    numbers = torch.zeros(1000, device=CUDA)
    record = graphs.record_cuda_graph
    replay, _ = record(lambda: [numbers.copy_(torch.rand(1000, device=CUDA))], CUDA)
    scores = torch.zeros(4, 50, device=CUDA)
    captures = 0

    def capture(ends: threading.Event) -> None:
        nonlocal captures
        while not ends.is_set():
            record(lambda: [torch.rand(1000, device=CUDA).sort().values.cumsum(0) for _ in range(50)], CUDA)
            captures += 1

    with in_another_thread(capture):
        while captures < 20:
            replay()
            choose(scores, do_sample=True)
            draw_without_replacement(scores, 3)
    torch.cuda.synchronize()
    assert numbers.unique().numel() > 900


@NEEDS_CUDA
def test_two_managers() -> None:
    """One captures steps of new sizes while the other samples, and both go on."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05).cuda()
    target = target.cuda()
    config = hf_specdec.SpeculativeConfig(tree=IRREGULAR)
    call = {"assistant_model": draft, "speculative_config": config, "continuous_batching_config": limits(2000)}
    with target.init_continuous_batching(**call) as first, target.init_continuous_batching(**call) as second:

        def serve(ends: threading.Event) -> None:
            while not ends.is_set():
                name = second.add_request([5, 6, 7], max_new_tokens=30, eos_token_id=-1, do_sample=True)
                output = second.get_result(name, timeout=60)
                assert output is not None and output.error is None

        with in_another_thread(serve):
            for count in (1, 2, 3, 5, 9, 17, 33):  # every size has graphs of its own
                for do_sample in (False, True):
                    names = first.add_requests(
                        [[5, 6, 7, 8]] * count, max_new_tokens=30, eos_token_id=-1, do_sample=do_sample
                    )
                    outputs = [first.get_result(name, timeout=60) for name in names]
                    assert all(output is not None and output.error is None for output in outputs)
        assert first.is_running() and second.is_running()
