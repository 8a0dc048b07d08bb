"""Trees that are grown anew each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .token_tree import MAX_NODES


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """
    A tree grown anew each step from the draft's own scores.

    In greedy calls (and whenever the children are the draft's best tokens) it grows as in EAGLE-2 (arXiv 2406.16858):
    at each level the `top_k` best nodes, by summed log-probability, are expanded by their `top_k` best tokens, and of
    all candidates the best `num_nodes` are kept. Dropping *drawn* candidates by their score would bias the output, so
    in sampling calls the number of children of every node is fixed before they are drawn, and all of them are
    verified.

    Args:
        depth (`int`):
            Levels of draft tokens; at most `num_nodes` count, since a path has no more nodes than the tree.
        top_k (`int`):
            Nodes expanded per level, and most children of a node.
        num_nodes (`int`):
            Draft tokens in the tree, the root not counted. SafeAILab's `total_token=60, depth=7` is `num_nodes=59,
            depth=8`.

    Raises:
        ValueError: if a value is not a positive integer, or `num_nodes` is over 1,024 or more than
            `num_candidates`.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`DynamicTree({name}={value!r})`: `{name}` must be a positive integer.")
        if self.num_nodes > MAX_NODES:
            raise ValueError(f"`DynamicTree(num_nodes={self.num_nodes})`: at most {MAX_NODES} nodes. Use fewer.")
        if self.num_nodes > self.num_candidates:
            raise ValueError(
                f"`DynamicTree(num_nodes={self.num_nodes})`: depth={self.depth} and top_k={self.top_k} make only "
                f"{self.num_candidates} candidates. Raise `depth` or `top_k`, or lower `num_nodes`."
            )
        object.__setattr__(self, "depth", min(self.depth, self.num_nodes))

    @property
    def num_candidates(self) -> int:
        """Number of candidates from which `num_nodes` are chosen."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_slots(self) -> int:
        """Slots after the root that a step with the tree may write: its nodes, or all expanded candidates."""
        return max(self.num_nodes, (self.depth - 1) * self.top_k)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form, which `tree=` accepts again."""
        return asdict(self)
