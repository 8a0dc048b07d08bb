"""Trees as values: reading, writing, the derived properties, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trees import paths_of_trees
from transformers import GenerationConfig

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.trees import MAX_NODES, Topology, as_tree


trees = paths_of_trees().map(TokenTree)


# ------------------------------------------------------------------------------------------------------------- reading


def test_parse_reads_the_notation() -> None:
    tree = TokenTree.parse(" [(0,), (1,), (0, 1), [0, 0]]\n")
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1))
    assert TokenTree.parse("((0,), (1,))") == TokenTree.parse("[(0,),(1,)]")


@given(trees)
def test_text_reads_back(tree: TokenTree) -> None:
    assert TokenTree.parse(str(tree)) == tree
    assert eval(repr(tree), {"TokenTree": TokenTree}) == tree


@given(trees, st.randoms())
def test_order_of_paths_does_not_matter(tree: TokenTree, random: Any) -> None:
    paths = [list(path) for path in tree.paths]
    random.shuffle(paths)
    shuffled = TokenTree(paths)
    assert shuffled == tree
    assert hash(shuffled) == hash(tree)
    copied = pickle.loads(pickle.dumps(tree))
    assert copied == tree and vars(copied) == {"paths": tree.paths}  # what is reckoned from them may differ elsewhere


@given(trees)
def test_as_tree_reads_every_form(tree: TokenTree) -> None:
    forms = (tree, str(tree), list(tree.paths), tree.paths, [list(path) for path in tree.paths], tree.to_dict())
    assert all(as_tree(form) == tree for form in forms)
    assert as_tree(json.loads(json.dumps(tree.to_dict()))) == tree


def test_as_tree_reads_dynamic_trees() -> None:
    tree = DynamicTree(depth=3, top_k=2, num_nodes=7)
    assert as_tree(tree) is tree
    assert as_tree(json.loads(json.dumps(tree.to_dict()))) == tree


def test_trees_are_frozen() -> None:
    for tree in (TokenTree.chain(2), DynamicTree(depth=1, top_k=1, num_nodes=1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(tree, dataclasses.fields(tree)[0].name, 3)


# ---------------------------------------------------------------------------------------------------------- properties


def test_properties_of_an_irregular_tree() -> None:
    tree = TokenTree.parse("[(0,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)]")
    assert (tree.num_nodes, len(tree), tree.depth) == (6, 6, 3)
    assert tree.parents == (-1, 0, 0, 1, 2, 2, 5)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.ranks == (0, 0, 2, 0, 0, 1, 0)
    assert tree.children == ((1, 2), (3,), (4, 5), (), (), (6,), ())
    assert tree.level_offsets == (0, 1, 3, 6, 7)
    assert tree.has_rank_gaps
    assert tree.ancestors.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]


@given(trees)
def test_properties_against_the_paths(tree: TokenTree) -> None:
    nodes = [(), *tree.paths]
    assert nodes == sorted(nodes, key=lambda path: (len(path), path)), "breadth-first, siblings by rank"
    assert tree.num_nodes == len(tree) == len(tree.paths)
    assert tree.depth == max(map(len, nodes))
    assert tree.depths == tuple(map(len, nodes))
    assert tree.parents == (-1, *(nodes.index(path[:-1]) for path in tree.paths))
    assert tree.ranks == (0, *(path[-1] for path in tree.paths))
    assert tree.children == tuple(
        tuple(child for child, path in enumerate(nodes) if path and path[:-1] == parent) for parent in nodes
    )
    assert tree.ancestors.dtype == torch.bool
    assert tree.ancestors.tolist() == [[path[: len(above)] == above for above in nodes] for path in nodes]
    assert len(tree.level_offsets) == tree.depth + 2
    for depth in range(tree.depth + 1):
        level = nodes[tree.level_offsets[depth] : tree.level_offsets[depth + 1]]
        assert level == [path for path in nodes if len(path) == depth]
    gaps = [path for path in tree.paths if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in nodes]
    assert tree.has_rank_gaps == bool(gaps)


@given(trees, st.integers(-1, 6))
def test_truncate(tree: TokenTree, depth: int) -> None:
    kept = tuple(path for path in tree.paths if len(path) <= depth)
    truncated = tree.truncate(depth)
    assert (truncated.paths if truncated is not None else ()) == kept


@given(st.integers(1, 40))
def test_chain(length: int) -> None:
    tree = TokenTree.chain(length)
    assert tree.num_nodes == tree.depth == length
    assert tree.parents == tuple(range(-1, length))
    assert set(tree.ranks) == {0}
    assert torch.equal(tree.ancestors, torch.ones(length + 1, length + 1).tril().bool())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_from_branching(branching: list[int]) -> None:
    tree = TokenTree.from_branching(branching)
    sizes = [end - start for start, end in zip(tree.level_offsets, tree.level_offsets[1:], strict=False)]
    expected = [1]
    for factor in branching:
        expected.append(expected[-1] * factor)
    assert sizes == expected
    assert not tree.has_rank_gaps
    for node, children in enumerate(tree.children):
        assert len(children) == (*branching, 0)[tree.depths[node]]


def test_from_branching_of_ones_is_a_chain() -> None:
    assert TokenTree.from_branching((1, 1, 1)) == TokenTree.chain(3)


def test_from_branching_of_a_number() -> None:
    with pytest.raises(TypeError, match="`branching` must be a sequence .* is 3"):
        TokenTree.from_branching(3)


# ------------------------------------------------------------------------------------------- within generation configs


@pytest.mark.parametrize(
    "tree",
    [
        "[(0,), (1,), (0, 0)]",
        [(0,), (0, 0)],
        TokenTree.chain(3),
        DynamicTree(depth=2, top_k=2, num_nodes=5),
        [(0, TokenTree.chain(2)), (6, None), (9, DynamicTree(depth=2, top_k=2, num_nodes=5)), (12, "[(0,)]")],
        ((0, TokenTree.chain(2)), [6, None]),
    ],
)
def test_tree_in_a_saved_generation_config(tree: Any, tmp_path: Path) -> None:
    config = GenerationConfig(max_new_tokens=5, tree=tree)
    assert "tree" in repr(config)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert as_tree(loaded.tree) == as_tree(tree)
    assert loaded.max_new_tokens == 5


def test_speculative_config_in_a_saved_generation_config(tmp_path: Path) -> None:
    speculative = SpeculativeConfig(tree="[(0,), (1,)]", verification="target", disable_by_batch_size=8)
    config = GenerationConfig(speculative_config=speculative)
    assert "disable_by_batch_size" in repr(config)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert SpeculativeConfig.from_generation_config(loaded) == speculative


def test_untouched_generation_configs_say_nothing_of_trees(tmp_path: Path) -> None:
    config = GenerationConfig(max_new_tokens=5)
    assert config.tree is None and config.speculative_config is None
    config.save_pretrained(tmp_path)
    assert "tree" not in (tmp_path / "generation_config.json").read_text()


# ------------------------------------------------------------------------------------------------------------ refusals

BAD_TREES = [
    ([(0,), (1, 0)], ValueError, r"\(1, 0\), but not its parent \(1,\)"),
    ([(0, 0)], ValueError, r"\(0, 0\), but not its parent"),
    ([(0,), (1,), (0,)], ValueError, r"\(0,\) twice"),
    ([(0,), [0]], ValueError, "twice"),
    ([(-1,)], ValueError, "-1 is negative"),
    ([(0,), (0, -2)], ValueError, "-2 is negative"),
    ([(0.0,)], ValueError, "0.0 is not an integer"),
    ([("0",)], ValueError, "'0' is not an integer"),
    ([(True,)], ValueError, "True is not an integer"),
    ([(None,)], ValueError, "None is not an integer"),
    ([], ValueError, "empty"),
    ((), ValueError, "empty"),
    ([()], ValueError, "empty path"),
    ([(0,), ()], ValueError, "empty path"),
    ([0], TypeError, "0, which is not a path"),
    (["0"], TypeError, "'0', which is not a path"),
    ([{0}, {1, 0}], TypeError, r"\{0\}, which is not a path"),
    ([(rank,) for rank in range(MAX_NODES + 1)], ValueError, "more than 1024 nodes"),
    (3, TypeError, "int: 3"),
    ({"depth": 3}, TypeError, "dict"),
    ({(0,), (1,)}, TypeError, "set"),
    (torch.zeros(1, 1), TypeError, "Tensor"),
    ("", ValueError, "cannot be read"),
    ("[(0,), (0, 0", ValueError, "cannot be read"),
    ("[(0,), x]", ValueError, "cannot be read"),
    ("__import__('os')", ValueError, "cannot be read"),
    ("(" * 5000, ValueError, "cannot be read"),
    ("3", ValueError, "is a int|is an int"),
    ("{(0,)}", ValueError, "is a set"),
    ("(0, 0)", ValueError, "single path"),
    ("[(0)]", ValueError, "single path"),
    ("[]", ValueError, "empty"),
    ("[(0,), 5]", ValueError, "5, which is not a path"),
    ("[(0,), (1, 0)]", ValueError, "not its parent"),
    ("[(0,), (0,)]", ValueError, "twice"),
    ("[(-1,)]", ValueError, "negative"),
    ("[(0.5,)]", ValueError, "not an integer"),
]


@pytest.mark.parametrize("tree, error, message", BAD_TREES, ids=lambda value: repr(value)[:40])
def test_bad_trees_are_refused(tree: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"(?s)`tree`.*({message})"):
        as_tree(tree)
    with pytest.raises(error, match=message):
        SpeculativeConfig(tree=tree)


def test_parse_takes_text_only() -> None:
    with pytest.raises(TypeError, match="`tree` must be a string here, but is list"):
        TokenTree.parse([(0,)])


@given(trees, st.data())
def test_a_tree_without_one_of_its_inner_nodes_is_refused(tree: TokenTree, data: st.DataObject) -> None:
    inner = [path for node, path in enumerate(tree.paths, start=1) if tree.children[node]]
    if not inner:
        return
    removed = data.draw(st.sampled_from(inner))
    with pytest.raises(ValueError, match="but not its parent"):
        TokenTree([path for path in tree.paths if path != removed])


def test_largest_trees() -> None:
    assert TokenTree([(rank,) for rank in range(MAX_NODES)]).num_nodes == MAX_NODES
    assert TokenTree.chain(MAX_NODES).depth == MAX_NODES
    assert TokenTree.from_branching((4, 255)).num_nodes == MAX_NODES
    for refused in (lambda: TokenTree.chain(MAX_NODES + 1), lambda: TokenTree.from_branching((4, 256))):
        with pytest.raises(ValueError, match="1024"):
            refused()


@pytest.mark.parametrize("length", [0, -1, 1.0, True, "3", None])
def test_bad_chains_are_refused(length: Any) -> None:
    with pytest.raises(ValueError, match="`length`"):
        TokenTree.chain(length)


@pytest.mark.parametrize("branching", [(), (0,), (2, -1), (2, 1.5), (True,), ("2",)])
def test_bad_branching_is_refused(branching: Any) -> None:
    with pytest.raises(ValueError, match="`branching`"):
        TokenTree.from_branching(branching)


# ------------------------------------------------------------------------------------------------------- dynamic trees


@pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2", None])
def test_bad_dynamic_trees_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`DynamicTree\({name}=.*`{name}` must be a positive integer"):
        DynamicTree(**{"depth": 3, "top_k": 3, "num_nodes": 3} | {name: value})


def test_dynamic_trees_cannot_have_more_nodes_than_candidates() -> None:
    assert DynamicTree(depth=3, top_k=2, num_nodes=10).num_candidates == 10  # 2 + 4 + 4
    assert DynamicTree(depth=8, top_k=2, num_nodes=3) == DynamicTree(depth=3, top_k=2, num_nodes=3)
    with pytest.raises(ValueError, match="num_nodes=11.*only 10 candidates"):
        DynamicTree(depth=3, top_k=2, num_nodes=11)
    with pytest.raises(ValueError, match="num_nodes=1025.*at most 1024"):
        DynamicTree(depth=30, top_k=30, num_nodes=1025)


def test_dynamic_trees_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        DynamicTree(3, 2, 10)


# ------------------------------------------------------------------------------------------------------------ Topology


@st.composite
def parents_of_rows(draw: st.DrawFn) -> list[list[int]]:
    """Parents of the nodes of one to three rows; a parent comes before its children."""
    num_nodes = draw(st.integers(0, 12))
    rows = draw(st.integers(1, 3))
    return [[0, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes + 1))] for _ in range(rows)]


def naive_path(parents: list[int], node: int) -> list[int]:
    """From a node up to the root."""
    return [node] if node == 0 else [node, *naive_path(parents, parents[node])]


@given(parents_of_rows())
def test_topology_of_parents(rows: list[list[int]]) -> None:
    paths = [[naive_path(parents, node) for node in range(len(parents))] for parents in rows]
    depth = max(len(path) - 1 for row in paths for path in row)
    topology = Topology.of_parents(torch.tensor(rows), depth)
    assert (topology.rows, topology.num_nodes, topology.depth) == (len(rows), len(rows[0]) - 1, depth)
    assert topology.depths.tolist() == [[len(path) - 1 for path in row] for row in paths]
    nodes = range(len(rows[0]))
    assert topology.ancestors.tolist() == [[[above in path for above in nodes] for path in row] for row in paths]
    for row, parents in enumerate(rows):
        for node in nodes:
            children = [child for child in nodes if child > 0 and parents[child] == node]
            assert topology.children_of(row, node) == children


@given(trees)
def test_topology_of_a_static_tree(tree: TokenTree) -> None:
    topology = Topology.of_tree(tree, torch.device("cpu"))
    assert torch.equal(topology.ancestors[0], tree.ancestors)
    assert topology.depths.tolist() == [list(tree.depths)]
    assert topology.parents.tolist() == [[0, *tree.parents[1:]]]
    assert topology.depth == tree.depth
    for row in (0, 4):  # one topology serves all rows of a batch
        assert [topology.children_of(row, node) for node in range(len(tree) + 1)] == list(map(list, tree.children))


def test_topology_of_the_root_alone() -> None:
    topology = Topology.of_tree(None, torch.device("cpu"))
    assert (topology.num_nodes, topology.depth) == (0, 0)
    assert topology.ancestors.tolist() == [[[True]]]
    assert topology.children_of(0, 0) == []


def test_threads_parse_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's parser counts the recursion of all threads together; and a stranger may be at it, too."""
    inside, most, evaluate = [], [], ast.literal_eval

    def watched(text: str) -> Any:
        inside.append(text)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        if len(most) % 3 == 0:
            raise SystemError("AST constructor recursion depth mismatch (before=48, after=44)")
        return evaluate(text)

    monkeypatch.setattr(ast, "literal_eval", watched)
    trees: list[TokenTree] = []
    threads = [threading.Thread(target=lambda: trees.append(TokenTree.parse("[(0,), (0, 0)]"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trees == [TokenTree.chain(2)] * 6
    assert max(most) == 1
