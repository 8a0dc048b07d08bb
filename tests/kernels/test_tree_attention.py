"""The kernels' tree attention inside `generate`, in place of the plain one: texts stay those of plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_specdec
import hf_specdec_kernels
from hf_specdec import attention


def kernel_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_context: attention.TreeContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What the library registers with transformers, but for tree forwards by the kernels' operator."""
    if tree_context is None:
        return attention.tree_attention(module, query, key, value, attention_mask, **kwargs)
    tree_context.was_used = True
    kernel_attention.calls += 1
    first_slots = None
    if tree_context.visible is not None:
        first_slots = (~tree_context.visible).sum(dim=1)
    out = hf_specdec_kernels.tree_attention(
        query,
        key,
        value,
        torch.tensor(tree_context.lengths),
        hf_specdec_kernels.pack_ancestors(tree_context.ancestors),
        num_nodes=tree_context.ancestors.shape[2],
        first_slots=first_slots,
        query_depths=tree_context.query_depths,
        node_depths=tree_context.node_depths,
        sinks=kwargs.get("s_aux"),
        scale=kwargs.get("scaling"),
        window=attention.layer_window(module, kwargs),
        softcap=kwargs.get("softcap"),
    )
    return out, None


TREES = (IRREGULAR, hf_specdec.DynamicTree(depth=3, top_k=3, num_nodes=9))


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    # So low a cap that it matters to a random model. (Before 5.23 transformers' sdpa leaves it out.)
    "gemma2": {"attn_logit_softcapping": 0.05, "attn_implementation": "eager"},
    "gemma3_text": {},
    "mistral": {},
    "gpt_oss": {},
}


@pytest.mark.parametrize("tree", TREES, ids=["static", "dynamic"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", MODELS)
def test_texts_are_those_of_plain_generate(
    family: str, batch_size: int, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_model(family, **MODELS[family])
    draft = noisy_copy(target, noise=0.05)
    inputs = prompts(batch_size, 9, padding=batch_size > 1)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, kernel_attention)
    kernel_attention.calls = 0
    assert_same_text(target, inputs, draft, tree=tree, max_new_tokens=30)
    assert kernel_attention.calls > 20
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("mistake", ["window", "first_slots", "softcap", "sinks"])
def test_options_matter(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option the texts differ: the models above do need it."""
    family = {"window": "mistral", "first_slots": "llama", "softcap": "gemma2", "sinks": "gpt_oss"}[mistake]
    target = tiny_model(family, **MODELS[family])
    right = hf_specdec_kernels.tree_attention
    monkeypatch.setattr(
        hf_specdec_kernels, "tree_attention", lambda *args, **kwargs: right(*args, **{**kwargs, mistake: None})
    )
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, attention.NAME, kernel_attention)
    kernel_attention.calls = 0
    with pytest.raises(AssertionError):
        draft, inputs = noisy_copy(target, noise=0.05), prompts(3, 20, padding=True)
        assert_same_text(target, inputs, draft, max_new_tokens=30)
