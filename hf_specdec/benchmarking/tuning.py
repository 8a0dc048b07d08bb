"""
`hf-specdec tune` without its command line: the best static tree for a target, a draft and a machine.

Acceptance of the child of rank r at depth d is counted while trees are verified; each pass over the prompts uses the
likeliest tree by the counts so far. Step times are measured with trees of depth 1 and n nodes, and with chains of
depth d; the time of a tree is estimated as the cost of its nodes plus the cost of its depth. The best tree is found as
by `tree="auto"` (`hf_specdec.trees.auto`), with Sequoia's arithmetic (arXiv 2402.12374). Finally the best trees of
several sizes are timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, ObservedDrafter, as_drafter
from ..metrics import SpeculationMetrics
from ..trees import AutoTree, DraftTree, TokenTree
from ..trees.auto import StepTimes, best_plan
from ..trees.auto_tables import AcceptanceTable, expected_length, likeliest_paths
from .comparison import Call, compare, generate, num_calls
from .contenders import Contender, sampling_options, speculative
from .prompts import EncodedPrompt


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of draft nodes for which steps are timed and trees are tried, as far as the limits allow."""
PASSES = 3
"""Passes over the prompts that count acceptance, each with a better tree."""
TIMED_TOKENS = 32
"""Most new tokens of a call that times steps."""


class EvenAcceptance(AcceptanceTable):
    """Acceptance counts without decay: old texts weigh as much as new ones."""

    DECAY = 1.0

    def observe(self, draft: DraftTree | None, paths: list[list[int] | None]) -> None:
        """Counts a step; the observer of an `ObservedDrafter`."""
        if draft is not None:
            self.add(draft, paths)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """
    A tree that was timed.

    Args:
        tree (`TokenTree`, *optional*): the tree; None for plain `generate`.
        expected (`float`): predicted tokens per second after the prefill.
        expected_length (`float`): predicted tokens per step.
        measured (`float`): timed tokens per second after the prefill.
        measured_length (`float`): counted tokens per step.
    """

    tree: TokenTree | None
    expected: float
    expected_length: float
    measured: float
    measured_length: float

    def to_dict(self) -> dict[str, Any]:
        """The candidate as a dictionary for JSON."""
        return {
            "tree": None if self.tree is None else str(self.tree),
            "num_nodes": 0 if self.tree is None else self.tree.num_nodes,
            "expected_tokens_per_second": self.expected,
            "measured_tokens_per_second": self.measured,
            "expected_acceptance_length": self.expected_length,
            "measured_acceptance_length": self.measured_length,
        }


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """
    Result of a `Tuner`.

    Args:
        candidates (`list[Candidate]`): plain `generate` first, then trees by size.
        chances (`list[list[float]]`): `[depth][rank]`, probability that a child is accepted if its parent is.
        step_ms (`dict`): milliseconds of a step, `nodes` by number of draft nodes, and `depth`, the time of drafting
            to a depth beyond the time by nodes.
    """

    candidates: list[Candidate]
    chances: list[list[float]]
    step_ms: dict[str, dict[int, float]]

    @property
    def best(self) -> Candidate:
        """The fastest candidate, as timed."""
        return max(self.candidates, key=lambda candidate: candidate.measured)

    def to_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        return {
            "best": self.best.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "acceptance_by_depth_and_rank": self.chances,
            "step_ms": self.step_ms,
        }


@dataclass(kw_only=True)
class Tuner:
    """
    Finds the best static tree for a target, a draft and prompts on this machine.

    Args:
        model (`PreTrainedModel`): the target.
        draft: a value of `assistant_model=`.
        prompts (`Sequence[EncodedPrompt]`): the texts to tune for.
        limits (`AutoTree`): limits of a tree's size.
        temperature (`float`): temperature of all calls; 0 is greedy.
        max_new_tokens (`int`), seed (`int`): most new tokens and first seed of the calls.
        rounds (`int`): timed calls of the candidates with each prompt.
        advance (`Callable`): called after every call, at most `num_calls` times.
    """

    model: PreTrainedModel
    draft: Any
    prompts: Sequence[EncodedPrompt]
    limits: AutoTree
    temperature: float = 0.0
    max_new_tokens: int = 128
    rounds: int = 3
    seed: int = 0
    advance: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.drafter: Drafter = as_drafter(self.draft)
        vocab_size = self.model.config.get_text_config().vocab_size
        vocab_size = vocab_size if self.drafter.num_tokens is None else min(vocab_size, self.drafter.num_tokens)
        self.widest = vocab_size
        self.limits = self.limits.within(self.drafter.max_depth, vocab_size)
        self.table = EvenAcceptance(self.limits.max_depth, self.limits.max_children)

    @property
    def num_calls(self) -> int:
        """Largest number of times that `run` calls `advance`."""
        prompts = len(self.prompts)
        timed = [Contender("")] * (1 + len(self._wide) + len(self._chains))
        tried = [Contender("")] * (1 + len(self.sizes))
        return prompts * (PASSES + 1) + num_calls(prompts, timed, 1) + num_calls(prompts, tried, self.rounds)

    @property
    def sizes(self) -> list[int]:
        """Numbers of draft nodes to time and try: the `SIZES` below the limit, and the limit."""
        return [size for size in SIZES if size < self.limits.max_nodes] + [self.limits.max_nodes]

    def check(self) -> None:
        """
        Tries one short speculative call.

        Raises:
            ValueError: if the draft cannot draft for the target.
        """
        options = sampling_options(self.temperature) | {"max_new_tokens": 2}
        generate(self.model, speculative(self.draft, "chain:1"), self.prompts[0], **options)

    def run(self) -> Tuning:
        """
        Counts acceptance, times steps, computes the best tree of each size, and times these trees.

        Raises:
            ValueError: if the target ends every text after one token.
        """
        self.count_acceptance()
        self.time_prefill()
        times = self.step_times()
        chances = self.table.chances()
        plans = [best_plan(chances, times, self.limits, size) for size in self.sizes]
        trees = list(dict.fromkeys(plan.tree for plan in plans if plan.tree is not None))
        # Short chains are tried even if no tree is expected to be faster than plain `generate`.
        trees = trees or [TokenTree.chain(1), *self._chains[:1]]
        depths, nodes = range(self.limits.max_depth + 1), self.sizes
        step_ms = {
            "nodes": {number: 1000 * times.rest.up_to(number)[-1] for number in (0, *nodes)},
            "depth": {depth: 1000 * times.propose.up_to(depth)[-1] for depth in depths},
        }
        return Tuning(candidates=self._try(trees, chances, times), chances=chances, step_ms=step_ms)

    # ----------------------------------------------------------------------------------------------------- acceptance

    def count_acceptance(self) -> None:
        """Fills the acceptance table, with the likeliest tree of the largest allowed size by the counts so far."""
        recorder = ObservedDrafter(self.drafter, self.table.observe)
        options = sampling_options(self.temperature) | {"max_new_tokens": self.max_new_tokens}
        for number in range(PASSES):
            paths = likeliest_paths(self.table.chances(), self.limits.max_nodes, self.limits.max_depth)
            contender = speculative(recorder, str(TokenTree(path for _, path in paths)))
            for index, prompt in enumerate(self.prompts):
                torch.manual_seed(self.seed + number * len(self.prompts) + index)
                generate(self.model, contender, prompt, **options)
                self.advance()

    # ---------------------------------------------------------------------------------------------------------- times

    @property
    def _wide(self) -> list[TokenTree]:
        return [TokenTree.from_branching((size,)) for size in self.sizes if size <= self.widest]

    @property
    def _chains(self) -> list[TokenTree]:
        depths = sorted({2, 3, 4, 6, self.limits.max_depth})
        deepest = min(self.limits.max_depth, self.limits.max_nodes)
        return [TokenTree.chain(depth) for depth in depths if 1 < depth <= deepest]

    def step_times(self) -> StepTimes:
        """
        Step times by depth and by number of nodes, from whole steps of trees of depth 1 and of chains.

        Raises:
            ValueError: if the target ends every text after one token.
        """
        trees = [*self._wide, *self._chains]
        plain, *others = self._compare(trees, TIMED_TOKENS, rounds=1)
        rates = [seconds / tokens for tokens, seconds in map(self._after_prefill, plain) if tokens > 0]
        if not rates:
            raise ValueError(
                "The target ends every text after one token: there is nothing to speed up. Use other prompts."
            )
        per_token = statistics.median(rates)
        per_step = {
            tree: statistics.median(map(seconds_per_step, calls)) for tree, calls in zip(trees, others, strict=True)
        }
        return combine(per_token, per_step)

    # ---------------------------------------------------------------------------------------------------- candidates

    def _try(self, trees: Sequence[TokenTree], chances: list[list[float]], times: StepTimes) -> list[Candidate]:
        found = []
        for tree, calls in zip((None, *trees), self._compare(trees, self.max_new_tokens, self.rounds), strict=True):
            tokens, seconds = map(sum, zip(*map(self._after_prefill, calls), strict=True))
            metrics = [call.metrics for call in calls if call.metrics is not None]
            length = expected_length(() if tree is None else tree.paths, chances)
            found.append(
                Candidate(
                    tree=tree,
                    expected=length / times.of(tree),
                    expected_length=length,
                    measured=tokens / seconds,
                    measured_length=SpeculationMetrics.sum_of(metrics).mean_acceptance_length,
                )
            )
        return found

    def _compare(self, trees: Sequence[TokenTree], max_new_tokens: int, rounds: int) -> list[list[Call]]:
        """Timed calls of plain `generate` (the first list) and of every tree."""
        contenders = [Contender("plain")]
        contenders += [replace(speculative(self.draft, str(tree)), name=str(tree)) for tree in trees]
        calls = compare(
            self.model,
            self.prompts,
            contenders,
            temperature=self.temperature,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            seed=self.seed,
            advance=self.advance,
        )
        return [[call for call in calls if call.contender == contender.name] for contender in contenders]

    def time_prefill(self) -> None:
        """Times a plain call for one token of every prompt, after a warm-up call with the longest prompt."""
        options = sampling_options(self.temperature) | {"max_new_tokens": 1}
        generate(self.model, Contender("plain"), max(self.prompts, key=lambda prompt: prompt.length), **options)
        self._prefill = []
        for prompt in self.prompts:
            self._prefill.append(generate(self.model, Contender("plain"), prompt, **options)[1])
            self.advance()

    def _after_prefill(self, call: Call) -> tuple[int, float]:
        """Number of tokens after the first, and the seconds without the prefill."""
        return len(call.tokens) - 1, call.seconds - self._prefill[call.prompt]


def seconds_per_step(call: Call) -> float:
    """Seconds per step of a speculative call, without the prefill."""
    metrics: Any = call.metrics  # not None for speculative calls
    return (call.seconds - metrics.seconds["prefill"]) / max(len(metrics.accepted_per_step[0]), 1)


def combine(per_token: float, per_step: dict[TokenTree, float]) -> StepTimes:
    """
    Step times by nodes and by depth, from times of whole steps.

    Only sums of the two are measured: the cost of more nodes comes from trees of depth 1, and the cost of drafting to
    depth d is the time of a chain beyond the cost of its nodes. Both are made non-decreasing.

    Args:
        per_token (`float`): seconds of a step without a tree.
        per_step (`dict[TokenTree, float]`): seconds of a step by tree, for trees of depth 1 and for chains; the tree
            of one node must be included.
    """
    times = StepTimes()
    one = per_step[TokenTree.chain(1)]
    times.rest.add(0, per_token)
    slowest = per_token
    for tree in sorted((tree for tree in per_step if tree.depth == 1), key=len):
        slowest = max(slowest, per_token + per_step[tree] - one)
        times.rest.add(tree.num_nodes, slowest)
    times.propose.add(0, 0.0)
    slowest = 0.0
    for tree in sorted((tree for tree in per_step if tree.num_nodes == tree.depth), key=len):
        slowest = max(slowest, per_step[tree] - times.rest.up_to(tree.num_nodes)[-1])
        times.propose.add(tree.depth, slowest)
    return times
