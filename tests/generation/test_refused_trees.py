"""Trees, settings and drafts that cannot be served are refused by name, and leave everything as it was."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import assert_same_calls
from support.models import VOCAB, noisy_copy, prompts
from support.refusals import assert_refused, named
from transformers import (
    PreTrainedModel,
)

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree


BAD_TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not closed": ("[(0,), (0, 0", ("[(0,), (0, 0", "[(0,), (1,), (0, 0)]")),
    "a word": ("deep", ("deep", "[(0,), (1,), (0, 0)]")),
    "an expression": ("[(0,)] * 2", ("[(0,)] * 2", "[(0,), (1,), (0, 0)]")),
    "a call": ("__import__('os').getcwd()", ("[(0,), (1,), (0, 0)]",)),
    "an empty string": ("", ("[(0,), (1,), (0, 0)]",)),
    "a number in a string": ("3", ("int", "[(0,), (1,), (0, 0)]")),
    "a single path": ("(0, 0)", ("(0, 0)", "a single path", "[(0, 0)]")),
    "a missing comma": ("[(0)]", ("(0,)", "comma")),
    "no nodes": ([], ("empty", "at least one")),
    "no nodes in a string": ("[]", ("empty", "at least one")),
    "the root": ([()], ("()", "the root is always there")),
    "a missing parent": ([(0,), (1, 0)], ("(1, 0)", "(1,)", "Add the parent")),
    "a missing grandparent": ("[(0, 0, 0), (0, 0)]", ("(0, 0)", "(0,)", "Add the parent")),
    "a duplicate": ([(0,), (0, 1), (0, 1)], ("(0, 1)", "twice", "Remove one")),
    "a negative rank": ([(0,), (-1,)], ("(-1,)", "negative", "from 0")),
    "a rank that is half": ([(0,), (0.5,)], ("0.5", "not an integer")),
    "a rank that is a bool": ([(0,), (0, True)], ("True", "not an integer")),
    "a rank that is a string": ([("0",)], ("'0'", "not an integer")),
    "too many nodes": ([(rank,) for rank in range(1025)], ("1024", "smaller")),
    "a rank beyond the vocabulary": ([(VOCAB,)], (str(VOCAB), "vocabulary", "narrower")),
    "more branches than tokens": (DynamicTree(depth=2, top_k=VOCAB + 1, num_nodes=4), (str(VOCAB), "vocabulary")),
    "a schedule that begins late": ([(5, "[(0,)]"), (9, "[(0,)]")], ("begin with 0 and rise", "[5, 9]")),
    "a schedule that falls": ([(0, "[(0,)]"), (9, "[(0,)]"), (7, None)], ("begin with 0 and rise", "[0, 9, 7]")),
    "a schedule without trees": ([(0, None)], ("must name a tree somewhere",)),
    "a schedule with a path": ([(0, "[(0,)]"), (0, 1)], ("(0, 1)", "no entry of a schedule")),
    "a schedule in a schedule": ([(0, [(0, "[(0,)]")])], ("a schedule within a schedule",)),
    "a schedule with a bad tree": ([(0, "[(0, 0)]")], ("(0, 0)", "parent")),
}


@pytest.mark.parametrize("name", BAD_TREES)
@pytest.mark.parametrize("through", ["tree", "speculative_config"])
def test_bad_trees(target: PreTrainedModel, draft: PreTrainedModel, name: str, through: str) -> None:
    tree, words = BAD_TREES[name]
    value = tree if through == "tree" else {"tree": tree}
    for assistant in (draft, NgramDraft()):
        assert_refused(target, {"assistant_model": assistant, through: value}, "`tree", *words)


@pytest.mark.parametrize("tree", ["[(0,,", [(0, 1)]])
def test_the_frames_of_an_error_are_those_of_the_call(target: PreTrainedModel, tree: Any) -> None:
    """
    A notebook shows all frames: those that read the tree, and the parser's own error, are left out. What stays are the
    wrappers of `generate`, which loads named drafts, and of its checks.
    """
    with pytest.raises(ValueError, match="`tree`") as caught:
        target.generate(torch.tensor([[3]]), assistant_model=NgramDraft(), tree=tree, max_new_tokens=2)
    own = str(Path(hf_specdec.__file__).parent)
    assert sum(frame.filename.startswith(own) for frame in traceback.extract_tb(caught.tb)) <= 5
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("tree", [3, 0.5, True, {"paths": [[0]], "depth": 2}, {0, 1}, b"[(0,)]", object()], ids=named)
def test_trees_of_the_wrong_type(target: PreTrainedModel, draft: PreTrainedModel, tree: Any) -> None:
    options = {"assistant_model": draft, "tree": tree}
    assert_refused(target, options, "`tree`", type(tree).__name__, "a string", error=TypeError)


@pytest.mark.parametrize("tree", [["0"], ["(0,)"], [0, 1], [(0,), 1], [None]], ids=repr)
def test_paths_of_the_wrong_type(target: PreTrainedModel, draft: PreTrainedModel, tree: Any) -> None:
    wrong = next(path for path in tree if not isinstance(path, tuple))
    options = {"assistant_model": draft, "tree": tree}
    assert_refused(target, options, "`tree`", repr(wrong), "not a path", error=TypeError)


def test_a_rank_within_the_vocabulary_is_taken(target: PreTrainedModel) -> None:
    """The last rank there is, with all better ones: whatever the target says is among the children."""
    tree = [(rank,) for rank in range(VOCAB)]
    _, metrics = assert_same_calls(target, noisy_copy(target, noise=3.0), prompts(1, 6), {"max_new_tokens": 8}, tree)
    assert metrics.accepted_per_step == [[1, 1, 1, 0]]


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "3", None], ids=repr)
@pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
def test_limits_of_dynamic_trees(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}.*positive integer"):
        DynamicTree(**({"depth": 2, "top_k": 2, "num_nodes": 4} | {name: value}))


def test_dynamic_trees_that_cannot_be_filled() -> None:
    with pytest.raises(ValueError, match="num_nodes=1025.*1024.*Use fewer"):
        DynamicTree(depth=9, top_k=32, num_nodes=1025)
    with pytest.raises(ValueError, match="num_nodes=7.*depth=2.*top_k=2.*6 candidates.*Raise `depth` or `top_k`"):
        DynamicTree(depth=2, top_k=2, num_nodes=7)


def test_a_tree_without_a_draft(target: PreTrainedModel) -> None:
    """It would decode plainly, and silently."""
    assert_refused(target, {"tree": "[(0,)]"}, "`tree`", "[(0,)]", "assistant_model", "NgramDraft")
    assert_refused(target, {"tree": "[(0,)]", "do_sample": True}, "`tree`", "assistant_model")
    options = {"speculative_config": SpeculativeConfig(tree="[(0,)]")}
    assert_refused(target, options, "`speculative_config`", "assistant_model", "NgramDraft")


def test_a_tree_beside_a_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options = {"assistant_model": draft, "tree": "[(0,)]", "speculative_config": SpeculativeConfig(tree="[(1,)]")}
    assert_refused(target, options, "`tree`", "[(0,)]", "`speculative_config`", "give one of them")


def test_configs_of_the_wrong_kind(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    call = {"assistant_model": draft}
    for wrong in ("[(0,)]", [(0,)], TokenTree.chain(2), 3):
        words = ("`speculative_config`", type(wrong).__name__, "SpeculativeConfig")
        assert_refused(target, call | {"speculative_config": wrong}, *words, error=TypeError)
    unknown = {"tree": "[(0,)]", "depth": 3}
    assert_refused(target, call | {"speculative_config": unknown}, "`speculative_config`", "depth", "draft_sampling")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "greedy with rejection": (
        {"draft_sampling": "greedy", "verification": "rejection"},
        ("draft_sampling='greedy'", "verification='rejection'", "verification='target'", "draft_sampling='sample'"),
    ),
    "draft_sampling": ({"draft_sampling": "beam"}, ("`draft_sampling`", "'beam'", "'auto', 'greedy', 'sample'")),
    "verification": ({"verification": "typical"}, ("`verification`", "'typical'", "'auto', 'target', 'rejection'")),
    "negative batch size": ({"disable_by_batch_size": -1}, ("`disable_by_batch_size`", "-1", "from 0 on")),
    "half a batch size": ({"disable_by_batch_size": 1.5}, ("`disable_by_batch_size`", "1.5", "integer")),
    "a batch size that is a bool": ({"disable_by_batch_size": True}, ("`disable_by_batch_size`", "True", "integer")),
    "cuda_graphs": ({"cuda_graphs": "always"}, ("`cuda_graphs`", "'auto', True or False", "'always'")),
    "compile": ({"compile": "max"}, ("`compile`", "True or False", "'max'")),
    "compile without graphs": (
        {"compile": True, "cuda_graphs": False},
        ("`compile=True`", "`cuda_graphs=False`"),
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(target: PreTrainedModel, draft: PreTrainedModel, name: str) -> None:
    """When a `SpeculativeConfig` is made, and when a saved one is read."""
    values, words = BAD_CONFIGS[name]
    with pytest.raises(ValueError) as caught:
        SpeculativeConfig(**values)
    assert all(word in str(caught.value) for word in words)
    assert_refused(target, {"assistant_model": draft, "speculative_config": values}, *words)


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafters_without_probabilities(target: PreTrainedModel, do_sample: bool) -> None:
    call = {"assistant_model": NgramDraft(), "do_sample": do_sample}
    for asked, words in (
        ({"verification": "rejection"}, ("verification='rejection'", "'auto' or 'target'")),
        ({"draft_sampling": "sample"}, ("draft_sampling='sample'", "'auto' or 'greedy'")),
        ({"draft_sampling": "sample", "verification": "rejection"}, ("draft_sampling='sample'", "'auto' or 'greedy'")),
    ):
        assert_refused(target, call | {"speculative_config": SpeculativeConfig(**asked)}, *words)


@pytest.mark.parametrize("tree", ["[(1,)]", "[(0,), (2,)]", "[(0,), (0, 1)]"])
def test_rank_gaps_with_drawn_children(target: PreTrainedModel, draft: PreTrainedModel, tree: str) -> None:
    """Taking the second draw only would bias the output. Children that are not drawn may have gaps."""
    words = ("`tree`", tree, "rank gaps", "close the gaps")
    assert_refused(target, {"assistant_model": draft, "tree": tree, "do_sample": True}, *words)
    drawn = SpeculativeConfig(tree=tree, draft_sampling="sample")
    assert_refused(target, {"assistant_model": draft, "speculative_config": drawn}, *words)
    chosen = SpeculativeConfig(tree=tree, draft_sampling="greedy")
    for options in ({"tree": tree}, {"speculative_config": chosen, "do_sample": True}):
        target.generate(**prompts(1, 6), max_new_tokens=8, assistant_model=draft, **options)
        assert hf_specdec.last_metrics().num_drafts > 0
