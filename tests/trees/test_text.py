"""Trees as text."""

from __future__ import annotations

import pytest

from hf_specdec import DynamicTree, TokenTree
from hf_specdec.trees import AutoTree, TreeSchedule, as_tree
from hf_specdec.trees.text import parse_tree, shorten


@pytest.mark.parametrize(
    "text, tree",
    [
        ("default", None),
        ("auto", AutoTree()),
        ("[(0,), (0, 0)]", TokenTree.chain(2)),
        ("chain:2", TokenTree.chain(2)),
        (" branching:2,1 ", TokenTree.from_branching((2, 1))),
        ("dynamic:3,2,6", DynamicTree(depth=3, top_k=2, num_nodes=6)),
    ],
)
def test_trees(text: str, tree: object) -> None:
    """As on the command line, so in a call, whose default is None."""
    assert parse_tree(text) == tree
    if text != "default":
        assert as_tree(text) == tree


@pytest.mark.parametrize(
    "text, message",
    [
        ("chain:x", "'chain:x' is no tree. Write auto, rank paths"),
        ("chain:2,3", "is no tree"),
        ("dynamic:3,2", "is no tree"),
        ("bush:3", "is no tree"),
        ("dynamic:3,2,60", "make only 10 candidates"),
        ("chain:0", "`length`: 0 is not an integer from 1"),
        ("[(0, 0)]", "not its parent"),
    ],
)
def test_what_is_no_tree(text: str, message: str) -> None:
    for read in (parse_tree, as_tree):
        with pytest.raises(ValueError, match=message) as caught:
            read(text)
        assert "`tree`" in str(caught.value) or "not its parent" in message


def test_text_in_a_schedule() -> None:
    entries = ((0, TokenTree.chain(2)), (512, DynamicTree(depth=2, top_k=2, num_nodes=3)), (900, None))
    assert as_tree([(0, "chain:2"), (512, "dynamic:2,2,3"), (900, None)]) == TreeSchedule(entries)


def test_long_trees_are_named_by_their_size() -> None:
    assert shorten("chain:5") == "chain:5"
    assert shorten(str(TokenTree.from_branching((4, 2, 1)))) == "of 20, depth 3"
