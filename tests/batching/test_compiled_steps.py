"""Compiled steps of requests in flight: the same texts, by a compiler that only traces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.merges import noted_merges
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from torch._dynamo.utils import counters

from hf_specdec import SpeculativeConfig
from hf_specdec.compiling import layers
from hf_specdec.compiling.layers import compiled_layers
from hf_specdec.engine.captured.device_steps import DeviceSteps
from hf_specdec.engine.captured.prompt_step import PromptStep
from hf_specdec.graphs.paged import PagedGraphs


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in each merge of linear layers."""
    return noted_merges(monkeypatch)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, merged: list[int]) -> Iterator[StandIn]:
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=256):  # the stand-in replays by running the code again
        yield install_stand_in(monkeypatch, with_kernel=True, counts=False, dispatches=True)
    torch._dynamo.reset()


SMALL = "[(0,), (1,), (0, 0)]"
"""Few levels: tracing takes a second and more for each."""


def compiled(tree: Any = IRREGULAR, **options: Any) -> dict[str, Any]:
    config = SpeculativeConfig(tree=tree, compile=True)
    return {"speculative_config": config, "continuous_batching_config": limits(), "max_new_tokens": 20} | options


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.slow
def test_draft_models(family: str, stand_in: StandIn, merged: list[int], recwarn: pytest.WarningsRecorder) -> None:
    target, prompts = tiny_model(family, dtype=torch.float32), ragged_prompts((5, 6))
    outputs = target.generate_batch(
        prompts, assistant_model=noisy_copy(target, 0.05), **compiled(SMALL, max_new_tokens=12)
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=12)
    assert counters["stats"]["unique_graphs"] >= 4 and stand_in.replays > 3 and {2, 3} <= set(merged)
    assert not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
def test_heads(stand_in: StandIn, recwarn: pytest.WarningsRecorder) -> None:
    target, prompts, found = trained_target(), trained_prompts()["prompts"][:2], []
    for config in (SpeculativeConfig(tree=IRREGULAR, cuda_graphs=False), compiled()["speculative_config"]):
        options = compiled(max_new_tokens=40, speculative_config=config)
        outputs = target.generate_batch(prompts, assistant_model=trained_head(), **options).values()
        found.append([(output.generated_tokens, output.speculation.accepted_per_step) for output in outputs])
    assert found[0] == found[1] and counters["stats"]["unique_graphs"] >= 4
    assert not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
def test_other_numbers_of_requests_compile_nothing(stand_in: StandIn) -> None:
    """What is compiled for one request runs any number of them: what is captured of other sizes is made of it."""
    target, prompts = trained_target(), ragged_prompts((9,) * 8)
    assistant = noisy_copy(target, 0.05)
    counts, captures = [], []
    # With the root four nodes, as many as there are requests at some time.
    call = compiled(SMALL, max_new_tokens=8)
    for number in (1, 2, 3, 4, 8):
        outputs = target.generate_batch(prompts[:number], assistant_model=assistant, **call).values()
        for prompt, output in zip(prompts, outputs, strict=False):
            assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=8)
        counts.append(counters["stats"]["unique_graphs"])
        captures.append(stand_in.captures)
    assert counts[0] >= 4 and set(counts) == {counts[0]} and captures == sorted(set(captures))


@pytest.mark.slow
@pytest.mark.any_version
def test_layers_that_run_untraced(stand_in: StandIn) -> None:
    """As with TORCH_COMPILE_DISABLE: rows are parted for attention there, too."""
    target, prompts = trained_target(), ragged_prompts((9, 4, 7))
    expected = [text_alone(target, prompt, max_new_tokens=8) for prompt in prompts]
    torch.compiler.set_stance("force_eager")
    try:
        call = compiled(SMALL, max_new_tokens=8)
        outputs = target.generate_batch(prompts, assistant_model=noisy_copy(target, 0.05), **call).values()
    finally:
        torch.compiler.set_stance("default")
    assert [output.generated_tokens for output in outputs] == expected


@pytest.mark.slow
def test_warming_up_compiles_for_one_token_and_for_several(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of rows, tree or width of a prompt compiles anything anew; a head's reading has pieces of its own."""
    target, record, new = trained_target(), DeviceSteps.record, list[int]()

    def counted(self: DeviceSteps, step: Any) -> None:
        before = counters["stats"]["unique_graphs"]
        record(self, step)
        new.append(counters["stats"]["unique_graphs"] - before)

    monkeypatch.setattr(DeviceSteps, "record", counted)
    config = limits(400, max_requests_per_batch=16, max_batch_tokens=64)
    manager = target.init_continuous_batching(
        assistant_model=trained_head(),
        speculative_config=SpeculativeConfig(tree=SMALL, compile=True),
        continuous_batching_config=config,
    )
    manager.warmup()
    with manager:
        output = manager.get_result(manager.add_request([4, 5, 6], max_new_tokens=9))
    assert output.generated_tokens == text_alone(target, [4, 5, 6], max_new_tokens=9)
    assert len(new) > 9 and sum(map(bool, new)) <= 3 and 4 <= sum(new) <= 24


@pytest.mark.slow
@pytest.mark.any_version
def test_layers_share_what_is_compiled(stand_in: StandIn) -> None:
    counts = []
    for num_layers in (2, 5):
        target = tiny_model(dtype=torch.float32, num_hidden_layers=num_layers)
        draft = tiny_model(dtype=torch.float32)
        target.generate_batch(ragged_prompts((5, 6)), assistant_model=draft, **compiled(SMALL, max_new_tokens=12))
        counts.append(counters["stats"]["unique_graphs"])
        torch._dynamo.reset()
        counters.clear()
    assert counts[0] == counts[1] > 0


def test_layers_are_what_they_were_and_are_to_other_threads() -> None:
    model, ids, found = tiny_model(), torch.tensor([[3, 4, 5]]), []
    first, second = model.model.layers
    plain, asked = first.forward, []

    def own(*args: Any, **options: Any) -> Any:
        asked.append(threading.current_thread())
        return plain(*args, **options)

    first.forward = own
    counters.clear()
    expected = model(ids).logits
    with compiled_layers(model, SimpleNamespace(update=print)):
        thread = threading.Thread(target=lambda: found.append(model(ids).logits))
        thread.start()
        thread.join()
    assert vars(first)["forward"] is own and "forward" not in vars(second)
    assert torch.equal(found[0], expected) and len(asked) == 2 and counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_prompts(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of some width are read by compiled forwards, too, and a head along with them."""
    monkeypatch.setattr(PagedGraphs, "prompt_widths", (8, 16))
    target, prompts = trained_target(), ragged_prompts((33, 20, 41, 33, 20))
    assistant = trained_head()
    asked: list[bool] = []
    take = PromptStep.capture

    def capture(self: PromptStep, *args: Any) -> None:
        asked.append(self.compiles)
        take(self, *args)

    monkeypatch.setattr(PromptStep, "capture", capture)
    outputs = target.generate_batch(prompts, assistant_model=assistant, **compiled(max_new_tokens=6)).values()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=6)
    assert asked and all(asked)


@pytest.mark.slow
def test_models_that_are_traced_in_part(stand_in: StandIn, recwarn: pytest.WarningsRecorder) -> None:
    target, prompts = tiny_model("mixtral", dtype=torch.float32), ragged_prompts((5, 6))
    draft = noisy_copy(tiny_model(dtype=torch.float32), 0.05)
    outputs = target.generate_batch(prompts, assistant_model=draft, **compiled())
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)
    assert stand_in.replays > 3 and not [one for one in recwarn if "could not be" in str(one.message)]


@pytest.mark.slow
def test_what_cannot_be_compiled(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and whole steps all the same; the layers are what they were."""

    def fail(*args: Any) -> None:
        raise OSError("no compiler here")

    monkeypatch.setattr(layers, "COMPILER", fail)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6))
    with pytest.warns(
        UserWarning, match="A step of LlamaForCausalLM could not be compiled.*no compiler here"
    ) as found:
        outputs = target.generate_batch(prompts, assistant_model=noisy_copy(target, 0.05), **compiled())
    assert len(found) == 1
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=20)
    assert stand_in.replays > 3 and not any("forward" in vars(layer) for layer in target.model.layers)


def test_where_there_are_no_whole_steps() -> None:
    target, prompt = tiny_model(), ragged_prompts((5,))[0]
    with pytest.warns(UserWarning, match="`compile=True` has no effect: steps of these requests") as found:
        outputs = target.generate_batch([prompt], assistant_model=noisy_copy(target, 0.05), **compiled())
    assert len(found) == 1
    assert next(iter(outputs.values())).generated_tokens == text_alone(target, prompt, max_new_tokens=20)
