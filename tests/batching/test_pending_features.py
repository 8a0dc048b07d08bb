"""Target features that wait for an EAGLE head: how many may wait, and when the head reads them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from support.batches import limits, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import install_stand_in
from support.heads import trained_head

from hf_specdec import SpeculativeConfig
from hf_specdec.batching.memory import bytes_per_request
from hf_specdec.cache.pending_features import PendingFeatures
from hf_specdec.engine.captured import StepRunner, stored
from hf_specdec.engine.captured.step import InFlightStep


@pytest.mark.parametrize(
    "num_requests, num_bytes, capacity",
    [(4, 100, 256), (64, 2 * 3 * 576, 256), (256, 2 * 3 * 576, 256), (256, 2 * 3 * 4096, 64), (4096, 10**6, 64)],
)
def test_more_wait_where_they_take_little_memory(num_requests: int, num_bytes: int, capacity: int) -> None:
    assert PendingFeatures.capacity_for(num_requests, num_bytes) == capacity


@pytest.mark.parametrize("most_bytes", [2**30, 0], ids=["large", "small"])
def test_memory_is_counted_as_it_is_taken(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(PendingFeatures, "MOST_BYTES", most_bytes)
    target, head = (copy.deepcopy(one).float() for one in (trained_target(), trained_head()))
    manager = target.init_continuous_batching(
        assistant_model=head, tree="[(0,)]", continuous_batching_config=limits(max_requests_per_batch=3)
    )
    with manager:
        assert manager.get_result(manager.add_request([5, 6], max_new_tokens=2), timeout=60).error is None
        store = manager.engine.drafting.features
    assert store is not None
    taken = store.held[0].numel() * store.held.element_size()
    assert set(bytes_per_request([target, head], 3).values()) == {taken}


def test_dropped_steps_leave_features_that_they_have_not_read() -> None:
    """A row that is read has new features from its first slot on, another one after those that wait."""
    store = PendingFeatures(2, 1, torch.device("cpu"), torch.float32, 64)
    drafted, plain = requests = [object(), object()]
    for request in requests:
        store.put([request], torch.ones(1, 5, 1), [5])
        store.held[store.place(request), 5:7] = torch.nan
    steps = StepRunner.__new__(StepRunner)
    steps._drafting = SimpleNamespace(features=store)
    steps._drop_features([SimpleNamespace(requests=requests, rows=[0, 1], drafted=[0], reading=[])])
    assert not store.of([drafted], 64).any()
    assert store.of([plain], 64).sum() == 5


@pytest.mark.slow
def test_reads_are_as_wide_as_they_need_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full place is read whole, while speculation is off; few features are read at the least width."""
    pytest.importorskip("triton", reason="the kernels need triton")
    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(PendingFeatures, "LEAST_CAPACITY", 16)
    monkeypatch.setattr(PendingFeatures, "MOST_CAPACITY", 32)
    monkeypatch.setattr(stored, "PATIENCE", 0)  # no larger graph stands in
    reads: list[tuple[int, int]] = []
    launch = InFlightStep.launch

    def noted(self: InFlightStep) -> None:
        if self.kind.reads:
            reads.append((self.rows.size.lag, int(self.rows.counts.max())))
        launch(self)

    monkeypatch.setattr(InFlightStep, "launch", noted)
    target, head = (copy.deepcopy(one).float() for one in (trained_target(), trained_head()))
    prompts = [prompt[:8] for prompt in trained_prompts()["prompts"][:3]]
    manager = target.init_continuous_batching(
        assistant_model=head,
        speculative_config=SpeculativeConfig(tree="[(0,),(0,0)]", disable_by_batch_size=1),
        continuous_batching_config=limits(max_requests_per_batch=3),
    )
    lengths = [60, 44, 10]
    with manager:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        for _ in lengths:
            output = manager.get_result(timeout=120)
            assert output.generated_tokens == text_alone(
                target, output.prompt_ids, max_new_tokens=len(output.generated_tokens)
            )
    # The places fill once; when one request is left, it speculates after the features since then have been read.
    assert reads == [(32, 32), (16, reads[1][1])] and 2 < reads[1][1] <= 16
    assert manager.state.speculation.num_drafts > 0
