"""Several requests for one prompt, as for samples of it: the prompt is read once, whatever the size of blocks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from support import vision
from support.batches import assert_nothing_left, manager_of, run_together, run_with_ends, runs_of_steps, text_alone
from support.graphs import install_stand_in
from support.heads import tiny_block_head, tiny_head
from support.models import noisy_copy, tiny_model
from transformers import PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.batching import Limits
from hf_specdec.cache.paged_cache import PagedCache
from hf_specdec.graphs.paged import PagedGraphs


DRAFTS: dict[str, Any] = {
    "ngram": lambda model: NgramDraft(),
    "model": lambda model: noisy_copy(model, 0.05),
    "eagle": tiny_head,
    "block": tiny_block_head,
}


@cache
def the_target(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(dtype=dtype)


def manager_for(model: PreTrainedModel, kind: str, shares: bool = True, **options: Any) -> Any:
    own = {"num_blocks": 40, "block_size": 32, "chunk_size": 64, "shares_prefixes": shares} | options
    return manager_of(model, DRAFTS[kind](model), continuous_batching_config=Limits(**own))


def write(manager: Any, prompts: list[Any], **options: Any) -> tuple[list[list[int]], list[Any]]:
    """The texts of requests that come together, and how many tokens each step of theirs accepted."""
    options = {"max_new_tokens": 9, "do_sample": False} | options
    requests = [manager._admission.request(str(n), prompt, options) for n, prompt in enumerate(prompts)]
    return run_together(manager, requests), [request.metrics.accepted_per_step for request in requests]


def tokens(count: int) -> list[int]:
    return random.Random(count).choices(range(3, 61), k=count)


@pytest.mark.parametrize("kind, captured", [*((kind, False) for kind in DRAFTS), ("model", True), ("eagle", True)])
@pytest.mark.some_cases(2)
def test_copies_of_prompts(kind: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than a block, with one behind others, and with one that is full: texts and drafts are as without."""
    dtype, runs = (torch.float32 if captured else torch.float64), runs_of_steps(monkeypatch)
    if captured:
        install_stand_in(monkeypatch, with_kernel=True)
        monkeypatch.setattr(PagedGraphs, "prompt_widths", (4, 16))
    model, own = the_target(dtype), [tokens(count) for count in (25, 59, 64)]
    prompts = [own[number] for number in (0, 1, 0, 2, 1, 0, 2)]
    found = []
    for shares in (True, False):
        manager = manager_for(model, kind, shares)
        texts, accepted = write(manager, prompts)
        assert texts == [text_alone(model, prompt, max_new_tokens=9) for prompt in prompts]
        found.append(accepted)
        assert manager.state.num_prompt_tokens == (sum(map(len, own)) + 4 if shares else sum(map(len, prompts)))
        assert manager.state.num_prefix_hits == (2 * 24 + 58 + 63) * shares
        assert_nothing_left(manager)
    assert found[0] == found[1]
    assert bool(runs) is (captured and kind != "ngram")


def test_what_is_not_copied_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "move_slots", lambda *_: None)
    with pytest.raises(AssertionError):
        test_copies_of_prompts("ngram", False, monkeypatch)


def test_samples() -> None:
    """Of `generate_batch`, drawn without a seed: each is another one."""
    model, prompt = the_target(), tokens(40)
    own = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "continuous_batching_config": Limits(num_blocks=40)}
    outputs = model.generate_batch([prompt] * 8, assistant_model=DRAFTS["eagle"](model), tree="auto", **own)
    texts = {tuple(output.generated_tokens) for output in outputs.values()}
    assert len(texts) == 8


@pytest.mark.parametrize("name, behind", [("gemma3", 14), ("qwen3_vl", 14), ("qwen3_vl", 0)])
@pytest.mark.some_cases(1)
def test_images(name: str, behind: int) -> None:
    """Which are in no full block; where a prompt ends with its image, it is read whole each time."""
    model, inputs = vision.VISION_MODELS[name][0](), vision.ragged_image_prompts(name, ((9, behind),))[0]
    manager = manager_for(model, "eagle")
    length = inputs["input_ids"].shape[1]
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=9)[0, length:].tolist()
    other = inputs | {"pixel_values": -3 * inputs["pixel_values"].flip(-1)}
    texts, _ = write(manager, [inputs, inputs, other, inputs])
    assert [texts[number] for number in (0, 1, 3)] == [expected] * 3 and texts[2] != expected
    assert manager.state.num_prompt_tokens == (2 * length + 2 if behind else 4 * length)
    assert manager.state.num_prefix_hits == (2 * (length - 1) if behind else 0)


@pytest.mark.parametrize("kind", ["model", "eagle"])
@pytest.mark.some_cases(1)
def test_requests_that_end_at_any_time(kind: str) -> None:
    """Copies are of requests that run and have no errors; nobody reads what belongs to nobody."""
    choice, model = random.Random(1), the_target()
    manager = manager_for(model, kind, num_blocks=12, max_requests=5)
    engine, own = manager.engine, [tokens(count) for count in (25, 40, 60)]
    texts = [text_alone(model, prompt, max_new_tokens=14) for prompt in own]
    made = []
    for _ in range(40):
        number, options = choice.randrange(3), {"max_new_tokens": choice.randint(1, 14), "do_sample": False}
        speculate = choice.random() < 0.8
        made.append((manager._admission.request("one", own[number], options, speculate=speculate), number))
    for _ in run_with_ends(manager, [request for request, _ in made], choice):
        if choice.random() < 0.05:
            manager.reset_prefix_cache()
    for request, number in made:
        written = request.tokens[len(request.prompt) :]
        assert written == texts[number][: len(written)]
        assert request.error or len(written) == request.max_length - len(request.prompt)
    assert manager.state.num_prefix_hits > 400 and not engine.prefixes._equal._keys
    assert_nothing_left(manager)
