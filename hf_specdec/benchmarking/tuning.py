"""
`hf-specdec tune` without its command line: the best static tree for a target, a draft and a machine.

How often the child of rank r at depth d is accepted is counted while trees are verified that are grown towards what is
accepted. What steps cost is measured with trees of depth 1 and n nodes, and with chains of depth d: a tree is then
taken to cost what its nodes and its depth do. The arithmetic that finds the best tree is that of `tree="auto"`
(`hf_specdec.trees.auto`), which is Sequoia's (arXiv 2402.12374). The best trees of several sizes are then timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter, ObservedDrafter, as_drafter
from ..trees import AutoTree, DraftTree, TokenTree
from ..trees.auto import StepTimes, best_plan
from ..trees.auto_tables import AcceptanceTable, expected_length, likeliest_paths
from .comparison import Call, compare, generate, num_calls
from .contenders import Contender, sampling_options, speculative
from .figures import pool
from .prompts import EncodedPrompt


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Draft nodes for which steps are timed and trees are tried, as far as they are within the limits."""
PASSES = 3
"""How often the prompts are gone through to count acceptance, each time with a better tree."""
TIMED_TOKENS = 32
"""New tokens of a call that times steps."""


class EvenAcceptance(AcceptanceTable):
    """Counts of many texts: old ones are worth as much as new ones."""

    DECAY = 1.0

    def observe(self, draft: DraftTree | None, paths: list[list[int] | None]) -> None:
        """Counts a step of an `ObservedDrafter`."""
        if draft is not None:
            self.add(draft, paths)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """
    A tree that was tried.

    Args:
        tree (`TokenTree`, *optional*): None: no tree.
        expected (`float`): tokens per second after the prefill, by the arithmetic.
        expected_length (`float`): tokens per step, by the arithmetic.
        measured (`float`): tokens per second after the prefill, as timed.
        measured_length (`float`): tokens per step, as counted.
    """

    tree: TokenTree | None
    expected: float
    expected_length: float
    measured: float
    measured_length: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
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
    What came of it.

    Args:
        candidates (`list[Candidate]`): no tree first, then trees by their size.
        chances (`list[list[float]]`): `[depth][rank]`, acceptance once the parent is accepted.
        step_ms (`dict`): milliseconds by `nodes` (the step but for the drafting of a tree's depth) and `depth`.
    """

    candidates: list[Candidate]
    chances: list[list[float]]
    step_ms: dict[str, dict[int, float]]

    @property
    def best(self) -> Candidate:
        """The fastest, as timed."""
        return max(self.candidates, key=lambda candidate: candidate.measured)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "best": self.best.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "acceptance_by_depth_and_rank": self.chances,
            "step_ms": self.step_ms,
        }


@dataclass(kw_only=True)
class Tuner:
    """
    Args:
        model (`PreTrainedModel`): the target.
        draft: what `assistant_model=` takes.
        prompts (`Sequence[EncodedPrompt]`): the texts to tune for.
        limits (`AutoTree`): how large a tree may be.
        temperature (`float`): 0: greedy.
        max_new_tokens (`int`), rounds (`int`), seed (`int`): of the calls.
        advance (`Callable`): called after every call, `num_calls` times.
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
        """How often `advance` is called, at most."""
        prompts = len(self.prompts)
        timed = [Contender("")] * (1 + len(self._wide) + len(self._chains))
        tried = [Contender("")] * (1 + len(self.sizes))
        return prompts * (PASSES + 1) + num_calls(prompts, timed, 1) + num_calls(prompts, tried, self.rounds)

    @property
    def sizes(self) -> list[int]:
        """Numbers of draft nodes within the limits."""
        return [size for size in SIZES if size < self.limits.max_nodes] + [self.limits.max_nodes]

    def check(self) -> None:
        """
        Raises:
            ValueError: if the draft cannot draft for the target.
        """
        options = sampling_options(self.temperature) | {"max_new_tokens": 2}
        generate(self.model, speculative(self.draft, "chain:1"), self.prompts[0], **options)

    def run(self) -> Tuning:
        """
        Counts, times, reckons and tries.

        Raises:
            ValueError: if the target ends every text after one token.
        """
        self.count_acceptance()
        self.time_prefill()
        times = self.step_times()
        chances = self.table.chances()
        plans = [best_plan(chances, times, self.limits, size) for size in self.sizes]
        trees = list(dict.fromkeys(plan.tree for plan in plans if plan.tree is not None))
        # Where no tree promises to pay, short chains are tried nevertheless.
        trees = trees or [TokenTree.chain(1), *self._chains[:1]]
        depths, nodes = range(self.limits.max_depth + 1), self.sizes
        step_ms = {
            "nodes": {number: 1000 * times.rest.up_to(number)[-1] for number in (0, *nodes)},
            "depth": {depth: 1000 * times.propose.up_to(depth)[-1] for depth in depths},
        }
        return Tuning(candidates=self._try(trees, chances, times), chances=chances, step_ms=step_ms)

    # ----------------------------------------------------------------------------------------------------- acceptance

    def count_acceptance(self) -> None:
        """Fills the table, with trees that are as large as allowed and likely by what was counted so far."""
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
        """What steps cost by depth and by number of nodes, from whole steps of wide trees and of chains."""
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
                    measured_length=pool(metrics).mean_acceptance_length,
                )
            )
        return found

    def _compare(self, trees: Sequence[TokenTree], max_new_tokens: int, rounds: int) -> list[list[Call]]:
        """The calls of plain `generate`, and of every tree."""
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
        """Times plain calls for one token of every prompt, the longest twice: the first call of all is slow."""
        options = sampling_options(self.temperature) | {"max_new_tokens": 1}
        generate(self.model, Contender("plain"), max(self.prompts, key=lambda prompt: prompt.length), **options)
        self._prefill = []
        for prompt in self.prompts:
            self._prefill.append(generate(self.model, Contender("plain"), prompt, **options)[1])
            self.advance()

    def _after_prefill(self, call: Call) -> tuple[int, float]:
        """The tokens behind the first, and their seconds."""
        return len(call.tokens) - 1, call.seconds - self._prefill[call.prompt]


def seconds_per_step(call: Call) -> float:
    """Of a speculative call, without the prefill."""
    metrics: Any = call.metrics  # which speculative calls have
    return (call.seconds - metrics.seconds["prefill"]) / max(len(metrics.accepted_per_step[0]), 1)


def combine(per_token: float, per_step: dict[TokenTree, float]) -> StepTimes:
    """
    Step times by nodes and by depth from those of whole steps. Only sums of the two are measured: what one node more
    costs comes from trees of depth 1, and drafting to depth d is what a chain takes beyond its nodes. Neither falls.

    Args:
        per_token (`float`): seconds of a step without a tree.
        per_step (`dict[TokenTree, float]`): seconds of steps with trees of depth 1 and with chains; the tree of one
            node must be among them.
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
