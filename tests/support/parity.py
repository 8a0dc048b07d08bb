"""Equality with plain `generate`, token for token, on runs in which speculation had something to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import SpeculationMetrics, TokenTree

from .plain import greedy_text


IRREGULAR = "[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)]"
"""A tree whose levels branch unevenly; its best path is 4 deep."""


def plain_text(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """What plain greedy `generate` writes; refuses texts so uniform that a fault might not show in them."""
    text = greedy_text(model, inputs, **options)
    generated = text[:, inputs["input_ids"].shape[1] :] if "input_ids" in inputs else text
    assert len(generated.unique()) >= 5, f"not telling enough, choose another seed: {generated.tolist()}"
    return text


def assert_same_text(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    draft: Any,
    tree: Any = IRREGULAR,
    expected: torch.Tensor | None = None,
    **options: Any,
) -> SpeculationMetrics:
    """
    Asserts that the greedy text of a speculative call is that of the plain one (`expected`, if it is known), and that
    draft tokens were accepted on the way. Returns the metrics of the call.
    """
    if expected is None:
        expected = plain_text(model, inputs, **options)
    text = model.generate(**inputs, do_sample=False, assistant_model=draft, tree=tree, **options)
    assert text.tolist() == expected.tolist()
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0, "nothing was accepted: the test would not see a fault"
    return metrics


def expected_acceptance(
    draft: PreTrainedModel, text: torch.Tensor, prompt_length: int, tree: TokenTree, pads: int = 0
) -> list[int]:
    """
    The draft tokens that each step of one row must accept, by the definition of the tree: how far the row's greedy
    `text` (`[tokens]`, of which the first `pads` are padding) goes down the rank paths. The ranks come from one plain
    forward of the draft over the whole text.
    """
    with torch.no_grad():
        logits = draft(text[None, pads:]).logits[0]
    best = logits.argsort(dim=-1, descending=True).tolist()
    ranks = [0] * (pads + 1) + [
        order.index(token) for order, token in zip(best, text[pads + 1 :].tolist(), strict=False)
    ]
    accepted, length = [], prompt_length + 1  # the first token comes from the prefill
    while length < len(text):
        path: tuple[int, ...] = ()
        # A step's own token takes the last place.
        while length + len(path) < len(text) - 1 and (*path, ranks[length + len(path)]) in tree.paths:
            path += (ranks[length + len(path)],)
        accepted.append(len(path))
        length += len(path) + 1
    return accepted


def rows_and_trees(static: Any, dynamic: Any) -> pytest.MarkDecorator:
    """Parameters `batch_size` and `tree`: one row and three, with both trees; each value is fast once."""
    return pytest.mark.parametrize(
        "batch_size, tree",
        [
            pytest.param(1, static, id="one row, static"),
            pytest.param(3, dynamic, id="three rows, dynamic"),
            pytest.param(1, dynamic, id="one row, dynamic", marks=pytest.mark.slow),
            pytest.param(3, static, id="three rows, static", marks=pytest.mark.slow),
        ],
    )
