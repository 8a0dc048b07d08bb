"""What is fixed at a capture: the kind of a step, and the size for which it has room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...graphs.sizes import FEWEST_BLOCKS, next_power_of_two, next_size
from ...trees import DynamicTree, TokenTree
from ...verification import Verifier
from ...verification.log_probabilities import MOST_BEST
from ..request import Request


@dataclass(frozen=True)
class StepSize:
    """
    Size of a captured step.

    Args:
        rows (`int`): number of rows.
        blocks (`int`): blocks per block table; the last is `ZERO_BLOCK` in every row.
        depth (`int`): levels of the tree.
        lag (`int`): most unread tokens per row, root included, that the draft reads in the step.
        axes (`int`, *optional*, defaults to 0): axes of positions, where some rows have a shift of their own on each;
            0: all rows have the positions of texts.
    """

    rows: int
    blocks: int
    depth: int
    lag: int
    axes: int = 0

    @classmethod
    def of(
        cls, requests: list[Request], depth: int, lag: int, fewest_blocks: int = FEWEST_BLOCKS, fewest_rows: int = 1
    ) -> StepSize:
        """The smallest size with room for these requests, and for so many blocks and rows at least."""
        blocks = max(len(request.table.blocks) for request in requests) + 1
        rows = next_size(max(fewest_rows, len(requests)))
        axes = max(0 if request.position_shift is None else len(request.position_shift) for request in requests)
        return cls(rows, max(fewest_blocks, next_power_of_two(blocks)), depth, lag, axes)


@dataclass(frozen=True)
class StepKind:
    """
    Properties of a captured step that are fixed at its capture, apart from its size.

    Args:
        tree (`TokenTree` or `DynamicTree`, *optional*): the tree that the draft grows; None for no tree.
        kinds (`frozenset[Verifier]`): kinds of verification among the rows.
        draws (`bool`): whether children are drawn.
        has_seeds (`bool`): whether rows may have a seed of their own.
        is_filtered (`bool`): whether children, and tokens by the noise of their positions, are drawn with the rows'
            top-k and top-p.
        by_position (`bool`): whether children are drawn by the noise of their positions.
        processing (`frozenset[str]`): what rows do beside temperature, top-k and top-p; see `Warpers.kinds`.
        shapes (`bool`): whether the nodes of the tree are chosen by the draft's confidence.
        reports_ranks (`bool`): whether the report says what was offered on the accepted path.
        has_grammars (`bool`): whether rows may have a grammar: tokens that it asks for are forced, and the logits of
            the accepted path are kept.
        reads (`bool`): whether an EAGLE head reads pending features, without a tree.
        compiles (`bool`): whether forwards are compiled before the capture.
        compiles_whole (`bool`): whether they are compiled as a whole, and not layer by layer.
        best (`int`, *optional*): number of best tokens of which the step reports log-probabilities, beside those of
            its new tokens; None if it reports none.
    """

    tree: TokenTree | DynamicTree | None
    kinds: frozenset[Verifier]
    draws: bool = False
    has_seeds: bool = True
    is_filtered: bool = False
    by_position: bool = False
    processing: frozenset[str] = frozenset()
    shapes: bool = False
    reports_ranks: bool = False
    has_grammars: bool = False
    reads: bool = False
    compiles: bool = False
    compiles_whole: bool = False
    best: int | None = None

    def stands_in_for(self, wanted: StepKind) -> bool:
        """
        Whether steps of this kind can run the rows of another: with more kinds of verification, with filters, which
        may be off in any row, with best tokens, or with further processors if they have any.
        """
        alike = replace(
            self,
            kinds=wanted.kinds,
            is_filtered=wanted.is_filtered,
            best=wanted.best,
            processing=wanted.processing,
        )
        return (
            alike == wanted
            and self.kinds >= wanted.kinds
            and self.is_filtered >= wanted.is_filtered
            and (self.best == wanted.best or (wanted.best == 0 and self.best == MOST_BEST))
            and self.processes(wanted.processing)
        )

    def processes(self, wanted: frozenset[str]) -> bool:
        """Whether steps of this kind do what rows ask for. Those that ask for nothing do not wait for it."""
        return self.processing >= wanted if wanted else not self.processing


class StepKey(NamedTuple):
    """What is fixed at the capture of a decoding step."""

    kind: StepKind
    size: StepSize


class PromptKey(NamedTuple):
    """What is fixed at the capture of a prefill step; see `PromptStep`."""

    size: StepSize
    kinds: frozenset[Verifier]
    best: int | None
    processing: frozenset[str]
