"""Branches of captured work, and the streams of threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.batches import limits
from support.goldens import trained_target
from support.graphs import install_stand_in
from support.heads import trained_head
from support.models import tiny_model

from hf_specdec.drafters.features import CapturedFeatures
from hf_specdec.engine.captured import prompt_step
from hf_specdec.forwards.features import watch_features
from hf_specdec.graphs import Branch, GraphPool, record_cuda_graph
from hf_specdec.graphs.streams import own_stream


CUDA = torch.device("cuda")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_on_a_cpu_a_branch_runs_where_it_stands() -> None:
    branch, done = Branch(torch.device("cpu")), []
    branch.begin()
    with branch.running():
        done.append("branch")
    assert done == ["branch"]


def test_recorded_features_tell_of_each_boundary() -> None:
    target, told = tiny_model(), []
    tokens = torch.tensor([[5, 6, 7]])
    with watch_features(target, [1, 2]) as features, torch.no_grad():
        with features.recorded(on_add=lambda: told.append(len(told))) as states:
            target(tokens)
            assert [len(of_boundary) for of_boundary in states] == [1, 1] and told == [0, 1]
        target(tokens)
        assert told == [0, 1]  # only inside the context


def test_heads_read_prompts_in_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at the last of the boundaries whose hidden states the head reads."""
    pytest.importorskip("triton", reason="the kernels need triton")
    install_stand_in(monkeypatch, with_kernel=True)
    told: list[str] = []

    class Noted(Branch):
        def begin(self) -> None:
            told.append("begin")
            super().begin()

        @contextmanager
        def running(self) -> Iterator[None]:
            told.append("running")
            with super().running():
                yield
            told.append("done")

    read = CapturedFeatures.read

    def noted(self: CapturedFeatures, *args: Any, **options: Any) -> Any:
        told.append("read")
        return read(self, *args, **options)

    monkeypatch.setattr(prompt_step, "Branch", Noted)
    monkeypatch.setattr(CapturedFeatures, "read", noted)
    target, head = (copy.deepcopy(one).float() for one in (trained_target(), trained_head()))
    manager = target.init_continuous_batching(
        assistant_model=head, tree="[(0,)]", continuous_batching_config=limits(max_batch_tokens=512)
    )
    with manager:
        for _ in range(3):  # captured when it comes for the second time
            assert manager.get_result(manager.add_request([5] * 200, max_new_tokens=2), timeout=60).error is None
    boundaries = len(head.config.aux_boundaries(target.config.num_hidden_layers))
    assert boundaries > 1
    assert "done" in told
    while "done" in told:
        end = told.index("done") + 1
        assert told[:end][-boundaries - 3 :] == [*["begin"] * boundaries, "running", "read", "done"]
        del told[:end]


# ----------------------------------------------------------------------------------------------------------- on a GPU


@NEEDS_CUDA
def test_each_thread_keeps_its_streams() -> None:
    def streams() -> list[torch.cuda.Stream]:
        return [own_stream(CUDA, purpose) for purpose in ("capture", "branch", "capture")]

    capture, branch, again = streams()
    assert capture is again and capture != branch
    with ThreadPoolExecutor(1) as worker:
        assert capture not in worker.submit(streams).result(10)


@NEEDS_CUDA
@pytest.mark.parametrize("begins", [True, False])
def test_replays_with_a_branch(begins: bool) -> None:
    """What follows the branch sees its results, in every replay."""
    inputs, kept = torch.zeros(512, 512, device=CUDA), torch.zeros(512, 512, device=CUDA)

    def run() -> list[torch.Tensor]:
        branch, early = Branch(CUDA), inputs + 1
        if begins:
            branch.begin()
        late = early
        for _ in range(20):
            late = (late @ late).clamp(-2, 2)
        with branch.running():
            scratch = early
            for _ in range(10):
                scratch = (scratch * 2 - scratch.mean()).tanh()
            kept.copy_(scratch)
        del early, scratch
        return [torch.ones_like(late) + late + kept]

    pool = GraphPool()
    replays = [record_cuda_graph(run, CUDA, pool) for _ in range(3)]
    for seed in range(6):
        inputs.copy_(torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)))
        expected, seen = run()[0].clone(), kept.clone()
        kept.zero_()
        replay, (total,) = replays[seed % 3]
        replay()
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(kept, seen)


@NEEDS_CUDA
def test_a_failed_branch_can_be_captured_again() -> None:
    fails = [True, False]

    def run() -> list[torch.Tensor]:
        branch, one = Branch(CUDA), torch.ones(4, device=CUDA)
        branch.begin()
        with branch.running():
            two = one + 1
            if torch.cuda.is_current_stream_capturing() and fails.pop(0):
                raise KeyError("on purpose")
        return [two * one]

    with pytest.raises(KeyError, match="on purpose"):
        record_cuda_graph(run, CUDA)
    replay, (product,) = record_cuda_graph(run, CUDA)
    replay()
    assert product.tolist() == [2.0] * 4


@NEEDS_CUDA
def test_what_cuda_gives_up_leaves_no_capture_behind() -> None:
    """Draws, graphs captured before, and the memory that torch has cached serve everyone again."""
    numbers = torch.zeros(100, device=CUDA)
    replay, _ = record_cuda_graph(lambda: [numbers.copy_(torch.rand(100, device=CUDA))], CUDA)

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        replay()
        return [numbers.clone(), torch.rand(100, device=CUDA)]

    before = drawn()
    for pool in (None, GraphPool()):
        with pytest.raises(RuntimeError, match="captur"):
            record_cuda_graph(lambda: [torch.rand(100, device=CUDA) * numbers.sum().item()], CUDA, pool)
        for seen, expected in zip(drawn(), before, strict=True):
            assert torch.equal(seen, expected)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for share in (0.6, 0.8):  # for the second block torch has to free the first, which it has cached
        torch.empty(int(free * share), dtype=torch.uint8, device=CUDA)
    torch.cuda.empty_cache()
