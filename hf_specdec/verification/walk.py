"""`Walk`: the nodes and tokens that a verifier accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Walk:
    """
    Walks down the tree, one per row: the nodes and tokens accepted so far. Resting rows have None and no tokens.

    Args:
        paths (`list`): the accepted nodes of every row, from the root's child down (`list[int]`), or None.
        tokens (`list[list[int]]`): the accepted tokens, and last the bonus or recovered token, unless the last
            accepted one is an end token.
    """

    paths: list[list[int] | None]
    tokens: list[list[int]]

    @classmethod
    def start(cls, batch_size: int, rows: list[int]) -> Walk:
        """A `Walk` with all of `rows` at the root, and the other rows resting."""
        walking = set(rows)
        return cls([[] if row in walking else None for row in range(batch_size)], [[] for _ in range(batch_size)])

    def node(self, row: int) -> int:
        """The node where the row's walk stands."""
        path = self.paths[row]
        return path[-1] if path else 0
