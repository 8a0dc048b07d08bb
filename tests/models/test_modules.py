"""Walking through a model without making up names."""

from __future__ import annotations

import torch
from support.models import tiny_model
from torch import nn

from hf_specdec.models.modules import buffers_of, modules_of, num_parameters_of, parameters_of


def test_modules_parameters_and_buffers_are_those_of_torch() -> None:
    """Each module once, though it be in two places; of tied weights every place."""
    model = tiny_model()
    model.another_name = model.model.layers[0]
    model.lm_head.weight = model.model.embed_tokens.weight
    model.nothing = None
    model.register_buffer("counts", torch.zeros(3))
    assert isinstance(model, nn.Module) and len(modules_of(model)) == len(set(modules_of(model)))
    assert set(modules_of(model)) == set(model.modules())
    assert {id(one) for one in parameters_of(modules_of(model))} == {id(one) for one in model.parameters()}
    assert sum(one is model.lm_head.weight for one in parameters_of(modules_of(model))) == 2
    assert num_parameters_of(model) == model.num_parameters()
    assert {id(one) for one in buffers_of(modules_of(model))} == {id(one) for one in model.buffers()}
