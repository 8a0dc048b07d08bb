"""Memory that states of requests in flight take, and what forwards leave behind."""

from __future__ import annotations

import pytest
import torch
from support.graphs import install_stand_in
from support.hybrids import hybrid
from support.models import noisy_copy, tiny_model

from hf_specdec.batching.limits import Limits
from hf_specdec.batching.memory import bytes_per_request
from hf_specdec.cache import TreeCache
from hf_specdec.forwards.node_inputs import causal_chain
from hf_specdec.forwards.outputs import over_trees
from hf_specdec.forwards.tree_forward import TreeForward


SERVED = ("qwen3_5_text", "kimi_linear", "bamba", "jamba")


@pytest.mark.parametrize("family, by_kernel", [("qwen3_5_text", False), *((one, True) for one in SERVED)])
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


def test_masks_of_a_forward_are_dropped() -> None:
    model, device = tiny_model("llama"), torch.device("cpu")
    cache = TreeCache(model.config.num_hidden_layers, 1, device, 16)
    forward = TreeForward(model, cache, None, torch.zeros(1, dtype=torch.long))
    with over_trees(model), torch.no_grad():
        forward(torch.tensor([[5, 6, 7]]), *causal_chain(3, device))
    assert cache.context is None
