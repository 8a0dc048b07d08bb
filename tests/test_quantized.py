"""Int8 weights by torchao, in the target or in the draft: texts are those of plain `generate`."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.parity import IRREGULAR
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from hf_specdec import DynamicTree, EagleHead, NgramDraft, last_metrics


pytest.importorskip("torchao", reason="torchao is not installed")

from torchao.quantization import Int8WeightOnlyConfig  # noqa: E402


HEADS = ("safeailab_eagle3", "safeailab_eagle1")


@lru_cache
def in_int8(with_lm_head: bool = False) -> PreTrainedModel:
    """The trained target, without its lm_head unless that is asked for."""
    others = {"modules_to_not_convert": []} if with_lm_head else {}
    config = TorchAoConfig(Int8WeightOnlyConfig(), **others)
    model = AutoModelForCausalLM.from_pretrained(TINY_TARGET, quantization_config=config).eval()
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert (type(model.lm_head.weight) is not torch.nn.Parameter) == with_lm_head
    return model


def draft_of(kind: str) -> Any:
    if kind == "n-grams":
        return NgramDraft()
    if kind == "rows of the target's lm_head":
        head = EagleHead.from_pretrained(TINY_TARGET.parent / HEADS[0])
        head.lm_head, head.config.has_lm_head = None, False
        return head
    if kind in HEADS:
        return EagleHead.from_pretrained(TINY_TARGET.parent / kind)
    return {"as it was": trained_target, "int8": in_int8}[kind]()


def prompts() -> dict[str, torch.Tensor]:
    return trained_tokenizer().pad({"input_ids": trained_prompts()["prompts"][:3]}, return_tensors="pt")


def assert_same_text(target: PreTrainedModel, draft: Any, tree: Any) -> None:
    call = {**prompts(), "max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    assert target.generate(**call, assistant_model=draft, tree=tree).equal(target.generate(**call))
    assert last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("tree", [IRREGULAR, DynamicTree(depth=4, top_k=3, num_nodes=10)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["as it was", "int8", "n-grams", *HEADS])
def test_quantized_target(kind: str, tree: Any) -> None:
    assert_same_text(in_int8(), draft_of(kind), tree)


@pytest.mark.parametrize("kind", ["as it was", "rows of the target's lm_head", *HEADS])
def test_the_lm_head_too(kind: str) -> None:
    assert_same_text(in_int8(with_lm_head=True), draft_of(kind), IRREGULAR)


def test_quantized_draft() -> None:
    assert_same_text(trained_target(), in_int8(), IRREGULAR)


def test_weights_are_rounded() -> None:
    """Else the tests above would say little."""
    ids = prompts()["input_ids"]
    with torch.no_grad():
        distance = (in_int8()(ids).logits - copy.deepcopy(trained_target())(ids).logits).abs().max()
    assert distance > 1e-3
