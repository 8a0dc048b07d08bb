"""Many requests on a CUDA device. Skipped, and said so, where there is none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts
from support.goldens import trained_prompts, trained_target
from support.heads import tiny_head, trained_head
from support.log_probabilities import check
from support.models import noisy_copy, take_weights, tiny_model
from support.parity import IRREGULAR
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)


def alone_on_device(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """What plain greedy `generate` writes after one prompt."""
    ids = torch.tensor([prompt], device="cuda")
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return text[0, len(prompt) :].tolist()


@pytest.fixture(params=[torch.float64, torch.float32], ids=["masks", "graphs"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """In float64 layers attend by masks, from the host; in float32 by the kernel, from graphs."""
    return request.param


@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto"], ids=["static", "dynamic", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_greedy_texts(family: str, tree: Any, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    draft = noisy_copy(model, 0.05).cuda()
    model = model.cuda()
    config = limits(60)
    outputs = model.generate_batch(
        ragged_prompts(), assistant_model=draft, tree=tree, max_new_tokens=30, continuous_batching_config=config
    )
    for prompt, output in zip(ragged_prompts(), outputs.values(), strict=True):
        assert output.generated_tokens == alone_on_device(model, prompt, max_new_tokens=30)
    assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0


def test_prompts_by_graphs() -> None:
    """Of lengths between the widths of the graphs, with a head, which sees all features."""
    target, head = trained_target().cuda(), trained_head().cuda()
    try:
        prompts = [(one * 30)[: 20 + 17 * number] for number, one in enumerate(trained_prompts()["prompts"][:12])]
        found = []
        for cuda_graphs in (False, "auto"):
            config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
            for _ in range(2):
                outputs = target.generate_batch(
                    prompts,
                    assistant_model=head,
                    speculative_config=config,
                    max_new_tokens=20,
                    continuous_batching_config=limits(600, 16, max_batch_tokens=2048),
                )
            found.append([(one.generated_tokens, one.speculation.num_accepted_tokens) for one in outputs.values()])
        for prompt, (tokens, _) in zip(prompts, found[1], strict=True):
            assert tokens == alone_on_device(target, prompt, max_new_tokens=20)
        accepted = [sum(count for _, count in texts) for texts in found]
        assert abs(accepted[0] - accepted[1]) <= 0.1 * accepted[0]
    finally:
        target.cpu()


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_a_shared_beginning(kind: str, dtype: torch.dtype) -> None:
    """Of texts that come together, and of those that are over; chunks of prompts by graphs do not write to it."""
    model = tiny_model(dtype=dtype)
    assistant = (noisy_copy(model, 0.05) if kind == "draft" else tiny_head(model)).cuda()
    model, beginning = model.cuda(), ragged_prompts((90,))[0]
    prompts = [beginning + prompt for prompt in ragged_prompts((9, 1, 30, 70))]
    expected = [alone_on_device(model, prompt, max_new_tokens=30) for prompt in prompts]
    with model.continuous_batching_context_manager(
        assistant_model=assistant, tree=IRREGULAR, continuous_batching_config=limits(300, 16, max_batch_tokens=512)
    ) as manager:
        for _ in range(3):
            names = manager.add_requests(prompts, max_new_tokens=30, do_sample=False)
            assert [manager.get_result(name).generated_tokens for name in names] == expected
    # In the first round three take 80 tokens; later all take what is before the block of their last token.
    least = 3 * 80 + 2 * (96 + 80 + 112 + 144)
    assert least <= manager.state.num_prefix_hits <= least + 64


@pytest.mark.parametrize("assistant", ["head", "head on the CPU", "ngram"])
def test_others(assistant: str) -> None:
    """A trained target and a trained head, in float32."""
    model, head = trained_target(), trained_head()
    try:
        draft = {"head": head.cuda(), "head on the CPU": trained_head(), "ngram": NgramDraft()}[assistant]
        model.cuda()
        outputs = model.generate_batch(
            trained_prompts()["prompts"],
            assistant_model=draft,
            tree=IRREGULAR,
            max_new_tokens=30,
            continuous_batching_config=limits(600),
        )
        for prompt, output in zip(trained_prompts()["prompts"], outputs.values(), strict=True):
            assert output.generated_tokens == alone_on_device(model, prompt, max_new_tokens=30)
        assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0
    finally:
        model.cpu()


def test_seeds_are_those_of_a_cpu() -> None:
    """Random numbers belong to a text's places, not to a device: in float64 the texts are the same."""
    model = tiny_model()
    texts = []
    for device in ("cpu", "cuda"):
        draft, model = noisy_copy(model, 0.05).to(device), model.to(device)
        with model.init_continuous_batching(
            assistant_model=draft, tree=IRREGULAR, continuous_batching_config=limits()
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=25, do_sample=True, temperature=0.5, seed=number)
                for number, prompt in enumerate(ragged_prompts())
            ]
            texts.append([manager.get_result(name).generated_tokens for name in names])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("tree", [IRREGULAR, None], ids=["tree", "off"])
def test_log_probabilities(tree: Any, dtype: torch.dtype) -> None:
    """In float32 of graphs, for prompts and steps, with rows that ask for others or for none."""
    model = tiny_model(dtype=dtype)
    draft = noisy_copy(model, 0.05).cuda()
    model = model.cuda()
    off: dict[str, Any] = {"disable_by_batch_size": 0} if tree is None else {}
    config = SpeculativeConfig(tree=tree or "[(0,)]", **off)
    kinds = ({}, {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9})
    asked = ((4, "raw"), (0, "processed"), (None, None), (20, "processed"), (2, "raw"))
    manager = model.init_continuous_batching(
        assistant_model=draft,
        speculative_config=config,
        continuous_batching_config=limits(400, 16, max_batch_tokens=2048),
    )
    prompts = ragged_prompts((9, 70, 70, 64, 3))
    with manager:
        for options in kinds * 2:  # a prompt's graph is captured when its size comes again
            names = [
                manager.add_request(prompt, max_new_tokens=12, top_logprobs=best, logprobs_mode=mode, **options)
                for prompt, (best, mode) in zip(prompts, asked, strict=True)
            ]
            for name, (best, mode) in zip(names, asked, strict=True):
                check(model, manager.get_result(name, timeout=60), best, mode, options, tolerance=1e-4)


def test_half_precision_runs() -> None:
    model = tiny_model().to("cuda", torch.bfloat16)
    call = {"assistant_model": model, "tree": IRREGULAR, "continuous_batching_config": limits(600)}
    outputs = model.generate_batch(ragged_prompts(), max_new_tokens=20, **call)
    assert all(len(output.generated_tokens) == 20 for output in outputs.values())


def test_new_requests_do_not_wait_for_the_device() -> None:
    """Which has been told to do something that takes a second or more, as it is while many requests run."""
    model = tiny_model(dtype=torch.float32).cuda()
    try:
        manager = model.init_continuous_batching(
            assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits(60)
        )
        manager.add_request([4, 5, 6], max_new_tokens=4)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.cuda._sleep(2 * 10**9)
        for _ in range(3):
            manager.add_request([4, 5, 6], max_new_tokens=4, do_sample=True, temperature=0.7)
        added = time.perf_counter() - begun
        torch.cuda.synchronize()
        assert added < 0.5 * (time.perf_counter() - begun)
    finally:
        model.cpu()


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_acceptance_with_graphs(kind: str) -> None:
    """Every request accepts what it would without graphs, in batches that shrink and grow, and when it comes again."""
    model, prompts = trained_target().cuda(), trained_prompts()["prompts"]
    try:
        assistant = trained_head().cuda() if kind == "head" else noisy_copy(model, 0.02).cuda()
        found = []
        for cuda_graphs in (False, True):
            config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
            call = {
                "assistant_model": assistant,
                "speculative_config": config,
                "continuous_batching_config": limits(600),
            }
            outputs = model.generate_batch([*prompts, *prompts], max_new_tokens=40, **call)
            found.append([(out.generated_tokens, out.speculation.num_accepted_tokens) for out in outputs.values()])
        assert found[0] == found[1]
    finally:
        model.cpu()


@pytest.mark.parametrize("how", ["in place", "replaced"])
@pytest.mark.parametrize("kind", ["head", "draft"])
def test_weights_change_while_it_pauses(kind: str, how: str) -> None:
    """Graphs that were captured before read the new weights, or are captured anew."""
    model, other = tiny_model(dtype=torch.float32).cuda(), tiny_model(dtype=torch.float32, seed=1).cuda()
    draft = (tiny_head(model) if kind == "head" else noisy_copy(model, 0.05)).cuda()
    prompts = ragged_prompts()
    expected = [[alone_on_device(one, prompt, max_new_tokens=20) for prompt in prompts] for one in (model, other)]
    assert expected[0] != expected[1]
    with model.init_continuous_batching(
        assistant_model=draft, tree=IRREGULAR, continuous_batching_config=limits(60)
    ) as manager:
        for texts in expected:
            for _ in range(3):
                names = [manager.add_request(prompt, max_new_tokens=20, do_sample=False) for prompt in prompts]
                assert [manager.get_result(name).generated_tokens for name in names] == texts
            assert len(manager.engine.device_steps.stored) > 0
            with manager.pause():
                take_weights(model, other, in_place=how == "in place")
                assert alone_on_device(model, prompts[0], max_new_tokens=20) == expected[1][0]


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_a_kept_manager_captures_nothing_anew(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dtype=torch.float32).cuda()
    draft = (tiny_head(model) if kind == "head" else noisy_copy(model, 0.05)).cuda()
    captures, capture_begin = [], torch.cuda.CUDAGraph.capture_begin

    def counted(self: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        captures.append(self)
        capture_begin(self, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted)
    expected = [alone_on_device(model, prompt, max_new_tokens=20) for prompt in ragged_prompts()]
    numbers = []
    try:
        for _ in range(4):  # sizes of prompts are captured when they come for the second time
            outputs = model.generate_batch(
                ragged_prompts(),
                assistant_model=draft,
                tree=IRREGULAR,
                max_new_tokens=20,
                continuous_batching_config=limits(60),
                persistent_manager=True,
            )
            assert [output.generated_tokens for output in outputs.values()] == expected
            numbers.append(len(captures))
        assert 0 < numbers[0] and numbers[-1] == numbers[-2]
    finally:
        model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("sampling", ["greedy", "rejection", "seeds", "processors"])
@pytest.mark.parametrize("kind", ["head", "draft"])
def test_whole_steps(kind: str, sampling: str) -> None:
    """All but the first steps are single replays; texts are those of steps that the host takes apart."""
    model, prompts = trained_target().cuda(), trained_prompts()["prompts"]
    options: list[dict[str, Any]] = [{} for _ in prompts]
    if sampling == "rejection":
        options = [{"do_sample": True, "temperature": 1e-4, "top_k": 0, "top_p": 0.9} for _ in prompts]
    elif sampling == "seeds":
        options = [
            {"do_sample": True, "temperature": 0.8, "top_k": 30, "seed": seed} for seed, _ in enumerate(prompts)
        ]
    elif sampling == "processors":
        hidden = {"min_new_tokens": 12, "suppress_tokens": [5, 9]}
        own = [hidden, hidden | {"min_p": 0.05}, {"typical_p": 0.8}, {"top_h": 0.9, "epsilon_cutoff": 0.01}, {}]
        own += [{"sequence_bias": [[[5], 1.0], [[9], 1.0], [[5, 9], -2.0]], "no_repeat_ngram_size": 3}]
        options = [
            {"do_sample": seed % len(own) > 0, "seed": seed} | own[seed % len(own)] for seed, _ in enumerate(prompts)
        ]
    try:
        assistant = trained_head().cuda() if kind == "head" else noisy_copy(model, 0.02).cuda()
        found, runs = [], []
        for cuda_graphs in (False, True):
            config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=cuda_graphs)
            with model.init_continuous_batching(
                assistant_model=assistant, speculative_config=config, continuous_batching_config=limits(60)
            ) as manager:
                names = [
                    manager.add_request(prompt, max_new_tokens=40, **own)
                    for prompt, own in zip(prompts, options, strict=True)
                ]
                outputs = [manager.get_result(name) for name in names]
            assert all(output.error is None for output in outputs)
            found.append([output.generated_tokens for output in outputs])
            runs.append(sum(kind.draws or kind.tree is not None for kind, _ in manager.engine.device_steps.stored))
        assert found[0] == found[1]
        assert runs[0] == 0 < runs[1]
    finally:
        model.cpu()


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_compiled_steps(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """Inductor rounds otherwise: what counts is that nearly all tokens of a trained target come out the same."""
    model, prompts = trained_target().cuda(), trained_prompts()["prompts"][:2]
    try:
        assistant = trained_head().cuda() if kind == "head" else noisy_copy(model, 0.02).cuda()
        found = []
        for compiles in (False, True):
            config = SpeculativeConfig(tree=IRREGULAR, compile=compiles)
            call = {"assistant_model": assistant, "speculative_config": config}
            outputs = model.generate_batch(
                prompts, max_new_tokens=40, continuous_batching_config=limits(60), **call
            ).values()
            assert all(output.speculation.num_accepted_tokens > 0 for output in outputs)
            found.append(torch.tensor([output.generated_tokens for output in outputs]))
        assert (found[0] == found[1]).float().mean() > 0.9
        assert not [one for one in recwarn if "could not be" in str(one.message)]
    finally:
        model.cpu()
