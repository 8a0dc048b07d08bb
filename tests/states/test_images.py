"""Vision-language models whose text model has states: prompts with an image write what they write without a tree."""

from __future__ import annotations

import pytest
import torch
from support.batches import limits
from support.hybrids import Oracle
from support.image_states import CONFIGS, inputs_of, model_of
from support.vision import VIDEO


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.some_cases(2)
def test_prompts_with_an_image(family: str, rows: int) -> None:
    model, inputs = model_of(family), inputs_of(family, rows)
    options = {"max_new_tokens": 20, "do_sample": False}
    text = model.generate(**inputs, **options).tolist()
    other_image = inputs | {"pixel_values": -3 * inputs["pixel_values"].flip(-1)}
    assert model.generate(**other_image, **options).tolist() != text
    for drafter in (Oracle(text, 1), model):
        found = model.generate(**inputs, **options, assistant_model=drafter, tree=Oracle.default_tree)
        assert found.tolist() == text


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_requests_with_images(family: str) -> None:
    """In flight beside texts, with so few blocks that states are read anew."""
    model, three = model_of(family), inputs_of(family, 3)
    images = []
    for row in range(3):
        shown = three["attention_mask"][row].bool()
        own = {"input_ids", "attention_mask", "mm_token_type_ids"}
        of_row = {name: value[row : row + 1, shown] if name in own else value for name, value in three.items()}
        for name in three.keys() - own:
            share = len(three[name]) // 3
            of_row[name] = three[name][row * share : (row + 1) * share]
        images.append(of_row)
    texts = [inputs["input_ids"][:, :7].clamp(max=VIDEO - 1) for inputs in images]
    prompts = [item for text, image in zip(texts, images, strict=True) for item in (text[0].tolist(), image)]
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = []
    for prompt in prompts:
        inputs = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
        expected.append(model.generate(**inputs, **options)[0].tolist())
    drafter = Oracle(expected, 1)
    config = limits(16)
    outputs = model.generate_batch(
        prompts, assistant_model=drafter, tree=Oracle.default_tree, continuous_batching_config=config, **options
    )
    found = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
    assert found == expected
