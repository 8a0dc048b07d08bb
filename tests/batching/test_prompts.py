"""Prompts that are read by graphs of a few widths, with a stand-in for CUDA's. `test_cuda.py` runs real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import accepted, assert_nothing_left, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import tiny_head, trained_head
from support.models import FAMILIES, noisy_copy, tiny_model
from support.parity import IRREGULAR

from hf_specdec import MedusaConfig, MedusaHeads, NgramDraft, SpeculativeConfig
from hf_specdec.attention import supports_switching
from hf_specdec.engine import prompt_reading
from hf_specdec.engine.captured.prompt_step import PromptStep
from hf_specdec.engine.captured.prompts import DevicePrompts
from hf_specdec.engine.engine import Engine
from hf_specdec.engine.target import InFlightTarget
from hf_specdec.forwards.chunks import next_chunk, padded_chunk
from hf_specdec.graphs.paged import PagedGraphs
from hf_specdec.graphs.paged_forward import PagedForward


WIDTHS = (4, 16)
LENGTHS = (3, 4, 5, 16, 17, 31, 40, 12, 13, 1)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Narrow graphs, for prompts of tests."""
    monkeypatch.setattr(PagedGraphs, "prompt_widths", WIDTHS)
    return install_stand_in(monkeypatch, with_kernel=True)


class Read(list):
    """The chunks that are read; those that the device has read as a whole are `whole`, too."""

    def __init__(self) -> None:
        self.whole: list[Any] = []


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    chunks, by_host, by_device = Read(), InFlightTarget.read, DevicePrompts.launch

    def noting(self: InFlightTarget, chunk: Any) -> torch.Tensor:
        chunks.append(chunk)
        return by_host(self, chunk)

    def noting_whole(self: DevicePrompts, chunk: Any, *args: Any) -> Any:
        report = by_device(self, chunk, *args)
        if report is not None:
            chunks.append(chunk)
            chunks.whole.append(chunk)
        return report

    monkeypatch.setattr(InFlightTarget, "read", noting)
    monkeypatch.setattr(DevicePrompts, "launch", noting_whole)
    return chunks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(2)
def test_families(family: str, read: Read) -> None:
    """Texts are those of `generate`, whatever prompts are read together."""
    model = tiny_model(family, dtype=torch.float32)
    prompts = ragged_prompts(LENGTHS)
    outputs = model.generate_batch(
        prompts,
        assistant_model=noisy_copy(model, 0.05),
        tree=IRREGULAR,
        max_new_tokens=8,
        continuous_batching_config=limits(max_batch_tokens=64),
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(model, prompt, max_new_tokens=8)
    if supports_switching(model) and model.config._attn_implementation == "sdpa":
        assert {chunk.width for chunk in read} - {None} == set(WIDTHS)
        assert {len(chunk.requests) for chunk in read if chunk.width} > {1}
        assert any(count < (chunk.width or 0) for chunk in read for count in chunk.counts)
        assert len(read.whole) > len(read) / 4
    assert sum(sum(chunk.counts) for chunk in read) == sum(LENGTHS)


@pytest.mark.any_version
@pytest.mark.parametrize(
    "kind, num_blocks",
    [
        ("head", 600),
        ("head", 30),
        ("medusa", 600),
        ("ngram", 30),
        pytest.param("medusa", 30, marks=pytest.mark.slow),
        pytest.param("ngram", 600, marks=pytest.mark.slow),
    ],
)
@pytest.mark.some_cases(1)
def test_drafters(kind: str, num_blocks: int, read: Read) -> None:
    """
    A head sees the features of every token once: it accepts as much as without graphs. (Where blocks run out, it
    depends on who has them whether there is room for a tree.)
    """
    if kind == "head":
        target, prompts = trained_target(), trained_prompts()["prompts"][:8]
    else:  # as many tokens, in fewer layers
        target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((24, 24, 24, 57, 31, 9, 12, 12))
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
            max_new_tokens=14,
            continuous_batching_config=limits(num_blocks, max_batch_tokens=64),
        )
        of_draft = accepted if num_blocks > 30 else lambda output: None
        found.append([(output.generated_tokens, of_draft(output)) for output in outputs.values()])
    assert found[0] == found[1]
    assert bool(read.whole) == (kind != "medusa")  # which watch the target, and wait nowhere


@pytest.mark.any_version
@pytest.mark.parametrize("kind", ["head", "ngram"])
def test_the_graphs_are_used_again(kind: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of other lengths need no other graphs; none is captured for a prompt's own length."""
    captured: list[tuple[int, int]] = []
    capture = PromptStep.capture

    def noting(self: PromptStep, *args: Any) -> None:
        captured.append((self.rows.size.rows, self.rows.size.lag - 1))
        capture(self, *args)

    monkeypatch.setattr(PromptStep, "capture", noting)
    monkeypatch.setattr(PagedForward, "__init__", nothing_else)
    target = tiny_model(dtype=torch.float32)
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft() if kind == "ngram" else tiny_head(target),
        tree="[(0,)]",
        continuous_batching_config=limits(max_batch_tokens=64, allow_block_sharing=False),
    )
    with manager:
        for length in range(20, 50, 3):
            name = manager.add_request(list(range(3, 3 + length)), max_new_tokens=1)
            assert manager.get_result(name, timeout=60).error is None
    assert sorted(captured) == [(1, 4), (1, 16)]
    assert len(read.whole) == len(read) - 2
    assert_nothing_left(manager)


def nothing_else(self: Any, *args: Any) -> None:
    raise AssertionError("a forward was captured besides the pieces that are read as a whole")


# ------------------------------------------------------------------------------------------- as a whole on the device


@pytest.mark.slow
@pytest.mark.any_version
def test_first_tokens_are_drawn_as_the_host_would(read: Read) -> None:
    """With a seed they are the same; greedy requests, and those that are not drafted for, are beside them."""
    target, texts = trained_target(), []
    prompts = trained_prompts()["prompts"][:8]
    for cuda_graphs in (False, "auto"):
        config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
        with target.init_continuous_batching(
            assistant_model=trained_head(), speculative_config=config, continuous_batching_config=limits(600)
        ) as manager:
            for _ in range(3):  # so that the device reads them
                names = [
                    manager.add_request(
                        prompt,
                        max_new_tokens=3,
                        speculate=number % 3 > 0,
                        **({"do_sample": True, "temperature": 3.0, "top_k": 9, "seed": number} if number % 2 else {}),
                    )
                    for number, prompt in enumerate(prompts)
                ]
                outputs = [manager.get_result(name, timeout=60) for name in names]
            assert all(output.error is None for output in outputs)
            texts.append([output.generated_tokens for output in outputs])
    assert texts[0] == texts[1]
    assert len(read.whole) > 4


@pytest.mark.any_version
def test_nan_in_a_prompt_ends_its_request_alone(read: Read) -> None:
    target = tiny_model(dtype=torch.float32, tie_word_embeddings=False)
    prompts = [[5, 6, 7, 8] * 4, [9, 5, 6, 7] * 4, [10, 11, 12, 13] * 4]
    texts = [text_alone(target, prompt, max_new_tokens=6) for prompt in prompts]
    bad = next(token for token in range(14, 60) if token not in sum(texts, []))
    target.get_input_embeddings().weight.data[bad] = torch.nan
    with target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits(60)
    ) as manager:
        for _ in range(4):
            names = [manager.add_request(prompt, max_new_tokens=6) for prompt in [*prompts, [bad] * 16]]
            outputs = [manager.get_result(name, timeout=60) for name in names]
            assert "NaN" in outputs[-1].error and not outputs[-1].generated_tokens
            assert [output.generated_tokens for output in outputs[:-1]] == texts
    assert read.whole
    assert_nothing_left(manager)


@pytest.mark.slow
@pytest.mark.any_version
def test_a_prompt_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: PromptStep, *args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(PromptStep, "capture", fails)
    target, prompts = trained_target(), trained_prompts()["prompts"][:6]
    with pytest.warns(UserWarning, match="A step of .* could not be captured"):
        outputs = target.generate_batch(
            prompts,
            assistant_model=trained_head(),
            tree=IRREGULAR,
            max_new_tokens=12,
            continuous_batching_config=limits(600, max_batch_tokens=16),
        )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=12)


@pytest.mark.any_version
def test_results_do_not_wait_for_the_prompts_of_others(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has ended is told while the device reads on for another, not when that is done."""
    target, late = tiny_model(dtype=torch.float32), []
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits(400, max_batch_tokens=4)
    )
    step = Engine.step

    def noted(self: Engine) -> Any:
        before = list(manager._loop._requests._undelivered)
        yield from step(self)
        late.extend(one for one in before if any(one[0] is other[0] for other in manager._loop._requests._undelivered))

    monkeypatch.setattr(Engine, "step", noted)
    prompts = [[5, 6, 7], [7, 8, 9] * 5, [3, 4], [6, 7, 8] * 40]
    names = [manager.add_request(prompt, max_new_tokens=3) for prompt in prompts]
    with manager:
        outputs = [manager.get_result(name, timeout=60) for name in names]
    texts = [text_alone(target, prompt, max_new_tokens=3) for prompt in prompts]
    assert [output.generated_tokens for output in outputs] == texts
    assert len(read.whole) > 20 and not late


def of_head(cuda_graphs: Any, read: Read) -> list[tuple[torch.Tensor, ...]]:
    """The head's K/V of two prompts, up to where they count, and the feature that waits."""
    del read[:], read.whole[:]
    prompts = [(2 * prompt)[:length] for prompt, length in zip(trained_prompts()["prompts"], (37, 3), strict=False)]
    manager = trained_target().init_continuous_batching(
        assistant_model=trained_head(),
        speculative_config=SpeculativeConfig(tree="[(0,)]", cuda_graphs=cuda_graphs),
        continuous_batching_config=limits(600, max_batch_tokens=16),
    )
    engine, found = manager.engine, []
    with engine.running():
        for _ in range(3):  # so that the device reads them
            found = []
            for number, prompt in enumerate(prompts):
                request = manager._admission.request(f"{number}", prompt, {"max_new_tokens": 8})
                engine.scheduler.add(request)
                while request.length == len(prompt):
                    engine.scheduler.admit()
                    list(prompt_reading.run(engine))
                cache, length = engine.drafting.cache, len(prompt) - 1
                assert cache.length_of(request.table) == length and engine.drafting.features.count(request) == 1
                layer = cache.layers[0]
                rows = [
                    states[request.table.blocks].transpose(0, 1).flatten(1, 2)[:, :length]
                    for states in (layer.keys, layer.values)
                ]
                found.append((*rows, engine.drafting.features.of([request], 1)))
                engine.end(request)
    return found


@pytest.mark.any_version
def test_a_head_reads_along(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds of a prompt what it would without graphs, and would not if it paired features with other tokens."""
    by_host = of_head(False, read)
    assert not read.whole

    def differs() -> bool:
        by_device = of_head("auto", read)
        assert {chunk.width for chunk in read.whole} == set(WIDTHS)
        pairs = [
            pair for ours, theirs in zip(by_device, by_host, strict=True) for pair in zip(ours, theirs, strict=True)
        ]
        return not all(torch.allclose(*pair, atol=1e-5) for pair in pairs)

    assert not differs()
    read_by_head = PromptStep._read_by_head

    def wrong(self: PromptStep, *args: Any) -> None:
        self.rows.tail[:, 1:] = self.rows.tail[:, :-1].clone()
        read_by_head(self, *args)

    monkeypatch.setattr(PromptStep, "_read_by_head", wrong)
    assert differs()


@pytest.mark.any_version
def test_prompts_that_busy_the_device_go_without(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.any_version
def test_pieces() -> None:
    """They make up every text, from anywhere in it; each is within the text, and mostly unread."""
    widths = [4, 16, 64]
    for length in range(1, 200):
        for first in {0, min(3, length - 1), min(17, length - 1), length - 1}:
            unread = length - first
            while unread > 0:
                width, count = next_chunk(length, unread, widths)
                if width is None:
                    assert count == unread and length < widths[0]
                else:
                    assert count <= width <= length - (unread - count)
                    assert width == widths[0] or 4 * count > 3 * width
                unread -= count
            assert unread == 0


@pytest.mark.any_version
def test_padded_pieces() -> None:
    """They make up every text; there is no more padding than tokens, but in the narrowest."""
    widths = [4, 16, 64]
    for length in range(1, 200):
        unread = length
        while unread > 0:
            width, count = padded_chunk(unread, widths)
            assert 0 < count <= min(width, unread)
            assert width == widths[0] or 2 * count > width
            unread -= count
        assert unread == 0


@pytest.mark.any_version
def test_a_wrong_chain_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend to those behind them change texts."""

    def all_see_all(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1, length, length, dtype=torch.bool), torch.arange(length)[None]

    for module in ("forwards.target", "engine.captured.prompt_step"):
        monkeypatch.setattr(f"hf_specdec.{module}.causal_chain", all_see_all)
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
