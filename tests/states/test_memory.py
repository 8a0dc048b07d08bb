"""Memory that states of requests in flight take, and what forwards leave behind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.graphs import install_stand_in
from support.hybrids import hybrid
from support.models import noisy_copy, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.batching import limits
from hf_specdec.batching.limits import Limits
from hf_specdec.batching.memory import bytes_of_scans, bytes_per_request, bytes_per_token
from hf_specdec.cache import TreeCache
from hf_specdec.forwards.node_inputs import causal_chain
from hf_specdec.forwards.outputs import over_trees
from hf_specdec.forwards.tree_forward import TreeForward
from hf_specdec.states import groups, layer_kinds_of, most_bytes_of_reading, recurrences_of


SERVED = ("qwen3_5_text", "kimi_linear", "bamba", "jamba")


@pytest.mark.parametrize("family, by_kernel", [("qwen3_5_text", False), *((one, True) for one in SERVED)])
@pytest.mark.some_cases(2)
def test_states_take_the_memory_that_is_counted(family: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for the most requests that may run at once, in target and draft, and what steps leave pending of them."""
    if by_kernel:
        install_stand_in(monkeypatch, with_kernel=True)
    model, draft = hybrid(family), noisy_copy(hybrid("lfm2"), 0.03)
    manager = model.init_continuous_batching(
        assistant_model=draft, tree="[(0,)]", continuous_batching_config=Limits(max_requests=3, num_blocks=40)
    )
    with manager:
        for name in [manager.add_request([token, 6], max_new_tokens=3) for token in range(5, 10)]:
            assert manager.get_result(name, timeout=60).error is None
        caches = [manager.engine.target.cache, manager.engine.drafting.cache]
    taken = 0
    for cache in caches:
        assert cache.num_states == 3
        for layer in cache.state_layers:
            held = [layer.conv_states[0], layer.recurrent_states[0]]
            for pending in layer.kernel_pending.values():
                held += [pending.conv_inputs, *(pending.kept or ())]
            taken += sum(one.nbytes for one in held if one is not None)
    assert bool(caches[0].state_layers[0].kernel_pending) is by_kernel
    assert 3 * sum(bytes_per_request([model, draft], 3).values()) == taken


class Peak(TorchDispatchMode):
    """Most bytes that tensors of `least` bytes or more have taken at once, of those that were made within it."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.bytes, self.most = least, 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self._count(made.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage.data_ptr(), storage.nbytes()
        if size >= self.least and number not in self._seen:
            self._seen.add(number)
            self.bytes += size
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._free, number, size)

    def _free(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.bytes -= size


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("family", ["kimi_linear", "mamba", "zamba"])
def test_scans_take_the_memory_that_is_counted(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides what is as small as their arguments; three rows have room for two at once."""
    model, nodes, found = hybrid(family), 40, list[int]()
    kind = type(recurrences_of(model)[0])
    score, a_row = kind.score, bytes_of_scans([model], 1, 1, nodes)[model.device]
    monkeypatch.setattr(groups, "MOST_BYTES", 2 * a_row + 1)

    def measured(*args: Any) -> Any:
        with Peak(len(args[1]) * a_row // 6) as peak:
            outputs = score(*args)
        found.append(peak.most)
        return outputs

    monkeypatch.setattr(kind, "score", measured)
    cache = TreeCache(4, rows, model.device, nodes, kinds=layer_kinds_of(model))
    forward = TreeForward(model, cache, None, torch.zeros(rows, dtype=torch.long))
    with over_trees(model), torch.no_grad():
        forward(torch.full((rows, nodes), 5), *causal_chain(nodes, model.device))
    assert max(found) == bytes_of_scans([model], rows, 1, nodes)[model.device] == min(rows, 2) * a_row


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "bamba"])
def test_texts_take_no_more_memory_than_is_counted(family: str) -> None:
    recurrence, rows, tokens, heads, size = recurrences_of(hybrid(family))[0], 2, 256, 8, 64
    query, key, value, wide = (torch.rand(rows, tokens, heads, size) for _ in range(4))
    given = (query, key, value, -wide if family == "kimi_linear" else -wide[..., 0], wide[..., 0])
    if family == "bamba":
        given = (value, wide[..., 0], -torch.rand(heads), key[:, :, :1], query[:, :, :1])
    inputs = recurrence.inputs(*given)
    state = recurrence.first_state(inputs)
    counted = most_bytes_of_reading(recurrence, tuple(state.shape[1:]), rows, rows * tokens)
    with Peak(1 << 12) as peak:
        recurrence.read(state, inputs, torch.ones(rows, tokens, dtype=torch.bool))
    assert counted / 2 < peak.most <= counted


def test_scans_leave_blocks_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("kimi_linear")
    monkeypatch.setattr(limits, "free_memory", lambda device: 1 << 28)
    given = Limits(max_requests=2, memory_share=1.0, chunk_size=8)
    a_block = given.block_size * bytes_per_token([model])[model.device]
    scans = [bytes_of_scans([model], 2, 8, nodes + 1)[model.device] for nodes in (1, 40)]
    blocks = [given.blocks([model], nodes) for nodes in (1, 40)]
    assert scans[0] < scans[1] and abs(blocks[0] - blocks[1] - (scans[1] - scans[0]) / a_block) <= 1


def test_masks_of_a_forward_are_dropped() -> None:
    model, device = tiny_model("llama"), torch.device("cpu")
    cache = TreeCache(model.config.num_hidden_layers, 1, device, 16)
    forward = TreeForward(model, cache, None, torch.zeros(1, dtype=torch.long))
    with over_trees(model), torch.no_grad():
        forward(torch.tensor([[5, 6, 7]]), *causal_chain(3, device))
    assert cache.context is None
