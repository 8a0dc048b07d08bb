"""The interface of drafters: a transformers `CandidateGenerator` that proposes trees."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..grammar import GrammarMask, GrowingMask
from ..models.encoders import EncoderInputs
from ..plan import SpeculationPlan
from ..sequences import Rows, Sequences
from ..trees import DraftTree, DynamicTree, Evidence, TokenTree, Tree, TreeChoice
from ..trees.confidence import Calibration
from ..verification import BatchNoise, PositionNoise
from ..verification.draft_temperature import DraftTemperature


if TYPE_CHECKING:
    from ..forwards.target import TreeTarget
    from ..graphs import GraphLoans, GraphStore
    from .growth import Noise, TokenLimits


@dataclass(frozen=True)
class DraftRequest:
    """
    Settings of a call that its drafter is started with.

    Args:
        plan (`SpeculationPlan`): resolved settings of the call: its tree, and whether children are drawn.
        vocab_size (`int`): size of the target's vocabulary.
        warpers (`LogitsProcessorList`): the call's logits processors that read the scores alone; a drafter that draws
            children applies them to its own scores, because the closer q is to p, the more is accepted.
        prefill_chunk_size (`int`, *optional*): tokens per chunk of a chunked prefill, as in the call.
        temperature (`DraftTemperature`, *optional*): temperature of q, besides the warpers.
        choice (`TreeChoice`, *optional*): says which tree a step takes; without it, every step takes the plan's.
        loans (`GraphLoans`, *optional*): lends K/V memory with captured CUDA graphs; without it, there are none.
        noises (`Sequence[PositionNoise]`, *optional*): random numbers of the rows by position, from which children
            are drawn; without them, they are drawn by torch's generator.
        refine (`Callable`, *optional*): chooses the tree again from the draft's confidence in the step at hand; see
            `TreeChoice.refine`.
        grammars (`Sequence[GrammarMask]`, *optional*): the grammar of every row, None for one without.
        encoder (`EncoderInputs`, *optional*): what the target's encoder has read, if it has one.
        calibration (`Callable`, *optional*): how captured steps read the draft's confidence, by which they shape the
            plan's tree anew, with as many nodes and levels.
        reports_ranks (`bool`): whether captured steps report which children were offered and accepted, as where "auto"
            has to learn this of a tree whose shape the draft has chosen.
    """

    plan: SpeculationPlan
    vocab_size: int
    warpers: LogitsProcessorList
    prefill_chunk_size: int | None = None
    temperature: DraftTemperature = field(default_factory=DraftTemperature)
    choice: TreeChoice | None = None
    loans: GraphLoans | None = None
    noises: Sequence[PositionNoise] | None = None
    refine: Callable[[Mapping[int, Sequence[float]]], TokenTree | DynamicTree | None] | None = None
    grammars: Sequence[GrammarMask | None] | None = None
    encoder: EncoderInputs | None = None
    calibration: Callable[[], Calibration] | None = None
    reports_ranks: bool = False

    def noise(self, lengths: Sequence[int], token_ids: torch.Tensor | None = None) -> Noise | None:
        """
        The noise by which children are drawn where random numbers belong to positions; else None.

        Args:
            lengths (`Sequence[int]`): tokens of every row, root included.
            token_ids (`torch.Tensor` of shape `[draft vocab]`, int64, *optional*): the target's token of each of the
                draft's.
        """
        if self.noises is None:
            return None
        return BatchNoise(self.noises, lengths, self.vocab_size, token_ids).at

    def limits(self, sequences: Rows, token_ids: torch.Tensor | None = None) -> TokenLimits | None:
        """
        What hides tokens that the rows' grammars do not allow; None without a grammar. See `noise` for `token_ids`.
        """
        if self.grammars is None:
            return None
        rows = [
            None if mask is None or sequences.room(row) <= 0 else (mask, sequences.new_tokens(row))
            for row, mask in enumerate(self.grammars)
        ]
        return GrowingMask(rows, self.vocab_size, token_ids)

    def storage(
        self, model: PreTrainedModel, sequences: Sequences, most_slots: int, tokens_ratio: float = 1.0
    ) -> GraphStore | None:
        """
        The `GraphStore` of a model that drafts for these sequences to their end, with up to `most_slots` slots after
        the root, and about `tokens_ratio` tokens for one of theirs; None without CUDA graphs.
        """
        if self.loans is None:
            return None
        length = math.ceil(tokens_ratio * sequences.expected_length)
        return self.loans.store(model, sequences.batch_size, length + most_slots + 1)

    @property
    def tree(self) -> TokenTree | DynamicTree:
        """The tree to fill in the present step."""
        return self.plan.tree if self.choice is None else self.choice.tree  # type: ignore[return-value]

    @property
    def warp_if_drawn(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function from a draft's logits to the scores of q, if children are to be drawn; else None."""
        takes_best = self.choice is not None and self.choice.takes_best
        return self._warp if self.plan.draws_children and not takes_best else None

    def _warp(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Scores of q, float32, from logits `[…, vocab]`, by the warpers and the draft temperature. NaN, from which
        nothing is drawn, where a warper refuses the logits.
        """
        rows = logits.reshape(-1, logits.shape[-1])
        try:
            scores = self._warped(rows)
        except ValueError:  # some warpers take no NaN and no infinity; drafts are not worth an error
            scores = torch.cat([self._warped_or_nan(row) for row in rows.split(1)])
        return self.temperature.apply(scores).view(logits.shape)

    def _warped(self, logits: torch.Tensor) -> torch.Tensor:
        return self.warpers(None, logits.to(torch.float32, copy=True))

    def _warped_or_nan(self, logits: torch.Tensor) -> torch.Tensor:
        try:
            return self._warped(logits)
        except ValueError:
            return torch.full_like(logits, torch.nan, dtype=torch.float32)


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

    def for_call(self, target: PreTrainedModel) -> Drafter:
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
