"""Thousands of requests that arrive, end and are cancelled at random: nothing lost, nothing twice, nothing left."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher
from support.adapters import adapted, alone
from support.batches import assert_nothing_left, limits, ragged_prompts
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from support.tokenizer import tiny_tokenizer

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.engine.request import Request
from hf_specdec.grammar import GrammarMask


pytest.importorskip("peft", reason="adapters need peft")

LONGEST = 30
END = 2
ADAPTERS = (None, None, "a", "b")
GRAMMARS = (None, None, LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\."))
PROMPTS = ragged_prompts((9, 1, 30, 17))
PRIORITIES = (0, 0, 0, -1, 1)
Way = tuple[int, str | None, str | None]
"""What a text depends on: the number of its prompt, adapter and grammar."""


@cache
def tuned() -> Any:
    """The target, with two adapters."""
    return adapted(a={"r": 4}, b={"r": 2})


@cache
def text_of(way: Way) -> list[int]:
    """The longest text of a way, by plain `generate`."""
    number, adapter, grammar = way
    own = {} if grammar is None else {"grammar": grammar, "tokenizer": tiny_tokenizer()}
    return alone(tuned(), adapter, PROMPTS[number], max_new_tokens=LONGEST, eos_token_id=END, **own)


@pytest.mark.parametrize(
    "kind, count",
    [
        ("draft", 60),
        *(pytest.param(kind, 200, marks=pytest.mark.slow) for kind in ("draft", "ngram", "head")),
        *(pytest.param(kind, 5000, marks=pytest.mark.slow) for kind in ("draft", "ngram", "head")),
    ],
)
def test_requests_at_random(kind: str, count: int) -> None:
    model = tuned()
    draft: Any = {"draft": noisy_copy(tiny_model()), "ngram": NgramDraft(), "head": tiny_head(model)}[kind]
    manager = model.init_continuous_batching(
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree="[(0,), (1,), (0, 0)]", disable_by_batch_size=6),
        continuous_batching_config=limits(40, max_requests_per_batch=8),
    )
    step = manager.engine.step

    def checked_step() -> Iterator[Request]:
        yield from step()
        if any(request.table.blocks for request in manager.engine.scheduler.waiting):
            raise AssertionError("a request that waits holds blocks")

    manager.engine.step = checked_step
    soak = Soak(manager, count)
    with manager:
        soak.run()
    assert manager.background_thread_status.fatal_error is None
    assert set(soak.ends) == set(soak.asked) and set(soak.ends.values()) == {1}
    state = manager.state
    assert state.num_preemptions > 0 and 0 < state.num_prefix_hits < state.num_prefix_queries
    assert_nothing_left(manager)
    assert manager.get_result() is None
    del soak.manager
    gc.collect()
    assert not [held for held in gc.get_objects() if isinstance(held, (Request, GrammarMask))]
    for adapter in set(ADAPTERS):
        assert alone(model, adapter, PROMPTS[1], max_new_tokens=8, eos_token_id=END) == text_of((1, adapter, None))[:8]
    assert not soak.memory[4:] or soak.memory[-1] < 1.02 * soak.memory[4]  # kilobytes: flat after the first thousand


@dataclass
class Soak:
    """
    Requests of a running manager.

    Args:
        manager (`SpeculativeBatchingManager`): runs them.
        count (`int`): at least so many.
    """

    manager: Any
    count: int
    choice: random.Random = field(default_factory=lambda: random.Random(0))
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Adds all requests, and takes all results."""
        looked = 0
        while len(self.asked) < self.count:
            self.add()
            if self.choice.random() < 0.2:
                name = self.choice.choice(list(self.asked)[-30:])
                self.cancelled.add(name)
                self.manager.cancel_request(name)
            while self.manager.state.num_waiting > 20:
                self.take(0.01)
            if self.choice.random() < 0.02:
                time.sleep(0.02)  # a lull
            if len(self.asked) // 250 > looked:
                looked = len(self.asked) // 250
                self.memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        while sum(self.ends.values()) < len(self.asked):
            assert self.take(60), "a request is lost"
        assert not self.take(0.1)

    def add(self) -> None:
        """Adds a request, or several of one prompt, as for `n` texts."""
        choice = self.choice
        way = choice.randrange(len(PROMPTS)), choice.choice(ADAPTERS), choice.choice(GRAMMARS)
        number, adapter, grammar = way
        options: dict[str, Any] = {"max_new_tokens": choice.randint(1, LONGEST), "adapter": adapter}
        options |= {"streaming": choice.random() < 0.3, "speculate": choice.random() < 0.9}
        options |= {"priority": choice.choice(PRIORITIES), "top_logprobs": choice.choice((None, None, 0, 2))}
        own = {} if grammar is None else {"grammar": grammar, "tokenizer": tiny_tokenizer()}
        for _ in range(3 if choice.random() < 0.1 else 1):
            name = self.manager.add_request(PROMPTS[number], do_sample=False, eos_token_id=END, **options, **own)
            self.asked[name] = {"way": way} | options

    def take(self, timeout: float) -> bool:
        """Takes a result, and checks it."""
        result = self.manager.get_result(timeout=timeout)
        if result is None:
            return False
        asked, tokens = self.asked[result.request_id], result.generated_tokens
        assert result.prompt_ids == PROMPTS[asked["way"][0]]
        expected = text_of(asked["way"])[: asked["max_new_tokens"]]
        assert tokens == expected[: len(tokens)]
        most = asked["top_logprobs"]
        assert len(result.logprobs) == (0 if most is None else len(tokens))
        assert all(len(best) == most or asked["way"][2] for best in result.top_logprobs)  # of what a grammar allows
        if result.is_finished():
            self.ends[result.request_id] += 1
            if result.request_id in self.cancelled and result.error is not None:
                assert result.error == "cancelled"
            else:
                assert result.error is None and tokens == expected
        return True
