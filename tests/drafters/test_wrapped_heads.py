"""Heads that `torch.compile` or PEFT has wrapped are heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.heads import tiny_head
from support.models import prompts, tiny_model
from transformers import PreTrainedModel

from hf_specdec import EagleHead, MedusaConfig, MedusaHeads, last_metrics
from hf_specdec.drafters import EagleDrafter, MedusaDrafter, as_drafter, is_own_draft


peft = pytest.importorskip("peft", reason="peft is not installed")


def eagle(target: PreTrainedModel) -> EagleHead:
    return tiny_head(target)


def medusa(target: PreTrainedModel) -> MedusaHeads:
    config = target.config
    return MedusaHeads(MedusaConfig(hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_heads=3))


def with_lora(head: PreTrainedModel) -> torch.nn.Module:
    """With an adapter that changes what the head says."""
    targets = ["q_proj", "o_proj"] if isinstance(head, EagleHead) else r"heads\.\d\.blocks\.0"
    wrapped = peft.get_peft_model(head, peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
    return wrapped.eval()


@pytest.mark.parametrize(
    "wrap", [torch.compile, with_lora, lambda head: torch.compile(with_lora(head))], ids=["compile", "peft", "both"]
)
@pytest.mark.parametrize("make, drafter", [(eagle, EagleDrafter), (medusa, MedusaDrafter)])
@pytest.mark.some_cases(3)
def test_wrapped(
    make: Callable[[PreTrainedModel], PreTrainedModel],
    drafter: type,
    wrap: Callable[[PreTrainedModel], torch.nn.Module],
) -> None:
    target = tiny_model("llama")
    wrapped = wrap(make(target))
    assert is_own_draft(wrapped) and type(as_drafter(wrapped)) is drafter
    inputs, options = prompts(1, 6), {"max_new_tokens": 12, "do_sample": False}
    text = target.generate(**inputs, assistant_model=wrapped, **options)
    assert text.tolist() == target.generate(**inputs, **options).tolist()
    assert last_metrics().num_drafts > 0


def test_the_adapter_is_at_work() -> None:
    target = tiny_model("llama")
    torch.manual_seed(0)
    head = with_lora(tiny_head(target))
    states = torch.randn(1, 3, target.config.hidden_size)
    drafter = as_drafter(head)
    with torch.no_grad():
        with_adapter = drafter.head(hidden_states=states, inputs_embeds=states).logits
        with head.disable_adapter():
            without = drafter.head(hidden_states=states, inputs_embeds=states).logits
    assert not torch.allclose(with_adapter, without)


def test_what_is_none_of_these() -> None:
    for nothing in (3, "a name", torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2))):
        assert not is_own_draft(nothing)
        with pytest.raises(TypeError, match="an `EagleHead`, .*`GemmaAssistant`, or a drafter"):
            as_drafter(nothing)
