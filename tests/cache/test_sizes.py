"""Sizes of K/V: those that are predicted are those that are allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits
from support.heads import tiny_head
from support.models import FAMILIES, LATENT, PARTIAL, UNEQUAL, noisy_copy, prompts, tiny_model
from torch import nn
from transformers import PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.batching.memory import bytes_per_token
from hf_specdec.cache.blocks import NUM_RESERVED
from hf_specdec.cache.sizes import layer_sizes, num_cached_layers
from hf_specdec.models import probe


CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | LATENT | UNEQUAL


def allocated(cache: Any) -> int:
    """Bytes of a cache's K/V, and of the keys of indexers."""
    return sum(states.nbytes for layer in cache.layers if layer.is_initialized for states in layer.states)


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v32"])
@pytest.mark.some_cases(10)
def test_what_is_predicted_is_allocated(kind: str) -> None:
    family, values = (KINDS | PARTIAL)[kind]
    model = tiny_model(family, **values)
    draft = noisy_copy(model)
    with model.init_continuous_batching(assistant_model=draft, continuous_batching_config=limits(20)) as manager:
        result = manager.get_result(manager.add_request([5, 6, 7], max_new_tokens=3, tree="[(0,)]"))
    assert result.error is None
    slots = (manager.engine.pool.num_blocks + NUM_RESERVED) * manager.engine.pool.block_size
    caches = manager.engine.target.cache, manager.engine.drafting.cache
    assert bytes_per_token([model, draft]) == {CPU: sum(map(allocated, caches)) // slots}
    assert all(cache.has_memory for cache in caches)


@pytest.mark.parametrize("eagle_version", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_in_their_targets_dtype(dtype: torch.dtype, eagle_version: int) -> None:
    target = tiny_model()
    head = tiny_head(target, eagle_version=eagle_version).to(dtype)
    of_head = bytes_per_token([target, head])[CPU] - bytes_per_token([target])[CPU]
    config = head.config.text_config
    assert of_head == 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8


@pytest.mark.parametrize("kind", UNEQUAL)
def test_layers_differ(kind: str) -> None:
    """The models have what makes the published ones hard; layers that reuse the K/V of others have none."""
    family, values = UNEQUAL[kind]
    model = tiny_model(family, **values)
    first, second = layer_sizes(model).values()
    assert first.key != second.key and num_cached_layers(model) == 2
    assert model.config.get_text_config().num_hidden_layers == (4 if kind == "gemma4" else 2)


@pytest.mark.parametrize("kind", LATENT)
def test_latents_are_smaller_than_keys_and_values(kind: str) -> None:
    family, values = LATENT[kind]
    for layer in layer_sizes(tiny_model(family, **values)).values():
        assert (layer.key, layer.value) == ((1, 24), (1, 4))


@pytest.mark.parametrize("kind", ["llama", "gemma4", "deepseek_v3"])
def test_nothing_of_the_model_changes(kind: str) -> None:
    """No random numbers, hooks, gradients, replaced forwards or checkpointing, in training mode either."""
    family, values = KINDS[kind]
    model = tiny_model(family, **values).train()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a forward of the model ran")

    for module in model.modules():
        module.register_forward_hook(fail)
        module.register_forward_pre_hook(fail)
    model.model.forward = fail
    model.gradient_checkpointing_enable()
    before = torch.get_rng_state(), model.config.to_dict(), model.config._attn_implementation
    found = layer_sizes(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (model.config.to_dict(), model.config._attn_implementation) == before[1:]
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert found == layer_sizes(tiny_model(family, **values))


def test_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = tiny_model(), []
    right = probe.probe
    monkeypatch.setattr(probe, "probe", lambda *args: found.append(args) or right(*args))
    for _ in range(2):
        layer_sizes(model)
    model.to(torch.float32)
    assert [layer.num_bytes for layer in layer_sizes(model).values()] == [2 * 2 * 8 * 4] * 2
    assert len(found) == 2


class ReadsData(nn.Module):
    """Projects to as many heads as its weights say."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states)[..., : 8 * int(self.factor.item())]


def halved(model: PreTrainedModel) -> PreTrainedModel:
    """A model that projects to one of two K/V heads, which only its data tell."""
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj, attention.v_proj = ReadsData(attention.k_proj), ReadsData(attention.v_proj)
        attention.num_key_value_groups = 4
    return model


def test_shapes_that_depend_on_data() -> None:
    """Such a model is run with its weights."""
    model = halved(tiny_model())
    assert [(layer.key, layer.value) for layer in layer_sizes(model).values()] == [((1, 8), (1, 8))] * 2
    text = model.generate_batch([[5, 6, 7]], assistant_model=NgramDraft(), max_new_tokens=5)
    assert all(output.error is None for output in text.values())


def test_quantized_weights() -> None:
    """Packed weights do not tell the size of their output; the layer does."""

    class Packed(nn.Module):
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.weight = nn.Parameter(torch.zeros(7, 1, dtype=torch.uint8), requires_grad=False)

    model = tiny_model()
    expected = layer_sizes(tiny_model())
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Packed(linear))
    assert layer_sizes(model) == expected


def test_a_model_that_cannot_be_run() -> None:
    """Its config is all that there is."""
    model = tiny_model("gemma4_text", **UNEQUAL["gemma4"][1])
    expected = layer_sizes(tiny_model("gemma4_text", **UNEQUAL["gemma4"][1]))
    model.model.layers[0].self_attn.o_proj = nn.Linear(5, 5)
    found = layer_sizes(model)
    assert {index: found[index] for index in expected} == expected


@pytest.mark.parametrize("kind", [*LATENT, *UNEQUAL])
@pytest.mark.some_cases(3)
def test_texts(kind: str) -> None:
    """`generate` and `generate_batch` beside plain `generate`, past windows."""
    family, values = KINDS[kind]
    model = tiny_model(family, dtype=torch.float64 if kind != "mimo_v2_flash" else torch.float32, **values)
    draft, inputs = noisy_copy(model), prompts(1, 9)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    tree = "[(0,), (1,), (0, 0)]"
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=draft, tree=tree), plain
    )
    (output,) = model.generate_batch(
        inputs["input_ids"].tolist(), assistant_model=draft, tree=tree, max_new_tokens=12
    ).values()
    assert output.generated_tokens == plain[0, 9:].tolist()
