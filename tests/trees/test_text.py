"""Trees as text."""

from __future__ import annotations

import pytest

from hf_specdec import DynamicTree, TokenTree
from hf_specdec.trees import AutoTree
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
    assert parse_tree(text) == tree


@pytest.mark.parametrize(
    "text, message",
    [
        ("chain:x", "'chain:x' is no tree. Write default, auto"),
        ("chain:2,3", "is no tree"),
        ("dynamic:3,2", "is no tree"),
        ("bush:3", "is no tree"),
        ("dynamic:3,2,60", "make only 10 candidates"),
        ("chain:0", "`length`: 0 is not an integer from 1"),
        ("[(0, 0)]", "not its parent"),
    ],
)
def test_what_is_no_tree(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tree(text)


def test_long_trees_are_named_by_their_size() -> None:
    assert shorten("chain:5") == "chain:5"
    assert shorten(str(TokenTree.from_branching((4, 2, 1)))) == "of 20, depth 3"
