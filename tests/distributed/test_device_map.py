"""
Targets whose layers lie on several devices (`device_map`). On the CPU half of the layers are read from the disk when
they run; with one GPU the other half runs on the CPU, with two on the second
(`python -m pytest tests/distributed -rs`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.big_modeling import attach_align_device_hook_on_blocks
from support.batches import limits, ragged_prompts, text_alone
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import DynamicTree, NgramDraft
from hf_specdec.batching.memory import bytes_per_token
from hf_specdec.models.hooks import foreign_hooks


ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = [
    pytest.param(("cpu", "disk"), id="cpu and disk"),
    pytest.param(("cuda:0", "cpu"), id="cuda and cpu", marks=ONE_GPU),
    pytest.param(("cuda:0", "cuda:1"), id="cuda and cuda", marks=TWO_GPUS),
]
GREEDY = {"do_sample": False, "max_new_tokens": 30}
DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=8)


@pytest.fixture(scope="module", params=PLACES)
def places(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Where the first layer runs, and where the second."""
    return request.param


@pytest.fixture(scope="module")
def whole(places: tuple[str, str]) -> PreTrainedModel:
    """All of it on one device."""
    return tiny_model().to(places[0])


@pytest.fixture(scope="module")
def spread(whole: PreTrainedModel, places: tuple[str, str], tmp_path_factory: Any) -> PreTrainedModel:
    return spread_over(copy.deepcopy(whole), *places, tmp_path_factory.mktemp("offload"))


def spread_over(model: PreTrainedModel, first: str, second: str, folder: Path) -> PreTrainedModel:
    device_map = {"model.layers.0": first, "model.layers.1": second, "model.norm": second, "lm_head": second}
    device_map |= {"model.embed_tokens": first, "model.rotary_emb": first}
    if second != "cpu":
        return dispatch_model(model, device_map, offload_dir=folder)
    # accelerate's own map would run on the first device what it keeps on the CPU.
    model.model.layers[1].to(second), model.model.norm.to(second), model.lm_head.to(second)
    devices = {name: torch.device(place) for name, place in device_map.items()}
    attach_align_device_hook_on_blocks(
        model, {"": torch.device(first)} | devices, offload=dict.fromkeys(devices, False)
    )
    return model


def on(device: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}


@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto"], ids=["static", "dynamic", "auto"])
@pytest.mark.parametrize("draft_is", ["on the first", "on the second", "spread"])
@pytest.mark.some_cases(9)
def test_draft_models(
    whole: PreTrainedModel, spread: PreTrainedModel, places: tuple[str, str], draft_is: str, tree: Any, tmp_path: Path
) -> None:
    first, second = places
    draft = noisy_copy(whole, 0.05)
    if draft_is == "spread":
        draft = spread_over(draft, first, second, tmp_path)
    else:
        draft = draft.to(first if draft_is == "on the first" or second == "disk" else second)
    inputs = on(first, prompts(3, 12, padding=True))
    expected = plain_text(whole, inputs, max_new_tokens=30)
    assert_same_text(spread, inputs, draft, tree, expected=expected, max_new_tokens=30)


@pytest.mark.parametrize("head_on", [0, 1])
@pytest.mark.some_cases(3)
def test_heads(whole: PreTrainedModel, spread: PreTrainedModel, places: tuple[str, str], head_on: int) -> None:
    """Features come from layers of both devices."""
    head = tiny_head(whole).to("cpu" if places[head_on] == "disk" else places[head_on])
    inputs = on(places[0], prompts(2, 12, padding=True))
    expected = whole.generate(**inputs, **GREEDY, assistant_model=tiny_head(whole).to(places[0]), tree=IRREGULAR)
    text = spread.generate(**inputs, **GREEDY, assistant_model=head, tree=IRREGULAR)
    assert text.tolist() == expected.tolist()


@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC], ids=["static", "dynamic"])
def test_samples(whole: PreTrainedModel, spread: PreTrainedModel, places: tuple[str, str], tree: Any) -> None:
    """The same random numbers draw the same tokens."""
    draft, inputs = noisy_copy(whole, 0.05), on(places[0], prompts(3, 12, padding=True))
    texts = []
    for target in (whole, spread):
        torch.manual_seed(3)
        texts.append(
            target.generate(**inputs, assistant_model=draft, tree=tree, do_sample=True, max_new_tokens=30).tolist()
        )
    assert texts[0] == texts[1]


def test_a_cache_goes_in_and_comes_back(
    whole: PreTrainedModel, spread: PreTrainedModel, places: tuple[str, str]
) -> None:
    inputs = on(places[0], prompts(1, 12))
    cache = DynamicCache(config=spread.config)
    first = spread.generate(
        **inputs, **GREEDY, assistant_model=noisy_copy(whole, 0.05), tree=IRREGULAR, past_key_values=cache
    )
    assert cache.get_seq_length() == first.shape[1] - 1
    more = {"input_ids": torch.cat([first, inputs["input_ids"]], dim=1)}
    more["attention_mask"] = torch.ones_like(more["input_ids"])
    expected = whole.generate(**more, **GREEDY)
    second = spread.generate(**more, **GREEDY, assistant_model=NgramDraft(), past_key_values=cache)
    assert second.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "kind, tree",
    [("draft model", IRREGULAR), ("head", DYNAMIC), ("draft model", "auto")],
    ids=["static", "dynamic", "auto"],
)
@pytest.mark.some_cases(3)
def test_many_requests(
    whole: PreTrainedModel, spread: PreTrainedModel, places: tuple[str, str], kind: str, tree: Any
) -> None:
    on_cpu = tiny_model()
    expected = [text_alone(on_cpu, prompt, max_new_tokens=20) for prompt in ragged_prompts()]
    assistant = noisy_copy(whole, 0.05) if kind == "draft model" else tiny_head(whole).to(places[0])
    options = {"tree": tree, "continuous_batching_config": limits(40), "do_sample": False, "max_new_tokens": 20}
    outputs = spread.generate_batch(ragged_prompts(), assistant_model=assistant, **options)
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert [output.error for output in outputs.values()] == [None] * len(expected)


def test_memory_is_counted_by_device(spread: PreTrainedModel, places: tuple[str, str]) -> None:
    """2 (keys and values) · 2 heads · 8 · 8 bytes for each of the two layers."""
    first, second = (torch.device("cpu" if place == "disk" else place) for place in places)
    expected = {first: 256, second: 256} if first != second else {first: 512}
    assert bytes_per_token([spread]) == expected


def test_hooks_that_place_are_not_the_users(spread: PreTrainedModel) -> None:
    assert foreign_hooks(spread) == []
