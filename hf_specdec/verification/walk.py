"""What a verifier decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Walk:
    """
    For every row, how far down the tree its walk came. Rows that rest have None and no tokens.

    Args:
        paths (`list`): the accepted nodes of every row, from the root's child down (`list[int]`), or None.
        tokens (`list[list[int]]`): the accepted tokens, and last the bonus or recovered token, unless the last
            accepted one is an end token.
    """

    paths: list[list[int] | None]
    tokens: list[list[int]]

    @classmethod
    def start(cls, batch_size: int, rows: list[int]) -> Walk:
        """All of `rows` at the root, the others resting."""
        walking = set(rows)
        return cls([[] if row in walking else None for row in range(batch_size)], [[] for _ in range(batch_size)])

    def node(self, row: int) -> int:
        """The node where the row's walk stands."""
        path = self.paths[row]
        return path[-1] if path else 0
