"""What a drafter is: a transformers `CandidateGenerator` that proposes trees."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..config import SpeculationPlan
from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, TokenTree


@dataclass(frozen=True)
class DraftRequest:
    """
    What a drafter is told when a call starts.

    Args:
        plan (`SpeculationPlan`): the tree to fill, and whether children are drawn.
        vocab_size (`int`): the target's.
        warpers (`LogitsProcessorList`): those processors of the call that read the scores alone; a drafter that draws
            children applies them to its own scores, since the closer q is to p, the more is accepted.
        prefill_chunk_size (`int`, *optional*): the call's.
    """

    plan: SpeculationPlan
    vocab_size: int
    warpers: LogitsProcessorList
    prefill_chunk_size: int | None = None


class Drafter(CandidateGenerator):
    """
    Proposes a tree of draft tokens at every step. To write one, implement `propose`; `start` and `default_tree` where
    needed. An instance of a subclass is passed as `assistant_model=`. Every call works on a shallow copy of it, so
    that a call's state never outlives it or reaches another thread: keep that state in attributes set by `start`.
    """

    has_probabilities = False
    """Whether the drafter can draw children from a distribution q and return it (`DraftTree.scores`)."""

    default_tree: TokenTree | DynamicTree = TokenTree.chain(5)
    """The tree where the user gives none."""

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run over trees during a call; their attention is switched while it lasts."""
        return ()

    def for_call(self, sequences: Sequences, request: DraftRequest) -> Drafter:
        """The drafter of one call."""
        drafter = copy.copy(self)
        drafter.start(sequences, request)
        return drafter

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        """Prepares for a call; `sequences` holds the prompts."""
        self.request = request

    @abstractmethod
    def propose(self, sequences: Sequences) -> DraftTree | None:
        """
        Proposes a tree for every row of `sequences`, whose last token is the root. Tokens that were generated without
        this drafter (while speculation was off) are caught up with here.

        Args:
            sequences (`Sequences`):
                The rows. Nodes deeper than `sequences.room(row)` must not count (`DraftTree.valid`).

        Returns:
            `DraftTree` or None: None if no row has anything to propose.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `propose`.")

    # ------------------------------------------------------------------------ transformers' own interface: chains

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """
        The tree's first path as a chain, for transformers' own assisted decoding: `[1, tokens]` int64 to
        `[1, tokens + n]`.
        """
        sequences = Sequences(input_ids)
        if not hasattr(self, "request"):
            raise ValueError(
                f"{type(self).__name__} has not been started. Pass it to `generate(assistant_model=…)`, or call "
                "`start` first."
            )
        draft = self.propose(sequences)
        chain, node = [], 0
        while draft is not None and (children := draft.topology.children_of(0, node)):
            node = children[0]
            if draft.tokens_list[0][node - 1] < 0:
                break
            chain.append(draft.tokens_list[0][node - 1])
        return torch.cat([input_ids, input_ids.new_tensor([chain])[:, : len(chain)]], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: the tree is the call's."""
