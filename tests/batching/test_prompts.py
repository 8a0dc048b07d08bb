"""Prompts that are read by graphs of a few widths, with a stand-in for CUDA's. `test_cuda.py` runs real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import accepted, assert_nothing_left, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import FAMILIES, noisy_copy, tiny_model
from support.parity import IRREGULAR

from hf_specdec import MedusaConfig, MedusaHeads, NgramDraft, SpeculativeConfig
from hf_specdec.attention import supports_switching
from hf_specdec.batching.graphs import PagedForward, PagedGraphs
from hf_specdec.batching.target import InFlightTarget
from hf_specdec.prompts import next_piece


WIDTHS = (4, 16)
LENGTHS = (3, 4, 5, 16, 17, 31, 40, 12, 13, 1)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Narrow graphs, for prompts of tests."""
    monkeypatch.setattr(PagedGraphs, "prompt_widths", WIDTHS)
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chunks that are read."""
    chunks: list[Any] = []
    original = InFlightTarget.read

    def noting(self: InFlightTarget, chunk: Any) -> torch.Tensor:
        chunks.append(chunk)
        return original(self, chunk)

    monkeypatch.setattr(InFlightTarget, "read", noting)
    return chunks


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, read: list[Any]) -> None:
    """Texts are those of `generate`, whatever prompts are read together."""
    model = tiny_model(family, dtype=torch.float32)
    prompts = ragged_prompts(LENGTHS)
    outputs = model.generate_batch(
        prompts,
        assistant_model=noisy_copy(model, 0.05),
        tree=IRREGULAR,
        max_new_tokens=12,
        continuous_batching_config=limits(max_batch_tokens=64),
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(model, prompt, max_new_tokens=12)
    if supports_switching(model) and model.config._attn_implementation == "sdpa":
        assert {chunk.width for chunk in read} == {None, *WIDTHS}
        assert {len(chunk.requests) for chunk in read if chunk.width} > {1}
        assert any(count < (chunk.width or 0) for chunk in read for count in chunk.counts)
    assert sum(sum(chunk.counts) for chunk in read) == sum(LENGTHS)


@pytest.mark.parametrize("kind", ["head", "medusa", "ngram"])
@pytest.mark.parametrize("num_blocks", [600, 30])
def test_drafters(kind: str, num_blocks: int) -> None:
    """
    A head sees the features of every token once: it accepts as much as without graphs. (Where blocks run out, it
    depends on who has them whether there is room for a tree.)
    """
    target, prompts = trained_target(), trained_prompts()["prompts"]
    sizes = target.config.hidden_size, target.config.vocab_size
    medusa = MedusaHeads(MedusaConfig(hidden_size=sizes[0], vocab_size=sizes[1], medusa_num_heads=3)).eval()
    assistant = {"head": trained_head, "ngram": NgramDraft, "medusa": lambda: medusa}[kind]()
    found = []
    for cuda_graphs in (False, "auto"):
        config = SpeculativeConfig(tree="[(0,), (0, 0), (0, 0, 0)]", cuda_graphs=cuda_graphs)
        outputs = target.generate_batch(
            prompts,
            assistant_model=assistant,
            speculative_config=config,
            max_new_tokens=40,
            continuous_batching_config=limits(num_blocks, max_batch_tokens=64),
        )
        of_draft = accepted if num_blocks > 30 else lambda output: None
        found.append([(output.generated_tokens, of_draft(output)) for output in outputs.values()])
    assert found[0] == found[1]


def test_the_graphs_are_used_again(stand_in: StandIn, read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of other lengths need no other graphs; none is captured for a prompt's own length."""
    captured: list[tuple] = []
    start = PagedForward.__init__

    def noting(self: Any, forward: Any, nodes: Any, context: Any, size: tuple, record: Any) -> None:
        captured.append(size[:2])
        start(self, forward, nodes, context, size, record)

    monkeypatch.setattr(PagedForward, "__init__", noting)
    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits(max_batch_tokens=64)
    )
    with manager:
        for length in range(20, 50):
            name = manager.add_request(list(range(3, 3 + length)), max_new_tokens=1)
            assert manager.get_result(name, timeout=60).error is None
    assert sorted(captured) == [(1, 4), (1, 16)]
    assert stand_in.replays >= len(read) - 4
    assert_nothing_left(manager)


def test_prompts_that_busy_the_device_go_without(read: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.batching.manager.busy_at", lambda num_parameters: 30)
    target = tiny_model(dtype=torch.float32)
    outputs = target.generate_batch(
        ragged_prompts((40, 20)),
        assistant_model=NgramDraft(),
        tree="[(0,)]",
        max_new_tokens=2,
        continuous_batching_config=limits(max_batch_tokens=40),
    )
    assert all(output.error is None for output in outputs.values())
    assert [(chunk.width, chunk.counts) for chunk in read] == [(None, [40]), (16, [16]), (4, [4])]


def test_pieces() -> None:
    """They make up every text, from anywhere in it; each is within the text, and mostly unread."""
    widths = [4, 16, 64]
    for length in range(1, 200):
        for first in {0, min(3, length - 1), min(17, length - 1), length - 1}:
            unread = length - first
            while unread > 0:
                width, count = next_piece(length, unread, widths)
                if width is None:
                    assert count == unread and length < widths[0]
                else:
                    assert count <= width <= length - (unread - count)
                    assert width == widths[0] or 4 * count > 3 * width
                unread -= count
            assert unread == 0


def test_a_wrong_chain_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend to those behind them change texts."""

    def all_see_all(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1, length, length, dtype=torch.bool), torch.arange(length)[None]

    monkeypatch.setattr("hf_specdec.batching.target.causal_chain", all_see_all)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((20, 21, 22, 23))
    outputs = target.generate_batch(
        prompts,
        assistant_model=NgramDraft(),
        tree="[(0,)]",
        max_new_tokens=8,
        continuous_batching_config=limits(max_batch_tokens=64),
    )
    texts = [text_alone(target, prompt, max_new_tokens=8) for prompt in prompts]
    assert [output.generated_tokens for output in outputs.values()] != texts
