"""Forward hooks of the user's: named once, or refused; those of libraries are not spoken of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.heads import tiny_head
from support.models import noisy_copy, prompts, tiny_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from hf_specdec import MedusaConfig, MedusaHeads, NgramDraft, SpeculativeConfig
from hf_specdec.models.hooks import foreign_hooks


CALL = {"max_new_tokens": 6, "do_sample": False}
WHERE = f"steer ({__name__}) at model.layers.1"


def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Moves the last token of a forward alone, as activation steering does."""
    return torch.cat([output[:, :-1], output[:, -1:] + 3.0], dim=1)


def at_prompts_only(module: nn.Module, args: Any, kwargs: dict[str, Any], strength: float) -> None:
    """Of use in forwards of more than one token alone."""


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model()
    return target, noisy_copy(target, 0.05)


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def by_generate(target: PreTrainedModel, draft: Any, **config: Any) -> Any:
    options = {"assistant_model": draft, "speculative_config": SpeculativeConfig(tree="chain:2", **config)}
    return target.generate(**prompts(1, 9), **CALL, **options).tolist()


def by_batch(target: PreTrainedModel, draft: Any, **config: Any) -> Any:
    options = {"assistant_model": draft, "speculative_config": SpeculativeConfig(tree="chain:2", **config)}
    outputs = target.generate_batch(prompts(1, 9)["input_ids"].tolist(), **CALL, **options)
    return [output.generated_tokens for output in outputs.values()]


ways = pytest.mark.parametrize("run", [by_generate, by_batch])


@ways
@pytest.mark.parametrize("role", ["target", "draft"])
def test_hooks_are_named_once(models: tuple[PreTrainedModel, PreTrainedModel], role: str, run: Callable) -> None:
    model = models[role == "draft"]
    model.model.layers[1].register_forward_hook(steer)
    with pytest.warns(UserWarning, match="has forward hooks") as caught:
        run(*models)
    (warning,) = caught
    assert all(words in str(warning.message) for words in (f"the {role} LlamaForCausalLM", WHERE, "refuse"))
    with silence():
        run(*models)
    model.lm_head.register_forward_pre_hook(partial(at_prompts_only, strength=2.0), with_kwargs=True)
    with pytest.warns(UserWarning, match=rf"at_prompts_only \({__name__}\) at lm_head"):
        run(*models)


@ways
@pytest.mark.parametrize("role", ["target", "draft"])
def test_hooks_are_refused(models: tuple[PreTrainedModel, PreTrainedModel], role: str, run: Callable) -> None:
    with silence():
        run(*models, on_foreign_hooks="refuse")
    models[role == "draft"].model.layers[1].register_forward_hook(steer)
    before = torch.get_rng_state()
    with silence(), pytest.raises(ValueError) as caught:
        run(*models, on_foreign_hooks="refuse")
    assert all(words in str(caught.value) for words in ("`on_foreign_hooks='refuse'`", role, WHERE, "Remove"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_steered_text_differs(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """What the warning is for."""
    target, draft = models
    target.model.layers[1].register_forward_hook(steer)
    plain = target.generate(**prompts(1, 9), **CALL).tolist()
    with pytest.warns(UserWarning, match="the text differs"):
        assert by_generate(target, draft) != plain


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_hooks_of_heads(models: tuple[PreTrainedModel, PreTrainedModel], kind: str) -> None:
    config = MedusaConfig(hidden_size=32, vocab_size=models[0].config.vocab_size, num_heads=2, num_layers=1)
    head = tiny_head(models[0]) if kind == "eagle" else MedusaHeads(config).to(models[0].dtype)
    with silence():
        by_generate(models[0], head)
    head.register_forward_hook(steer)
    with pytest.raises(ValueError, match=rf"the draft {type(head).__name__} has forward hooks"):
        by_generate(models[0], head, on_foreign_hooks="refuse")


def test_hooks_of_every_module(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.warns(UserWarning, match=rf"lambda> \({__name__}\) at every module"):
            by_generate(*models)
    finally:
        handle.remove()


def test_a_manager_whose_model_gets_hooks_in_a_pause(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Requests that run already were checked before."""
    target, draft = models
    with target.continuous_batching_context_manager(assistant_model=draft, tree="chain:2") as manager:
        manager.add_request([5, 6, 7], max_new_tokens=200, streaming=True)
        manager.get_result()
        with pytest.warns(UserWarning, match="has forward hooks"):
            with manager.pause():
                target.model.layers[1].register_forward_hook(steer)
            manager.get_result()
            while not manager.get_result().is_finished():
                pass


def test_what_is_not_foreign(models: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """transformers' own, for `output_hidden_states`, which it installs in the first call and leaves; torch's norms."""
    target, draft = models
    torch.nn.utils.parametrizations.weight_norm(target.lm_head)
    asked = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    target.set_attn_implementation("eager")
    with silence():
        for _ in range(2):
            target.generate(**prompts(1, 9), **CALL, **asked, assistant_model=draft, tree="chain:2")
        target.generate(**prompts(1, 9), **CALL, assistant_model=tiny_head(target), tree="chain:2")
        target.generate(**prompts(1, 9), **CALL, assistant_model=NgramDraft())
    assert any(module._forward_hooks for module in target.modules())
    assert not foreign_hooks(target)


@pytest.mark.parametrize("value", ["ignore", True, None], ids=repr)
def test_the_option(value: Any) -> None:
    with pytest.raises(ValueError, match="`on_foreign_hooks` must be one of 'warn', 'refuse'"):
        SpeculativeConfig(on_foreign_hooks=value)
