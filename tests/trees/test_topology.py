"""
Tokens are scored at the right place of the tree, and the accepted path's K/V are the ones that stay. A perfect draft
whose ranking is turned around is right on a known branch only; and with a wrong mask, position or cache, the text is
another.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import prompts, tiny_model
from support.parity import assert_same_text, plain_text
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import TokenTree, attention
from hf_specdec.cache import TreeCache
from hf_specdec.drafters import growth
from hf_specdec.generation.arguments import CallArguments
from hf_specdec.trees import Topology


STEPS = 7
PROMPT = 11


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("qwen3", attention_sharpness=3.0)


def demoting(model: PreTrainedModel, rank_at: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """
    A copy of the model whose best token has the rank `rank_at(positions)` instead of 0, at every position; the tokens
    that were below it move up.
    """

    def demote(module: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        scores, tokens = outputs.logits.sort(dim=-1, descending=True)
        positions = kwargs["position_ids"][:, -scores.shape[1] :]
        ranks = rank_at(positions).expand(scores.shape[:2])[..., None]
        places = torch.arange(scores.shape[-1]).expand(scores.shape)
        source = torch.where(places == ranks, 0, torch.where(places < ranks, places + 1, places))
        outputs.logits = torch.empty_like(scores).scatter(-1, tokens.gather(-1, source), scores)
        return outputs

    demoted = copy.deepcopy(model)
    demoted.register_forward_hook(demote, with_kwargs=True)
    return demoted


def always(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda positions: torch.full_like(positions, rank)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "rank_at, tree, accepted",
    [
        (always(0), "[(0,), (1,)]", 1),
        (always(1), "[(0,), (0, 0)]", 0),
        (always(1), "[(0,), (1,)]", 1),
        (always(1), "[(0,), (1,), (1, 0), (1, 1), (0, 0), (0, 1)]", 2),
        (always(1), "[(0,), (1,), (2,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)]", 3),
        (always(1), "[(1,), (1, 1), (1, 1, 1)]", 3),
        (always(2), "[(0,), (2,), (0, 0), (0, 2), (2, 0), (2, 2)]", 2),
        (always(3), "[(0,), (1,), (2,), (3,), (3, 3), (1, 0)]", 2),
        (lambda positions: positions % 2, "[(0,), (1,), (0, 1), (1, 0), (0, 1, 0), (1, 0, 1), (1, 0, 0)]", 3),
        (lambda positions: positions % 3, "[(0,), (1,), (2,), (0, 1), (1, 2), (2, 0), (0, 0)]", 2),
    ],
)
@pytest.mark.some_cases(10)
def test_the_right_branch_is_accepted(
    target: PreTrainedModel,
    rank_at: Callable[[torch.Tensor], torch.Tensor],
    tree: str,
    accepted: int,
    batch_size: int,
) -> None:
    inputs = prompts(batch_size, PROMPT, seed=1, padding=batch_size > 1)
    new_tokens = 1 + STEPS * (accepted + 1)
    expected = plain_text(target, inputs, max_new_tokens=new_tokens)
    text = target.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, assistant_model=demoting(target, rank_at), tree=tree
    )
    assert text.tolist() == expected.tolist()
    metrics = hf_specdec.last_metrics()
    assert metrics.accepted_per_step == [[accepted] * STEPS] * batch_size
    assert metrics.num_accepted_per_position == [STEPS * batch_size] * accepted


# ----------------------------------------------------------------------------------------- faults that have to be seen

TREE = TokenTree.parse("[(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)]")
NEW_TOKENS = 26


def changed(change: Callable[[Topology], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the topology of static trees."""
    original = Topology.of_tree

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def of_tree(tree: TokenTree | None, device: torch.device) -> Topology:
            topology = original(tree, device)
            return topology if tree is None else dataclasses.replace(topology, **change(topology))

        monkeypatch.setattr(Topology, "of_tree", of_tree)

    return patch


def replaced(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def without_path(cache: TreeCache, kept: list[list[int]]) -> None:
    """Keeps the first nodes, whichever were accepted."""


FAULTS = {
    "siblings are visible": changed(lambda topology: {"ancestors": torch.ones_like(topology.ancestors).tril()}),
    "parents are not visible": changed(
        lambda topology: {"ancestors": torch.eye(topology.num_nodes + 1, dtype=torch.bool)[None]}
    ),
    "a node does not see itself": changed(
        lambda topology: {"ancestors": topology.ancestors & ~torch.eye(topology.num_nodes + 1, dtype=torch.bool)}
    ),
    "positions count the nodes": changed(lambda topology: {"depths": torch.arange(topology.num_nodes + 1)[None]}),
    "positions are all the root's": changed(lambda topology: {"depths": torch.zeros_like(topology.depths)}),
    "positions are one too far": changed(lambda topology: {"depths": topology.depths + (topology.depths > 0)}),
    "the cache keeps the first nodes": replaced(TreeCache, "_move", without_path),
    "padding is visible": replaced(CallArguments, "visible", None),
    "the window is not seen": replaced(attention.registered, "layer_window", lambda module, kwargs: None),
}


# Llama has no window, and Mistral's soon leaves the padding behind.
UNSEEN = {("llama", "the window is not seen"), ("mistral", "padding is visible")}


@pytest.mark.parametrize(
    "family, fault", [pair for pair in itertools.product(("llama", "mistral"), FAULTS) if pair not in UNSEEN]
)
@pytest.mark.some_cases(4)
def test_faults_change_the_text(monkeypatch: pytest.MonkeyPatch, family: str, fault: str) -> None:
    model = tiny_model(family, attention_sharpness=3.0)
    inputs = prompts(3, PROMPT, seed=1, padding=True)
    draft = demoting(model, always(1))
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "assistant_model": draft,
        "tree": TREE,
    }
    expected = plain_text(model, inputs, max_new_tokens=NEW_TOKENS)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    FAULTS[fault](monkeypatch)
    assert model.generate(**inputs, **options).tolist() != expected.tolist()


DRAFT_FAULTS = {
    "siblings are visible": lambda level: {"ancestors": torch.ones_like(level.ancestors)},
    "parents are not visible": lambda level: {
        "ancestors": torch.eye(level.ancestors.shape[2], dtype=torch.bool)[None, -level.ancestors.shape[1] :]
    },
    "positions are all the same": lambda level: {"node_depths": torch.zeros_like(level.node_depths)},
    "nodes overwrite each other": lambda level: {"offset": 0},
}


@pytest.mark.parametrize("fault", [None, *DRAFT_FAULTS])
def test_faults_of_the_draft_change_the_acceptance_alone(
    monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel, fault: str | None
) -> None:
    draft = demoting(target, always(1))
    if fault is not None:
        original = growth.static._levels

        def levels(tree: TokenTree, device: torch.device) -> list[Any]:
            return [dataclasses.replace(level, **DRAFT_FAULTS[fault](level)) for level in original(tree, device)]

        monkeypatch.setattr(growth.static, "_levels", levels)
    inputs = prompts(2, PROMPT, seed=1, padding=True)
    metrics = assert_same_text(target, inputs, draft, TREE, max_new_tokens=1 + 4 * STEPS)
    assert (metrics.accepted_per_step == [[3] * STEPS] * 2) == (fault is None)
