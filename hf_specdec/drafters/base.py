"""The interface of drafters: a transformers `CandidateGenerator` that proposes trees."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..plan import SpeculationPlan
from ..sequences import Sequences
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree, Tree
from .request import DraftRequest


if TYPE_CHECKING:
    from ..forwards.target import TreeTarget
    from ..forwards.tree_forward import TreeForward
    from .growth import LevelNodes


class Drafter(CandidateGenerator):
    """
    Proposes a tree of draft tokens at every step. A subclass implements `propose`, and `start` and `default_tree`
    where needed; an instance of it is passed as `assistant_model=`. Every call works on a shallow copy of the
    instance, so that the state of a call never outlives the call or reaches another thread: keep that state in
    attributes set by `start`.
    """

    generation_config = GenerationConfig()
    """Whisper's `generate` sets a flag there for its assistant, which means nothing to drafters."""

    has_probabilities = False
    """Whether the drafter can draw children from a distribution q and return it (`DraftTree.scores`)."""

    default_tree: Tree = TokenTree.chain(5)
    """The tree of calls for which the user gives none."""

    max_depth: int | None = None
    """Most levels of draft tokens that the drafter can propose; None for any number."""

    reads_noise = False
    """
    Whether `propose` draws children with the noise of their positions (`DraftRequest.noise`) where a call has it.
    Sampled calls of a drafter that has probabilities, but does not, are verified by rejection.
    """

    prior: Sequence[float] | None = None
    """How often the best draft token is right, by depth, as far as known before any measurement; None: unknown."""

    runs_in_graphs = False
    """
    Whether a step can be captured with the draft in it. Every class says so itself: a subclass may change what runs.
    """

    num_tokens: int | None = None
    """Number of different tokens that the drafter can propose at a node; None for the target's whole vocabulary."""

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The models that run over trees; their attention implementation is switched while a call lasts."""
        return ()

    @property
    def parts(self) -> tuple[PreTrainedModel, ...]:
        """The models and heads that draft: `models`, and what runs without tree attention."""
        return self.models

    @property
    def times_key(self) -> Any:
        """Names the draft whose step times `tree="auto"` remembers: its model or heads, or the drafter's type."""
        return self.models[0] if self.models else type(self)

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        """
        Refuses a target that this drafter cannot draft for, or a tree that it cannot fill, before anything runs. Asked
        for every tree of a schedule; for "auto", which goes no deeper than `max_depth`, for a chain of 1.

        Raises:
            ValueError: naming the argument, what does not fit, and the remedy.
        """

    @property
    def grows_on_device(self) -> bool:
        """Whether the drafter's own class, not one that it inherits from, `runs_in_graphs`."""
        return bool(vars(type(self)).get("runs_in_graphs"))

    def num_slots(self, tree: TokenTree | DynamicTree) -> int:
        """Most slots after the root that target or draft write in a step with a tree."""
        return tree.num_slots

    def most_slots(self, plan: SpeculationPlan) -> int:
        """Most slots after the root that any step of a call writes."""
        return max(plan.tree.num_nodes, *map(self.num_slots, plan.trees))

    # ------------------------------------------------------------------------------------- in a call, in this order

    def for_call(self, target: PreTrainedModel) -> Self:
        """A shallow copy of the drafter, for one call."""
        return copy.copy(self)

    def watching(self, target: TreeTarget) -> AbstractContextManager[Any]:
        """
        Context manager around all forwards of the target in a call, for drafters that read the target's hidden states.
        `target.model` may be run by other callers meanwhile; `target.is_running` says whether a forward is the call's.
        """
        return nullcontext()

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        """Prepares for drafting; `sequences` holds the prompts, which the target has just forwarded."""
        self.ask(request)

    def ask(self, request: DraftRequest) -> None:
        """Sets the request for the trees that follow."""
        self.request = request

    def tree_within(self, room: list[int]) -> TokenTree | DynamicTree | None:
        """
        The tree to fill in this step, a static one without levels that no row can use; None if no row can use any
        level.

        Args:
            room (`list[int]`): levels of draft tokens that each row can use.
        """
        tree, most = self.request.tree, max(room)
        return tree.truncate(most) if isinstance(tree, TokenTree) else tree if most > 0 else None

    def evidence(self, sequences: Sequences) -> Evidence | None:
        """
        What the drafter knows before it proposes, of the rows that go on: `tree="auto"` learns acceptance for each
        value apart, and asks for no tree where all are None. It may depend on nothing but the text so far. None: the
        drafter always has something to propose.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Sequences) -> DraftTree | None:
        """
        Proposes a tree for every row of `sequences`, whose last token is the root. Also catches up with tokens that
        were generated without this drafter (while speculation was off).

        Args:
            sequences (`Sequences`):
                The rows. Nodes deeper than `sequences.room(row)` must not count (`DraftTree.valid`).

        Returns:
            `DraftTree` or None: None if no row has anything to propose.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `propose`.")

    def commit(self, paths: list[list[int] | None]) -> None:
        """
        Called after every step, with or without drafts, with the nodes of the target's last forward that are
        committed: for every row the accepted path from the root's child down, or None if not even the root is
        committed.
        """

    def wipe(self) -> None:
        """Removes what the drafter keeps after the committed tokens, which may be NaN; called after spoiled steps."""

    # ------------------------------------------------------------------------ transformers' own interface: chains

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """
        The tree's first path as a chain, for transformers' own assisted decoding: `[1, tokens]` int64 to
        `[1, tokens + n]`.

        Raises:
            ValueError: if `start` was not called before.
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
        """Does nothing: the call chooses the tree."""


class CachedDrafter(Drafter):
    """A drafter with one model, whose forwards write to a K/V cache of its own."""

    forward: TreeForward
    """The model's forwards in a call."""

    @abstractmethod
    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, vocab]` of one level's nodes."""
        raise NotImplementedError(f"{type(self).__name__} must implement `run_level`.")
