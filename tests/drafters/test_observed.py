"""What an observer is shown of a call, against the text that the call wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.calls import TREE
from support.heads import tiny_head
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig
from hf_specdec.drafters import ObservedDrafter, as_drafter


DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=7)


def the_draft(kind: str, target: PreTrainedModel, draft: PreTrainedModel) -> Any:
    return {"model": draft, "head": tiny_head(target, aux_layer_ids=[0, 1, 1]), "ngram": NgramDraft()}[kind]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("tree", [TREE, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["model", "head", "ngram"])
@pytest.mark.some_cases(2)
def test_the_steps_tell_the_text(
    kind: str,
    tree: Any,
    do_sample: bool,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs_of: dict[int, dict[str, torch.Tensor]],
) -> None:
    """Every step's accepted tokens, with the step's own token behind them, are what was written after the prefill."""
    inputs = inputs_of[3]
    assistant, steps = the_draft(kind, target, draft), []
    observed = ObservedDrafter(as_drafter(assistant), lambda tree, paths: steps.append((tree, paths)))
    config = SpeculativeConfig(tree=tree)
    texts = []
    for each in (assistant, observed):
        torch.manual_seed(3)
        call = {"max_new_tokens": 30, "do_sample": do_sample, "speculative_config": config, "assistant_model": each}
        texts.append(target.generate(**inputs, **call))
    assert texts[0].equal(texts[1])
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0 or kind != "model"
    for row, text in enumerate(texts[0][:, inputs["input_ids"].shape[1] + 1 :].tolist()):
        position, accepted = 0, []
        for draft_tree, paths in steps:
            if paths[row] is None:
                continue
            drafted = [] if draft_tree is None else [draft_tree.tokens_list[row][node - 1] for node in paths[row]]
            assert text[position : position + len(drafted)] == drafted
            accepted.append(len(drafted))
            position += len(drafted) + 1
        assert position >= len(text)
        assert accepted == metrics.accepted_per_step[row]


def test_a_call_leaves_nothing_behind(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    observed = ObservedDrafter(as_drafter(draft), lambda tree, paths: None)
    before = set(vars(observed)), set(vars(observed.drafter))
    target.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=5, do_sample=False, assistant_model=observed)
    assert (set(vars(observed)), set(vars(observed.drafter))) == before


def test_what_the_drafter_refuses_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="rank"):
        observed = ObservedDrafter(NgramDraft(), lambda tree, paths: None)
        tree = [(target.config.vocab_size,)]
        target.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=5, assistant_model=observed, tree=tree)
