"""Several MTP modules over blocks that texts share: every draft is that of the text from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, manager_of, run_together, text_alone
from support.device_steps import install

from hf_specdec import SpeculativeConfig
from hf_specdec.batching import Limits
from hf_specdec.batching import limits as limits_module
from hf_specdec.cache.block_ends import BlockEnds
from hf_specdec.cache.blocks import NUM_RESERVED
from hf_specdec.drafters.several_mtp import SeveralMtpDrafter

from .test_drafting import KNOWN, TREE, assert_as_from_scratch, recording, the_pair


@pytest.mark.parametrize("family", [family for family in ("glm4_moe", "mimo_v2_flash") if family in KNOWN])
@pytest.mark.some_cases(1)
def test_turns_and_a_shared_beginning(family: str) -> None:
    """Texts that part behind a block, at a token that modules read in its last slots; and turns of a dialogue."""
    target, head, _ = the_pair(family)
    drafter = recording(head)
    manager = manager_of(target, drafter, tree=TREE, continuous_batching_config=limits(max_batch_tokens=8))
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(3, 60, (14,), generator=generator).tolist()
    dialogues = [beginning + [5, 6, 7], beginning[:13] + [9], beginning[:12] + [8, 3, 4, 4]]
    for turn in range(2):
        own: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        requests = [manager._admission.request(str(n), one, own) for n, one in enumerate(dialogues)]
        for dialogue, text in zip(dialogues, run_together(manager, requests), strict=True):
            assert text == text_alone(target, dialogue, max_new_tokens=8)
            dialogue += text + [11 + turn, 12]
    assert manager.state.num_prefix_hits >= 2 * 8 + 3 * 12
    assert_as_from_scratch(family, drafter)
    assert_nothing_left(manager)


@pytest.mark.parametrize("wrong", ["ends", "ahead"])
@pytest.mark.some_cases(1)
def test_blocks_without_what_is_behind_them_would_be_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "ends":
        monkeypatch.setattr(BlockEnds, "write", lambda *_: None)
    else:
        monkeypatch.setattr(SeveralMtpDrafter, "tokens_ahead", 1)
    with pytest.raises(AssertionError):
        test_turns_and_a_shared_beginning("glm4_moe")


def written_ends(cuda_graphs: bool, limit: int | None) -> dict[bytes, torch.Tensor]:
    """What is kept for the ends of the blocks of two turns, by the keys of the blocks."""
    target, head, _ = the_pair("glm4_moe")
    config = SpeculativeConfig(tree=TREE, cuda_graphs=cuda_graphs, disable_by_batch_size=limit)
    own = limits(max_batch_tokens=8)
    manager = manager_of(target, head, tree=None, speculative_config=config, continuous_batching_config=own)
    dialogues = [torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(0)) for count in (17, 9)]
    texts = [dialogue.tolist() for dialogue in dialogues]
    for _ in range(2):
        own = {"max_new_tokens": 12, "do_sample": False}
        requests = [manager._admission.request(str(n), text, own) for n, text in enumerate(texts)]
        texts = [old + new + [5] for old, new in zip(texts, run_together(manager, requests), strict=True)]
    assert manager.state.num_prefix_hits > 16
    pool, ends = manager.engine.pool, manager.engine.drafting.block_ends
    return {key: ends.held[block] for key, block in pool._blocks.items() if block in pool.drafted}


@pytest.mark.parametrize("limit", [None, pytest.param(1, marks=pytest.mark.slow)], ids=["drafting", "waiting"])
def test_captured_steps_write_the_ends_of_blocks(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of prompts' chunks, of drafts, and of features that have waited: as the host does."""
    pytest.importorskip("triton", reason="the kernels need triton")
    expected = written_ends(False, limit)
    steps = install(monkeypatch, with_kernel=True)
    found = written_ends(True, limit)
    assert steps.replays > 0 and len(found.keys() & expected.keys()) >= 12
    for key in found.keys() & expected.keys():
        torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shares", [True, False])
def test_memory(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that target and modules keep fills the memory, to the last block."""
    target, head, _ = the_pair("glm4_moe")
    memory = 1_000_000
    monkeypatch.setattr(limits_module, "free_memory", lambda device: memory)
    given = Limits(block_size=4, memory_share=1.0, max_requests=3, shares_prefixes=shares)
    manager = manager_of(target, head, tree=TREE, continuous_batching_config=given)
    run_together(manager, [manager._admission.request("one", [5, 6, 7], {"max_new_tokens": 3})])
    drafting = manager.engine.drafting
    layers = [layer for cache in (manager.engine.target.cache, drafting.cache) for layer in cache.layers]
    used = sum(states.nbytes for layer in layers for states in layer.states)
    used += drafting.block_ends.held.nbytes if shares else 0
    a_block = used // (manager.engine.pool.num_blocks + NUM_RESERVED)
    used += sum(store[2:].nbytes for store in (drafting.features.held, drafting.outputs))  # two are nobody's
    assert (drafting.block_ends is not None) == shares
    assert used <= memory < used + a_block
