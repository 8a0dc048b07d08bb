"""What verifiers read: the target's distribution at the nodes of a walk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .walk import Walk


class Distribution(Protocol):
    """
    p, the target's next-token distribution after every processor of a row, as verifiers read it: `TargetDistribution`
    for the rows of a call, `RowDistributions` for requests in flight.
    """

    batch_size: int
    agree: Callable[[torch.Tensor], torch.Tensor]
    """Makes a tensor of drawn tokens equal on all ranks; see `Ranks.agree`."""

    @property
    def reads_ahead(self) -> bool:
        """Whether `all_scores` may be used, and is cheaper than `scores` at every node of a walk."""

    @property
    def is_bare(self) -> bool:
        """Whether the scores of greedy rows are the unprocessed logits, and are not recorded."""

    def all_scores(self) -> torch.Tensor:
        """Scores of all nodes, `[batch, nodes + 1, vocab]`; only if `reads_ahead` or `is_bare`."""

    def scores(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Processed scores at the nodes where the walks of `rows` stand, `[rows, vocab]` float32."""

    def choose(self, rows: list[int], walk: Walk, do_sample: bool) -> list[int]:
        """The next token of every row where its walk stands: the argmax, or drawn from p."""

    def ends(self, row: int, token: int) -> bool:
        """Whether a row's text ends with a token that its walk has accepted."""
