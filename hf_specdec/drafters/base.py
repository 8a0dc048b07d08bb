"""What a drafter is: a transformers `CandidateGenerator` that proposes trees."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..config import SpeculationPlan
from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, TokenTree, Tree, TreeChoice
from ..verification.draft_temperature import DraftTemperature


if TYPE_CHECKING:
    from ..graphs import GraphLoans, GraphStore
    from ..target import Target


@dataclass(frozen=True)
class DraftRequest:
    """
    What a drafter is told when a call starts.

    Args:
        plan (`SpeculationPlan`): what may be asked for, and whether children are drawn.
        vocab_size (`int`): the target's.
        warpers (`LogitsProcessorList`): those processors of the call that read the scores alone; a drafter that draws
            children applies them to its own scores, since the closer q is to p, the more is accepted.
        prefill_chunk_size (`int`, *optional*): the call's.
        temperature (`DraftTemperature`, *optional*): makes q sharper or flatter.
        choice (`TreeChoice`, *optional*): says which tree a step takes; without it, the plan's.
        loans (`GraphLoans`, *optional*): lend the memory of CUDA graphs.
    """

    plan: SpeculationPlan
    vocab_size: int
    warpers: LogitsProcessorList
    prefill_chunk_size: int | None = None
    temperature: DraftTemperature = field(default_factory=DraftTemperature)
    choice: TreeChoice | None = None
    loans: GraphLoans | None = None

    def storage(self, model: PreTrainedModel, sequences: Sequences) -> GraphStore | None:
        """Memory of CUDA graphs for a model that drafts for these sequences to their end, if there is to be any."""
        if self.loans is None:
            return None
        longest = sequences.max_length or sequences.prompt_length + 1024
        most = max(self.plan.tree.num_nodes, *(tree.num_slots for tree in self.plan.trees))
        return self.loans.store(model, sequences.batch_size, longest + most + 1)

    @property
    def tree(self) -> TokenTree | DynamicTree:
        """The tree to fill in the present step."""
        return self.plan.tree if self.choice is None else self.choice.tree  # type: ignore[return-value]

    @property
    def warp_if_drawn(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Makes the scores of q from a draft's logits, if children are to be drawn from it."""
        return self._warp if self.plan.draws_children else None

    def _warp(self, logits: torch.Tensor) -> torch.Tensor:
        """What the warpers and the temperature make of logits `[…, vocab]`, in float32."""
        scores = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        return self.temperature.apply(self.warpers(None, scores)).view(logits.shape)


class Drafter(CandidateGenerator):
    """
    Proposes a tree of draft tokens at every step. To write one, implement `propose`; `start` and `default_tree` where
    needed. An instance of a subclass is passed as `assistant_model=`. Every call works on a shallow copy of it, so
    that a call's state never outlives it or reaches another thread: keep that state in attributes set by `start`.
    """

    has_probabilities = False
    """Whether the drafter can draw children from a distribution q and return it (`DraftTree.scores`)."""

    default_tree: Tree = TokenTree.chain(5)
    """The tree where the user gives none."""

    max_depth: int | None = None
    """How many levels of draft tokens it can propose; None if any number."""

    num_tokens: int | None = None
    """How many different tokens it can propose at a node; None if all of the target's."""

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run over trees during a call; their attention is switched while it lasts."""
        return ()

    @property
    def times_key(self) -> Any:
        """Names the draft whose step times `tree="auto"` remembers: its model, or the drafter's type."""
        return self.models[0] if self.models else type(self)

    def check(self, target: PreTrainedModel, tree: Tree) -> None:
        """
        Refuses a target that this drafter cannot draft for, or a tree that it cannot fill, before anything runs.

        Raises:
            ValueError: naming the argument, what does not fit, and the remedy.
        """

    # ------------------------------------------------------------------------------------- in a call, in this order

    def for_call(self, target: PreTrainedModel) -> Drafter:
        """The drafter of one call."""
        return copy.copy(self)

    def watching(self, target: Target) -> AbstractContextManager[Any]:
        """
        Entered before the target's first forward and left after its last: for what is observed of these.
        `target.model` may also be run by others meanwhile; `target.is_running` says whether a forward is the call's.
        """
        return nullcontext()

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        """Prepares for drafting; `sequences` holds the prompts, which the target has just forwarded."""
        self.ask(request)

    def ask(self, request: DraftRequest) -> None:
        """Takes what the following trees are to be like."""
        self.request = request

    def tree_within(self, room: list[int]) -> TokenTree | DynamicTree | None:
        """
        The tree to fill in this step, a static one without the levels that no row can use; None if there are none.

        Args:
            room (`list[int]`): levels that each row can use.
        """
        tree, most = self.request.tree, max(room)
        return tree.truncate(most) if isinstance(tree, TokenTree) else tree if most > 0 else None

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

    def commit(self, paths: list[list[int] | None]) -> None:
        """
        Told after every step, with or without drafts, which of the nodes that the target has just forwarded are
        committed: for every row the accepted path from the root's child down, or None if not even the root is.
        """

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
