"""Noticing that weights have changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.models import tiny_model
from transformers import PreTrainedModel

from hf_specdec.engine.weights import WeightsVersion


def weight_of(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.model.layers[1].mlp.up_proj.weight


def by_data(model: PreTrainedModel) -> None:
    weight_of(model).data.add_(1.0)


def in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        weight_of(model).add_(1.0)


def one_value(model: PreTrainedModel) -> None:
    with torch.no_grad():
        weight_of(model)[3, 3] += 1.0


def moved(model: PreTrainedModel) -> None:
    weight_of(model).data = weight_of(model).data.clone()


def a_buffer(model: PreTrainedModel) -> None:
    model.scales.data.add_(1)


@pytest.mark.parametrize("change", [by_data, in_inference_mode, one_value, moved, a_buffer])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_changes(change: Callable[[PreTrainedModel], None], dtype: torch.dtype) -> None:
    model, other = tiny_model().to(dtype), tiny_model(seed=1)
    model.register_buffer("scales", torch.zeros(3, dtype=torch.int8))
    version = WeightsVersion()
    assert not version.has_changed([model, other]) and not version.has_changed([model, other])
    model(torch.tensor([[3, 4, 5]]))
    assert not version.has_changed([model, other])
    change(model)
    assert version.has_changed([model, other]) and not version.has_changed([model, other])


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, version = tiny_model(), WeightsVersion()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert not version.has_changed([model])
    with adapted.disable_adapter():
        assert version.has_changed([model])
    assert version.has_changed([model])
