"""What is seldom asked of whole steps: the same as without them, and nothing that hangs or stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_steps import Steps
from support.models import noisy_copy, prompts, tiny_model, with_fewer_positions
from support.parity import IRREGULAR

import hf_specdec
from hf_specdec import graphs
from hf_specdec.generation import engines


GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("end", [-1, [-1, 7], [1000, 7]], ids=str)
@pytest.mark.some_cases(1)
def test_end_tokens_that_are_none(end: Any, steps: Steps) -> None:
    """transformers warns of negative ones, and goes on to the full length."""
    target = tiny_model(dtype=torch.float32)
    draft, call = noisy_copy(target, 0.05), prompts(2, 9) | GREEDY | {"eos_token_id": end}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, assistant_model=draft, tree=IRREGULAR), plain)
    assert 0 < steps.replays <= 20


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool, steps: Steps) -> None:
    """
    A graph would keep the dtypes of one call for others, and read weights that autocast has put away. Keys and values
    are of two dtypes.
    """
    target = tiny_model(dtype=torch.float32)
    draft, call = noisy_copy(target, 0.05), prompts(3, 9, padding=True) | GREEDY
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        text = target.generate(**call, assistant_model=draft, tree=IRREGULAR)
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
        assert (text == target.generate(**call)).float().mean() > 0.7
    assert (steps.captures == 0) is inside


def test_memory_that_is_held_is_lent_again(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine takes of the device's memory is not free any more when the next call asks for it."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    for has_memory in (True, False):
        before = steps.replays
        monkeypatch.setattr(engines, "_has_memory", lambda *size, has_memory=has_memory: has_memory)
        target.generate(**prompts(1, 9), **GREEDY, assistant_model=draft, tree=IRREGULAR)
        assert steps.replays > before
    before = steps.replays
    text = target.generate(**prompts(2, 9), **GREEDY, assistant_model=draft, tree=IRREGULAR)
    assert torch.equal(text, target.generate(**prompts(2, 9), **GREEDY)) and steps.replays == before


def test_texts_longer_than_the_draft_knows(steps: Steps) -> None:
    """Nodes past the last position that a draft model knows do not count, as in the host's steps."""
    target = tiny_model("gpt2", dtype=torch.float32)
    draft, call = with_fewer_positions(noisy_copy(target, 0.02), 20), prompts(2, 9, padding=True) | GREEDY
    found = []
    for cuda_graphs in (False, True):
        config = hf_specdec.SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
        text = target.generate(**call, assistant_model=draft, speculative_config=config)
        metrics = hf_specdec.last_metrics()
        found.append((text.tolist(), metrics.accepted_per_step, metrics.num_draft_tokens))
    assert steps.replays > 0 and found[0] == found[1]
    assert found[1][0] == target.generate(**call).tolist()


def test_the_next_borrower_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of its own, for what the last one left under way."""
    waited: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.record_event = lambda: name
            self.wait_event = waited.append

    cuda, store = torch.device("cuda"), graphs.GraphStore(32)
    for name in ("first", "second"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, name=name: Stream(name))
        store.take(cuda)
        store.leave(cuda)
    assert waited == ["first"]


@pytest.mark.parametrize(("reserved", "fits"), [(2**30, False), (2**34, True)])
def test_memory_that_torch_keeps_for_reuse_is_free(reserved: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"mem_get_info": (0, 2**35), "memory_reserved": reserved, "memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    model = tiny_model(dtype=torch.float32)
    assert graphs.stores.bytes_per_token(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert graphs.stores._has_memory(model, 1, 512) is fits
