"""`Walk`: the nodes and tokens that a verifier accepts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

    def step(self, row: int, child: int) -> None:
        """Moves the row's walk from its node to a child, which is accepted."""
        path = self.paths[row] = self.paths[row] or []
        path.append(child)


def new_tokens(path_tokens: torch.Tensor, accepted: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
    """
    The tokens that walks on the device append to their rows, `[batch, depth + 1]` int64, followed by -1.

    Args:
        path_tokens (`torch.Tensor` of shape `[batch, depth + 1]`, int64): the tokens at the nodes of the path, the
            root's first.
        accepted (`torch.Tensor` of shape `[batch]`, int64): number of accepted nodes; negative for rows that rest.
        next_tokens (`torch.Tensor` of shape `[batch]`, int64): the bonus or recovered token; -1 if there is none.
    """
    places = torch.arange(path_tokens.shape[1], device=path_tokens.device)
    new = torch.nn.functional.pad(path_tokens[:, 1:], (0, 1), value=-1)
    new = torch.where(places < accepted[:, None], new, -1)
    return torch.where(places == accepted[:, None], next_tokens[:, None], new)
