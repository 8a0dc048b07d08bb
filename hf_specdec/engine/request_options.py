"""Decoding options of a request, and what follows from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..grammar import GrammarMask, grammar_in
from ..plan import SpeculationPlan
from ..verification import Verifier, warpers_of
from ..verification.device_warpers import Warpers, without_padding
from ..verification.log_probabilities import LogprobOptions
from . import sharing


@dataclass(frozen=True, eq=False)
class RequestOptions:
    """
    Decoding options of a request, or of a row of a call, as `generate` hands them to a decoding method.

    Args:
        processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`): logits processors and stopping criteria
            that `generate` makes for this prompt.
        do_sample (`bool`): whether tokens are drawn.
        plan (`SpeculationPlan`, *optional*): how the request speculates; None if it does not.
        seed (`int`, *optional*): makes the request's draws the same whatever else runs.
        clock (`MaxTimeCriteria`, *optional*): the one of `criteria` whose time begins when the request is admitted.
        logprobs (`LogprobOptions`, *optional*): the log-probabilities that are asked for.
        vocab_size (`int`, *optional*): number of the target's tokens.
        padding (`int`): tokens before the row's text that processors see, and a captured step does not.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    plan: SpeculationPlan | None
    seed: int | None = None
    clock: MaxTimeCriteria | None = None
    logprobs: LogprobOptions | None = None
    vocab_size: int | None = None
    padding: int = 0

    @cached_property
    def processors_key(self) -> Hashable:
        """Key of the processors: requests with equal tuples are processed in one call; see `sharing_key`."""
        return sharing.sharing_key(self.processors)

    @cached_property
    def reads_scores_only(self) -> bool:
        """Whether all processors read the scores alone."""
        return len(self.warpers) == len(self.processors)

    @cached_property
    def grammar(self) -> GrammarMask | None:
        """The mask of the request's grammar; None without a grammar."""
        return grammar_in(self.processors)

    def for_row(self, row: int, padding: int) -> RequestOptions:
        """The options of one of several rows, with a text of its own in the grammar, and without its padding."""
        own = [
            one.for_row() if isinstance(one, GrammarMask) else without_padding(one, row, padding)
            for one in self.processors
        ]
        is_same = not padding and all(one is other for one, other in zip(own, self.processors, strict=True))
        kept = LogitsProcessorList(one for one in own if one is not None)
        return self if is_same else replace(self, processors=kept, padding=padding)

    def verifier(self, is_drawn: bool) -> Verifier:
        """The verifier of a row; `is_drawn` says whether it has a tree whose children are drawn."""
        if not self.do_sample:
            return Verifier.GREEDY
        if self.draws_by_position:
            return Verifier.BY_POSITION
        by_rejection = is_drawn and self.plan is not None and self.plan.uses_rejection
        return Verifier.REJECTION if by_rejection else Verifier.FROM_TARGET

    @property
    def draws_by_position(self) -> bool:
        """Whether tokens are drawn by the noise of their positions; not with a seed, which has numbers of its own."""
        by_position = self.plan is not None and self.plan.draws_by_position
        return self.do_sample and by_position and self.seed is None

    @cached_property
    def filters(self) -> bool:
        """Whether tokens are drawn with a filter, such as top-p."""
        warpers = self.device_warpers
        return self.do_sample and warpers is not None and not warpers.of_draws <= {"temperature"}

    @cached_property
    def device_warpers(self) -> Warpers | None:
        """
        The processors as device warpers for captured steps; None if these cannot apply them. A grammar is no warper:
        the host sees to it after the step, which is exact where no filter comes after the mask, and tells nothing of
        log-probabilities.
        """
        others = LogitsProcessorList(one for one in self.processors if one is not self.grammar)
        warpers = Warpers.of(others, self.vocab_size, self.padding)
        if warpers is None or (warpers.of_draws and not self.do_sample):
            return None
        is_free = not self.do_sample or (self.seed is None and warpers.of_draws <= {"temperature"})
        return warpers if self.grammar is None or (is_free and self.logprobs is None) else None

    @cached_property
    def warpers(self) -> LogitsProcessorList:
        """The processors that read only the scores; a draft that draws its tokens applies them to its own scores."""
        return warpers_of(self.processors)

    @cached_property
    def warpers_key(self) -> Hashable:
        """Key of the warpers: requests with equal tuples draw their drafts alike; see `sharing_key`."""
        return sharing.sharing_key(self.warpers)
