"""The tree of one step: its shape, and the tokens that a drafter put into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch

from ..kernels import DEVICES, kernels_are_installed
from .token_tree import TokenTree


@dataclass(frozen=True, eq=False)
class Topology:
    """
    The shape of a step's tree, for all rows (`rows` = 1) or row by row (`rows` = batch). Node 0 is the root.

    Args:
        parents (`torch.Tensor` of shape `[rows, nodes + 1]`, int64): the parent of every node; 0 for the root itself.
        depths (`torch.Tensor` of shape `[rows, nodes + 1]`, int64): the depth of every node, 0 for the root.
        ancestors (`torch.Tensor` of shape `[rows, nodes + 1, nodes + 1]`, bool): `[:, i, j]` is True where node j is
            node i or an ancestor of it.
        depth (`int`): the largest depth.
        is_static (`bool`): whether the shape is that of a `TokenTree`, which all ranks know before the step.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    depth: int
    is_static: bool = False

    @classmethod
    def of_tree(cls, tree: TokenTree | None, device: torch.device) -> Topology:
        """The topology of a static tree, or of the root alone (None). Built once per tree and device."""
        return _of_tree(tree, torch.device(device))

    @classmethod
    def of_parents(cls, parents: torch.Tensor, depth: int) -> Topology:
        """
        The topology with the given `parents` (`[rows, nodes + 1]`, int64, the root's is 0; a parent comes before its
        children) and greatest depth. Computed on the device of `parents`.
        """
        from hf_specdec_kernels import tree_ancestors
        from hf_specdec_kernels.tree_growth import tree_ancestors_naive

        by_kernel = parents.device.type in DEVICES and kernels_are_installed()
        depths, ancestors = (tree_ancestors if by_kernel else tree_ancestors_naive)(parents, depth)
        return cls(parents, depths, ancestors, depth)

    @property
    def rows(self) -> int:
        """1 if all rows share the tree, else the batch size."""
        return self.parents.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of draft nodes; the root is not counted."""
        return self.parents.shape[1] - 1

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """For every row and node, its children by rank. Waits for the device."""
        children: list[list[list[int]]] = []
        for parents in self.parents.tolist():
            row: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents[1:], start=1):
                row[parent].append(node)
            children.append(row)
        return children

    def children_of(self, row: int, node: int) -> list[int]:
        """The children of a node, by rank."""
        return self.children[row if len(self.children) > 1 else 0][node]


@lru_cache(maxsize=256)
def _of_tree(tree: TokenTree | None, device: torch.device) -> Topology:
    from hf_specdec_kernels.tree_growth import tree_ancestors_naive

    # On the CPU: it is kept for ever, and kernels may rest now, see `operators_rest`.
    own = (-1,) if tree is None else tree.parents
    parents, depth = torch.tensor([[max(one, 0) for one in own]], device="cpu"), 0 if tree is None else tree.depth
    depths, ancestors = tree_ancestors_naive(parents, depth)
    return Topology(parents.to(device), depths.to(device), ancestors.to(device), depth, is_static=True)


@dataclass(eq=False)
class DraftTree:
    """
    The draft tokens that a drafter proposes for one step, and the shape of their tree.

    Args:
        tokens (`torch.Tensor` of shape `[batch, nodes]`, int64): the draft tokens; the root is not among them.
        topology (`Topology`): the shape of the tree.
        valid (`torch.Tensor` of shape `[batch, nodes]`, bool, *optional*):
            Which nodes count (all, if None). A node that does not is never accepted; its descendants are not valid
            either.
        scores (`torch.Tensor` of shape `[batch, parents, vocab]`, float, *optional*):
            log q, up to a constant per distribution, of the distributions from which children were *drawn* without
            replacement, in the order of `score_index`. None if the children were chosen deterministically.
        score_index (`torch.Tensor` of shape `[1 or batch, nodes + 1]`, int64, or nested lists, *optional*): for every
            node, the index in `scores` of the distribution of its children, or -1.
        vocabulary (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token for every column of
            `scores`, where the draft's vocabulary is smaller than the target's.
        vocab_size (`int`, *optional*): size of the target's vocabulary, where there is a `vocabulary`.
        temperature (`torch.Tensor` of shape `[batch]`, float32, *optional*): by what the `scores` are still to be
            divided.
    """

    tokens: torch.Tensor
    topology: Topology
    valid: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    score_index: torch.Tensor | list[list[int]] | None = field(default=None, repr=False)
    vocabulary: torch.Tensor | None = None
    vocab_size: int | None = None
    temperature: torch.Tensor | None = None

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> DraftTree:
        """A draft tree without draft tokens, for a plain step."""
        tokens = torch.empty(batch_size, 0, dtype=torch.long, device=device)
        return cls(tokens, Topology.of_tree(None, device))

    @property
    def num_nodes(self) -> int:
        """Number of draft nodes per row, invalid ones included."""
        return self.tokens.shape[1]

    def usable(self, room: torch.Tensor | None = None) -> torch.Tensor:
        """
        Which nodes count, the root first, `[rows or batch, nodes + 1]` bool: the valid ones, and with `room`
        (`[batch]`, levels that each row can use) only those within it. The others are forwarded along, at the root's
        position: their own may be past the last one that the model knows.
        """
        depths = self.topology.depths
        usable = depths >= 0 if room is None else depths <= room[:, None]
        return usable if self.valid is None else usable & torch.nn.functional.pad(self.valid, (1, 0), value=True)

    @cached_property
    def tokens_list(self) -> list[list[int]]:
        """Tokens of the nodes from 1 on, per row; -1 for invalid nodes. Waits for the device."""
        tokens = self.tokens if self.valid is None else self.tokens.masked_fill(~self.valid, -1)
        return tokens.tolist()

    @cached_property
    def _score_places(self) -> list[list[int]]:
        """`score_index` as lists on the host. Waits for the device if it is a tensor there."""
        index = self.score_index
        return index.tolist() if isinstance(index, torch.Tensor) else index or []

    def child_with(self, row: int, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if there is one."""
        tokens = self.tokens_list[row]
        for child in self.topology.children_of(row, node):
            if tokens[child - 1] == token:
                return child
        return None

    def num_valid(self, row: int) -> int:
        """Number of valid draft tokens of a row."""
        if self.valid is None:
            return self.num_nodes
        return sum(token >= 0 for token in self.tokens_list[row])

    def is_drawn(self, node: int) -> bool:
        """Whether the token of a node is one that the drafter has drawn, if it draws at all."""
        return True

    def within_drafted(self, paths: Sequence[list[int] | None]) -> tuple[DraftTree, list[list[int] | None]]:
        """The tree as its drafter proposed it, and of every path the nodes up to the first that is not in it."""
        return self, list(paths)

    def scores_of(self, row: int, node: int) -> torch.Tensor:
        """
        log q (up to a constant) from which the children of `node` were drawn, over the target's tokens, `[vocab]`.

        Raises:
            ValueError: if the children of the tree, or of this node, were not drawn.
        """
        if self.scores is None or self.score_index is None:
            raise ValueError("`scores`: the children of this tree were not drawn.")
        place = self._score_places[row if len(self.score_index) > 1 else 0][node]
        if place < 0:
            raise ValueError(
                f"`score_index`: node {node} has children, but no scores from which they were drawn ({place}). Give "
                "its place in `scores`."
            )
        scores = self.scores[row, place]
        if self.temperature is not None:
            scores = scores.float() / self.temperature[row]
        if self.vocabulary is None or self.vocab_size is None:
            return scores
        return scores.new_full((self.vocab_size,), -torch.inf).scatter(0, self.vocabulary, scores)

    def in_vocabulary(self, vocabulary: torch.Tensor | None, vocab_size: int) -> DraftTree:
        """
        The tree with draft columns translated to the target's tokens by `vocabulary` (`[draft vocab]` int64, the
        target's token of each column; None if the draft uses the target's vocabulary).
        """
        if vocabulary is None:
            return self
        return replace(self, tokens=vocabulary[self.tokens], vocabulary=vocabulary, vocab_size=vocab_size)

    def to(self, device: torch.device) -> DraftTree:
        """The tree on another device."""
        if self.tokens.device == device:
            return self
        topology = self.topology
        moved = {name: getattr(topology, name).to(device) for name in ("parents", "depths", "ancestors")}
        return DraftTree(
            self.tokens.to(device),
            replace(topology, **moved),
            None if self.valid is None else self.valid.to(device),
            None if self.scores is None else self.scores.to(device),
            self.score_index,
            None if self.vocabulary is None else self.vocabulary.to(device),
            self.vocab_size,
            None if self.temperature is None else self.temperature.to(device),
        )

    def within(self, room: list[int]) -> DraftTree:
        """The tree with nodes of row b deeper than `room[b]` marked invalid."""
        if min(room) >= self.topology.depth:
            return self
        return self.where(self.topology.depths[:, 1:] <= torch.tensor(room, device=self.tokens.device)[:, None])

    def chain_within(self, room: int) -> DraftTree:
        """
        The first `room` nodes of a chain: for a model that gives a node the position of its slot, which may know none
        for those beyond.
        """
        count = max(room, 0)
        if count >= self.topology.depth:
            return self
        end, topology, index = count + 1, self.topology, self.score_index
        return replace(
            self,
            tokens=self.tokens[:, :count],
            valid=None if self.valid is None else self.valid[:, :count],
            topology=Topology(
                topology.parents[:, :end], topology.depths[:, :end], topology.ancestors[:, :end, :end], count
            ),
            score_index=[row[:end] for row in index]
            if isinstance(index, list)
            else index
            if index is None
            else index[:, :end],
        )

    def where(self, counts: torch.Tensor) -> DraftTree:
        """The tree with nodes marked invalid where `counts` (`[rows, nodes]` or `[batch, 1]`, bool) is False."""
        valid = counts.expand(self.tokens.shape) if self.valid is None else self.valid & counts
        return replace(self, valid=valid)
