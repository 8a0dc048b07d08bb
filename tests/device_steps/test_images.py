"""Whole steps of `generate` after prompts with images."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import vision
from support.device_steps import Steps
from support.heads import tiny_head
from support.models import noisy_copy
from support.parity import IRREGULAR
from transformers import LlamaModel, LlavaForConditionalGeneration

from hf_specdec import SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.compat import CACHE


CALL = {"max_new_tokens": 14, "do_sample": False}


def of_family(name: str, rows: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and prompts with an image or two, in float32, padded to one length."""
    model = copy.deepcopy(vision.VISION_MODELS[name][0]()).float()
    inputs = vision.padded(vision.ragged_image_prompts(name)[:rows])
    return model, inputs | {"pixel_values": inputs["pixel_values"].float()}


@pytest.mark.parametrize(("kind", "rows"), [("draft", 1), ("head", 3)])
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(2)
def test_texts(name: str, rows: int, kind: str, steps: Steps) -> None:
    model, inputs = of_family(name, rows)
    text = model.generate(**inputs, **CALL)
    assistant = noisy_copy(model) if kind == "draft" else tiny_head(model)
    tree = IRREGULAR if kind == "draft" else TokenTree.from_branching((20, 3))
    accepted = []
    for graphs in ("auto", "auto", False):  # the second call by the engine of the first, the third by the host
        config = SpeculativeConfig(tree=tree, cuda_graphs=graphs)
        found = model.generate(**inputs, **CALL, assistant_model=assistant, speculative_config=config)
        assert found.tolist() == text.tolist()
        accepted.append(last_metrics().accepted_per_step)
    assert steps.captures == 1
    assert accepted[0] == accepted[1] == accepted[2]
    assert any(map(any, accepted[0])), "nothing was accepted: the test would not see a fault"


def test_texts_without_images(steps: Steps) -> None:
    """Positions of several axes that are those of a text."""
    model, inputs = of_family("qwen2_vl", 3)
    inputs = {name: inputs[name].clamp(max=vision.VIDEO - 1) for name in ("input_ids", "attention_mask")}
    text = model.generate(**inputs, **CALL)
    found = model.generate(**inputs, **CALL, assistant_model=noisy_copy(model), tree=IRREGULAR)
    assert found.tolist() == text.tolist()
    assert steps.captures == 1


class ScaledText(LlamaModel):
    """Reads a scale in every step."""

    def forward(self, *args: Any, scale: float | None = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if scale is not None:
            outputs.last_hidden_state = scale * outputs.last_hidden_state
        return outputs


class ScaledLlava(LlavaForConditionalGeneration):
    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        pixel_values: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        cache: Any = None,  # its name in other releases of transformers
        scale: float | None = None,
        **kwargs: Any,
    ) -> Any:
        kwargs[CACHE] = past_key_values if cache is None else cache
        return super().forward(input_ids, pixel_values, attention_mask, position_ids, scale=scale, **kwargs)


def test_inputs_of_every_step(steps: Steps) -> None:
    """Such calls run by the host, which hands them to every forward; requests in flight are refused."""
    model, inputs = of_family("llava", 1)
    draft = noisy_copy(model)
    model.__class__, model.model.language_model.__class__ = ScaledLlava, ScaledText
    inputs["scale"] = -1.0
    text = model.generate(**inputs, **CALL)
    found = model.generate(**inputs, **CALL, assistant_model=draft, tree=IRREGULAR)
    assert found.tolist() == text.tolist() and steps.captures == 0
    with pytest.raises(ValueError, match="`scale` .* reads it with every new token"):
        model.generate_batch([inputs], **CALL, assistant_model=draft, tree=IRREGULAR)


def test_lack_of_memory(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where captured steps have no memory for the prompt, the call runs by the host."""
    model, inputs = of_family("llava", 1)
    text, asked = model.generate(**inputs, **CALL), []

    def lacking(*args: Any) -> Any:
        asked.append(args)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("hf_specdec.engine.target.read_whole", lacking)
    found = model.generate(**inputs, **CALL, assistant_model=noisy_copy(model), tree=IRREGULAR)
    assert len(asked) == 1 and found.tolist() == text.tolist() and steps.captures == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_returned_cache(name: str, steps: Steps) -> None:
    """The cache goes on as that of plain `generate`."""
    model, inputs = of_family(name, 3)
    call = CALL | {"return_dict_in_generate": True, "max_new_tokens": 9}
    plain = model.generate(**inputs, **call)
    found = model.generate(**inputs, **call, assistant_model=noisy_copy(model), tree=IRREGULAR)
    assert steps.captures == 1
    for layer, expected in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        shown = inputs["attention_mask"].bool()[:, -expected.keys.shape[2] :]
        padding = torch.nn.functional.pad(shown, (expected.keys.shape[2] - shown.shape[1], 0), value=True)
        assert padding.shape[1] == layer.keys.shape[2]
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-3, atol=1e-3)


def test_images_without_places(steps: Steps) -> None:
    """The target's own error, as without a draft."""
    model, inputs = of_family("qwen3_vl", 1)
    inputs["pixel_values"] = inputs["pixel_values"][:20]
    with pytest.raises(Exception) as plain:  # noqa: PT011
        model.generate(**inputs, **CALL)
    with pytest.raises(type(plain.value)) as found:
        model.generate(**inputs, **CALL, assistant_model=noisy_copy(model), tree=IRREGULAR)
    assert str(found.value) == str(plain.value)
