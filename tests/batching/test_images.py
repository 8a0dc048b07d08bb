"""Requests with images beside requests without: each gets the text that `generate` gives it alone."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support import vision
from support.batches import accepted, assert_nothing_left, limits, ragged_prompts, text_alone
from support.graphs import install_stand_in
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, TokenTree
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.engine.target import InFlightTarget


NEW_TOKENS = 20
TEXTS = (9, 1, 30)
"""Lengths of the prompts without images."""


@cache
def of_family(name: str) -> tuple[PreTrainedModel, list[Any], list[list[int]]]:
    """A model, prompts with images and without, mixed, and what plain `generate` writes after each."""
    model = vision.VISION_MODELS[name][0]()
    images = vision.ragged_image_prompts(name)
    texts = [[min(token, vision.VIDEO - 1) for token in prompt] for prompt in ragged_prompts(TEXTS)]
    written = [text_alone(model, prompt, max_new_tokens=NEW_TOKENS) for prompt in texts]
    for inputs in images:
        text = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        written.append(text[0, inputs["input_ids"].shape[1] :].tolist())
    order = [3, 0, 4, 5, 1, 6, 2]
    prompts: list[Any] = [*texts, *images]
    return model, [prompts[place] for place in order], [written[place] for place in order]


@pytest.mark.parametrize("kind", ["draft", "ngram", "head"])
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(2)
def test_texts(name: str, kind: str) -> None:
    model, prompts, texts = of_family(name)
    assistant = {"draft": lambda: noisy_copy(model), "ngram": NgramDraft, "head": lambda: tiny_head(model)}[kind]()
    tree = TokenTree.from_branching((30, 2)) if kind == "head" else IRREGULAR
    config = {"continuous_batching_config": limits(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    outputs = model.generate_batch(prompts, assistant_model=assistant, tree=tree, **config)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    assert [output.generated_tokens for output in outputs.values()] == texts
    assert sum(map(accepted, outputs.values())) > 0, "nothing was accepted: the test would not see a fault"


@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(2)
def test_the_image_matters(name: str) -> None:
    """Else the other tests would pass with any image."""
    model, prompts, texts = of_family(name)
    for inputs, text in zip(prompts, texts, strict=True):
        if isinstance(inputs, dict):
            other = inputs | {"pixel_values": -3 * inputs["pixel_values"].flip(-1)}
            written = model.generate(**other, do_sample=False, max_new_tokens=NEW_TOKENS)
            assert written[0, inputs["input_ids"].shape[1] :].tolist() != text


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "widths"), [(19, ()), (26, (16,))])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_few_blocks(name: str, num_blocks: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that loses its blocks reads its images again, and then what it has written, and no token of both."""
    monkeypatch.setattr(InFlightTarget, "widths", lambda target: widths)
    model, prompts, texts = of_family(name)
    with model.continuous_batching_context_manager(
        assistant_model=noisy_copy(model), tree=IRREGULAR, continuous_batching_config=limits(num_blocks)
    ) as manager:
        names = manager.add_requests(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
        found = {name: manager.get_result(name).generated_tokens for name in names}
    assert manager.state.num_preemptions > 0
    assert list(found.values()) == texts
    assert_nothing_left(manager)


@pytest.mark.parametrize("kind", ["draft", "head", "ngram"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
@pytest.mark.some_cases(1)
def test_captured_steps(name: str, kind: str, monkeypatch: pytest.MonkeyPatch, runs: list[InFlightStep]) -> None:
    """Whole steps over rows with positions of several axes beside texts, and chunks of texts by captured steps."""
    install_stand_in(monkeypatch, with_kernel=True)
    model, prompts, texts = of_family(name)
    model = copy.deepcopy(model).float()
    prompts = [
        prompt | {"pixel_values": prompt["pixel_values"].float()} if isinstance(prompt, dict) else prompt
        for prompt in prompts
    ]
    assistant = {"draft": lambda: noisy_copy(model), "ngram": NgramDraft, "head": lambda: tiny_head(model)}[kind]()
    options = {"assistant_model": assistant, "tree": IRREGULAR, "continuous_batching_config": limits(26)}
    outputs = model.generate_batch(prompts, max_new_tokens=12, do_sample=False, **options)
    assert [output.generated_tokens for output in outputs.values()] == [text[:12] for text in texts]
    assert kind == "ngram" or {step.rows.size.axes for step in runs} >= ({0} if name == "gemma3" else {4})


def test_tokens_and_inputs_apart() -> None:
    model, prompts, texts = of_family("qwen2_vl")
    place = next(place for place, prompt in enumerate(prompts) if isinstance(prompt, dict))
    inputs = {name: value for name, value in prompts[place].items() if name not in ("input_ids", "attention_mask")}
    tokens = prompts[place]["input_ids"][0].tolist()
    before = {name: value.clone() for name, value in inputs.items()}
    with model.continuous_batching_context_manager(
        assistant_model=NgramDraft(), tree=IRREGULAR, continuous_batching_config=limits()
    ) as manager:
        name = manager.add_request(tokens, model_inputs=inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert manager.get_result(name).generated_tokens == texts[place]
    assert all(value.equal(before[name]) for name, value in inputs.items())


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.some_cases(1)
def test_images_without_places(kind: str) -> None:
    """A request whose images do not fit its tokens fails by itself, when it is read."""
    model, prompts, texts = of_family("qwen3_vl")
    bad = next(prompt for prompt in prompts if isinstance(prompt, dict))
    bad = bad | {"pixel_values": bad["pixel_values"][:20]}
    assistant = noisy_copy(model) if kind == "draft" else tiny_head(model)
    outputs = model.generate_batch(
        [*prompts[:2], bad, *prompts[2:]],
        assistant_model=assistant,
        tree=IRREGULAR,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        continuous_batching_config=limits(),
    )
    failed = list(outputs.values()).pop(2)
    assert failed.error and failed.fails_by_its_options and failed.generated_tokens == []
    assert [one.generated_tokens for one in outputs.values() if one is not failed] == texts


def test_images_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose images are too large for the device fails alone; that is not its fault."""
    model, prompts, texts = of_family("llava")
    bad = next(prompt for prompt in prompts if isinstance(prompt, dict))
    read = type(model.model).get_image_features

    def lacking(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        if len(pixel_values) == 5:
            raise torch.OutOfMemoryError("no room")
        return read(self, pixel_values, **options)

    monkeypatch.setattr(type(model.model), "get_image_features", lacking)
    large = bad | {"pixel_values": bad["pixel_values"].repeat(5, 1, 1, 1)}
    options = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": limits()}
    outputs = model.generate_batch([large, *prompts], max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    failed, *others = outputs.values()
    assert failed.error.startswith("OutOfMemoryError: memory ran out") and not failed.fails_by_its_options
    assert [one.generated_tokens for one in others] == texts


def test_options_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that would repeat the images."""
    model, prompts, texts = of_family("llava")
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    options = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": limits()}
    outputs = model.generate_batch(prompts, num_beams=1, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    assert [output.generated_tokens for output in outputs.values()] == texts


_PIXELS = {"pixel_values": torch.zeros(1, 3, 8, 8)}


@pytest.mark.parametrize(
    ("prompt", "model_inputs", "error"),
    [
        ({"pixel_values": None}, None, "`input_ids` is missing"),
        ([5, 6], [1], "`model_inputs` must be a dict"),
        ([5, 6], {"input_ids": [5]}, "`model_inputs` holds `input_ids`"),
        ({"input_ids": [5]}, _PIXELS, "`model_inputs` beside a dict"),
        ({"input_ids": [[5], [6]]}, None, "`input_ids` has 2 rows"),
        ({"input_ids": [[5, 6]], "attention_mask": [[0, 1]]}, None, "`attention_mask` hides tokens"),
        ([5, 6], {"position_ids": torch.tensor([[0, 1]])}, "`position_ids` among the inputs"),
        (
            [5, 6],
            {"image_grid_thw": torch.tensor([[1, 2, 2]])},
            "`image_grid_thw` .* LlavaForConditional.* takes none",
        ),
        ([5, 6], {"pixel_values": object()}, "`pixel_values` .* must be a tensor"),
    ],
)
def test_refused(prompt: Any, model_inputs: Any, error: str) -> None:
    model, _, _ = of_family("llava")
    manager = model.init_continuous_batching(assistant_model=NgramDraft(), continuous_batching_config=limits())
    with pytest.raises((ValueError, TypeError), match=error):
        manager.add_request(prompt, model_inputs=model_inputs)
    assert manager.state.num_waiting == 0


def test_token_types() -> None:
    """A processor says of a prompt without images that all of it is text."""
    model, prompts, texts = of_family("gemma3")
    place = next(place for place, prompt in enumerate(prompts) if isinstance(prompt, list) and len(prompt) > 2)
    ids = torch.tensor([prompts[place]])
    call = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": limits()}
    types = torch.zeros_like(ids)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": types}
    outputs = model.generate_batch([inputs], max_new_tokens=NEW_TOKENS, do_sample=False, **call)
    assert next(iter(outputs.values())).generated_tokens == texts[place]
    with pytest.raises(ValueError, match="`token_type_ids` without images"):
        model.generate_batch([inputs | {"token_type_ids": types + 1}], **call)
    with pytest.raises(ValueError, match="`token_type_ids` has 3 entries"):
        model.generate_batch([inputs | {"token_type_ids": types[:, :3]}], **call)


def test_no_images() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="`pixel_values` .* LlamaForCausalLM takes none"):
        model.generate_batch([{"input_ids": [5, 6]} | _PIXELS], assistant_model=NgramDraft(), tree=IRREGULAR)
