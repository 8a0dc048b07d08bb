"""Branches of captured work, and the streams of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.models import tiny_model

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
    """The branch reads what was there at `begin`; what follows it sees its results, in every replay."""
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
    fails = [False, True, False, False]  # each capture follows a run

    def run() -> list[torch.Tensor]:
        branch, one = Branch(CUDA), torch.ones(4, device=CUDA)
        branch.begin()
        with branch.running():
            two = one + 1
            if fails.pop(0):
                raise KeyError("on purpose")
        return [two * one]

    with pytest.raises(KeyError, match="on purpose"):
        record_cuda_graph(run, CUDA)
    replay, (product,) = record_cuda_graph(run, CUDA)
    replay()
    assert product.tolist() == [2.0] * 4
