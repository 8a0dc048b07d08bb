"""Static token trees, written as rank paths."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch


MAX_NODES = 1024
"""Most draft nodes that a tree may have."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class TokenTree:
    """
    A fixed tree of draft tokens under the root, written as rank paths.

    The path `(0,)` is the best child of the root, `(0, 1)` the second-best child of that child. Irregular trees are
    the normal case; nodes are kept in breadth-first order, siblings by rank, whatever the order they are given in. The
    root (the last committed token) is node 0 of everything below and is not written in `paths`; draft node `i` of
    `paths` is node `i + 1`.

    Args:
        paths (`Iterable[Iterable[int]]`):
            The rank paths of the draft nodes. Every prefix of a path must be there too.

    Raises:
        ValueError: for an empty tree, a path whose parent is missing, duplicate paths, negative or non-integer ranks,
            and more than 1,024 nodes.
        TypeError: if `paths` is not made of sequences of integers.

    Examples:

    ```python
    >>> from hf_specdec import TokenTree
    >>> tree = TokenTree.parse("[(0,), (1,), (0, 0)]")
    >>> tree.num_nodes, tree.depth, tree.parents
    (3, 2, (-1, 0, 0, 1))
    >>> TokenTree.chain(3).paths
    ((0,), (0, 0), (0, 0, 0))

    ```
    """

    paths: tuple[Path, ...]

    if TYPE_CHECKING:  # any iterables are accepted, and stored as tuples

        def __init__(self, paths: Iterable[Iterable[int]]) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _checked(self.paths))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}  # without cached properties

    @cached_property
    def _hash(self) -> int:
        """Hash of the paths, computed once because trees are looked up as keys for every row of steps in flight."""
        return hash(self.paths)

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def parse(cls, text: str) -> TokenTree:
        """
        Reads a tree from its string form, e.g. `"[(0,), (1,), (0, 0)]"`.

        Args:
            text (`str`): A Python literal: a list of tuples (or lists) of integers.

        Raises:
            ValueError: if the text is no such literal, or the tree is not valid.
            TypeError: if `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"`tree` must be a string here, but is {type(text).__name__}: {text!r}.")
        try:
            value = _literal(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(
                f"`tree` cannot be read: {cut(text)!r}. Write a list of rank paths such as '[(0,), (1,), (0, 0)]'."
            ) from error
        if not isinstance(value, (list, tuple)):
            raise ValueError(
                f"`tree` must be a list of rank paths, but {cut(text)!r} is a {type(value).__name__}. Write for "
                "example '[(0,), (1,), (0, 0)]'."
            )
        if value and all(isinstance(rank, int) for rank in value):
            raise ValueError(
                f"`tree` must be a list of rank paths, but {cut(text)!r} is a single path. Write "
                f"'[{text.strip()}]' with all its prefixes; a path of one rank needs its comma: '(0,)'."
            )
        try:
            return cls(value)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def chain(cls, length: int) -> TokenTree:
        """A chain: `length` draft tokens, each the best child of the one before."""
        _check_count("length", length)
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> TokenTree:
        """
        A regular tree: every node at depth `i` has `branching[i]` children (`from_branching((4, 2, 1))` has
        4 + 8 + 8 nodes).

        Raises:
            ValueError: if a factor is not a positive integer, or the tree would have more than 1,024 nodes.
            TypeError: if `branching` is no sequence.
        """
        if isinstance(branching, (str, bytes)) or not isinstance(branching, Iterable):
            raise TypeError(f"`branching` must be a sequence of factors, e.g. (4, 2, 1), but is {branching!r}.")
        branching = tuple(branching)
        if not branching:
            raise ValueError("`branching` is empty: give at least one factor, e.g. (4, 2, 1).")
        level: list[Path] = [()]
        paths: list[Path] = []
        for factor in branching:
            _check_count("branching", factor)
            if len(paths) + len(level) * factor > MAX_NODES:
                raise ValueError(
                    f"`branching`={branching} makes a tree of more than {MAX_NODES} nodes. Use smaller factors."
                )
            level = [path + (rank,) for path in level for rank in range(factor)]
            paths += level
        return cls(tuple(paths))

    # -------------------------------------------------------------------------------------------------- properties

    @cached_property
    def num_nodes(self) -> int:
        """Number of draft nodes; a forward has one more, the root."""
        return len(self.paths)

    @property
    def num_slots(self) -> int:
        """Slots after the root that a step with the tree may write: its nodes."""
        return self.num_nodes

    @cached_property
    def depth(self) -> int:
        """Number of levels of draft tokens."""
        return len(self.paths[-1])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, the root first: `parents[0]` is -1."""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, the root (0) first."""
        return (0, *(len(path) for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every node among the candidates for its place (0: the draft's best), the root (0) first."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, by rank."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def level_offsets(self) -> tuple[int, ...]:
        """`level_offsets[d]` is the first node of depth d; one more entry ends the last level."""
        return (*(self.depths.index(depth) for depth in range(self.depth + 1)), self.num_nodes + 1)

    @cached_property
    def has_rank_gaps(self) -> bool:
        """Whether some node lacks a better-ranked sibling (`[(1,)]`): legal for deterministic children only."""
        return any(
            [self.ranks[child] for child in children] != list(range(len(children))) for children in self.children
        )

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """
        Ancestor matrix `[nodes + 1, nodes + 1]`, bool: `[i, j]` says whether j is i or above i (what i may attend to).
        """
        matrix = torch.eye(self.num_nodes + 1, dtype=torch.bool, device="cpu")
        for node, parent in enumerate(self.parents[1:], start=1):
            matrix[node] |= matrix[parent]
        return matrix

    def truncate(self, depth: int) -> TokenTree | None:
        """The tree without the nodes deeper than `depth`; None when nothing is left."""
        if depth >= self.depth:
            return self
        return _truncated(self, depth) if depth > 0 else None

    # ------------------------------------------------------------------------------------------------------- text

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form, which `tree=` accepts again."""
        return {"paths": [list(path) for path in self.paths]}

    def __str__(self) -> str:
        return str(list(self.paths))

    def __len__(self) -> int:
        return self.num_nodes


@lru_cache(maxsize=256)
def _truncated(tree: TokenTree, depth: int) -> TokenTree:
    return TokenTree(tree.paths[: tree.level_offsets[depth + 1] - 1])


def _checked(paths: Iterable[Iterable[int]]) -> tuple[Path, ...]:
    """The paths in breadth-first order, or a `ValueError`/`TypeError` that names what is wrong."""
    example = "Write it as rank paths, e.g. [(0,), (1,), (0, 0)]."
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise TypeError(f"`tree` must be a list of rank paths, but is {cut(repr(paths))}. {example}")
    checked: list[Path] = []
    for path in paths:
        if isinstance(path, (str, bytes, Set, Mapping)) or not isinstance(path, Iterable):  # sets have no order
            raise TypeError(f"`tree` holds {path!r}, which is not a path. {example}")
        path = tuple(path)
        if not path:
            raise ValueError("`tree` holds the empty path (): the root is always there; list the draft tokens only.")
        for rank in path:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise ValueError(f"`tree` holds the path {path}, whose rank {rank!r} is not an integer. {example}")
            if rank < 0:
                raise ValueError(f"`tree` holds the path {path}, whose rank {rank} is negative: ranks count from 0.")
        checked.append(path)
        if len(checked) > MAX_NODES:
            raise ValueError(f"`tree` has more than {MAX_NODES} nodes. Use a smaller tree.")
    if not checked:
        raise ValueError(f"`tree` is empty: it needs at least one draft token. {example}")
    known = set(checked)
    if len(known) < len(checked):
        duplicate = next(path for i, path in enumerate(checked) if path in checked[:i])
        raise ValueError(f"`tree` holds the path {duplicate} twice. Remove one.")
    for path in checked:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"`tree` holds the path {path}, but not its parent {path[:-1]}. Add the parent.")
    return tuple(sorted(checked, key=lambda path: (len(path), path)))


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NODES:
        raise ValueError(f"`{name}`: {value!r} is not an integer from 1 to {MAX_NODES}.")


_literal_lock = threading.Lock()


def _literal(text: str) -> Any:
    """
    Runs `ast.literal_eval` in one thread at a time: two concurrent calls can fail in Python 3.11 with a `SystemError`
    about recursion depth (github.com/python/cpython/issues/106905). A call may still run beside one outside this
    module, and is then tried again.
    """
    with _literal_lock:
        for _ in range(10):
            try:
                return ast.literal_eval(text)
            except SystemError:
                continue
        return ast.literal_eval(text)


def cut(text: str, length: int = 80) -> str:
    """A text for messages: its beginning, if it is longer than `length`."""
    return text if len(text) <= length else text[: length - 1] + "…"
