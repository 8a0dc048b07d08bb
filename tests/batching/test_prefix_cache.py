"""Requests whose texts begin alike share the blocks of what is equal: nothing but the time is different."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from support.adapters import adapted, alone
from support.batches import (
    assert_nothing_left,
    limits,
    manager_of,
    run_together,
    run_with_ends,
    runs_of_steps,
    text_alone,
)
from support.goldens import trained_prompts, trained_target
from support.graphs import install_stand_in
from support.heads import tiny_block_head, tiny_head, trained_head
from support.hybrids import hybrid
from support.models import noisy_copy, tiny_model
from transformers import PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.batching import Limits, SpeculativeBatchingManager
from hf_specdec.drafters import EagleDrafter
from hf_specdec.engine import prefix_keys
from hf_specdec.engine.prefixes import PrefixCache
from hf_specdec.engine.request import Request
from hf_specdec.graphs.paged import PagedGraphs


SIZE = 4
DRAFTS = ("model", "eagle", "block", "ngram")


@cache
def the_target(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(dtype=dtype)


@cache
def a_draft(kind: str, dtype: torch.dtype) -> Any:
    makers = {"eagle": tiny_head, "block": tiny_block_head, "model": lambda target: noisy_copy(target, 0.05)}
    return makers[kind](the_target(dtype)) if kind in makers else NgramDraft()


def manager_for(
    kind: str = "model",
    num_blocks: int = 200,
    shares: bool = True,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Any:
    limits = {"block_size": SIZE, "chunk_size": 16} | options
    own = Limits(num_blocks=num_blocks, shares_prefixes=shares, **limits)
    return manager_of(the_target(dtype), a_draft(kind, dtype), continuous_batching_config=own)


def requests_of(manager: SpeculativeBatchingManager, prompts: list[list[int]], **options: Any) -> list[Request]:
    own = {name: options.pop(name) for name in ("speculate", "seed") if name in options}
    options = {"max_new_tokens": 9, "do_sample": False} | options
    return [manager._admission.request(str(n), prompt, options, **own) for n, prompt in enumerate(prompts)]


def write(manager: SpeculativeBatchingManager, *prompts: list[int], **options: Any) -> list[list[int]]:
    return run_together(manager, requests_of(manager, list(prompts), **options))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 61), k=count)


def held(monkeypatch: pytest.MonkeyPatch) -> dict[Request, list[torch.Tensor]]:
    """K/V of target and draft of every request when it leaves, as far as they are committed."""
    found: dict[Request, list[torch.Tensor]] = {}
    leave = PrefixCache.leave

    def noting(self: PrefixCache, request: Request) -> None:
        parts = []
        for store in (self._cache, self._drafting.cache):
            length = 0 if store is None else min(store.length_of(request.table), request.length - 1)
            for layer in store.layers if length else ():
                for states in layer.states:
                    parts.append(states[request.table.blocks].transpose(1, 2).flatten(0, 1)[:length].clone())
        found[request] = parts
        leave(self, request)

    monkeypatch.setattr(PrefixCache, "leave", noting)
    return found


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether K/V differ; of the end, how much a draft has read depends on its last step."""
    pairs = [(a[: len(b)], b[: len(a)], abs(len(a) - len(b))) for a, b in zip(one, other, strict=True)]
    atol = 1e-9 if one and one[0].dtype == torch.float64 else 1e-4
    return any(unread > 2 * SIZE or not torch.allclose(a, b, atol=atol) for a, b, unread in pairs)


# ----------------------------------------------------------------------------------------------------- equal to plain


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.some_cases(2)
def test_turns_and_a_shared_beginning(kind: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of plain `generate`; drafts and K/V are those of a manager that shares nothing."""
    dtype, runs = (torch.float32 if captured else torch.float64), runs_of_steps(monkeypatch)
    if captured:
        install_stand_in(monkeypatch, with_kernel=True)
        monkeypatch.setattr(PagedGraphs, "prompt_widths", (4, 8))
    kv, found = held(monkeypatch), []
    for shares in (True, False):
        manager, kept = manager_for(kind, shares=shares, dtype=dtype), []
        system, accepted = random_tokens(22), []
        dialogues = [system + random_tokens(5, seed) for seed in (1, 2)]
        for turn in range(3):
            requests = requests_of(manager, [*dialogues, system + random_tokens(3, 7 + turn)])
            texts = run_together(manager, requests)
            for dialogue, text in zip(dialogues, texts, strict=False):
                assert text == text_alone(the_target(dtype), dialogue, max_new_tokens=9)
                dialogue += text + random_tokens(4, turn)
            accepted += [request.metrics.accepted_per_step for request in requests]
            kept += [kv[request] for request in requests]
        found.append((accepted, kept))
        state, looked_up = manager.state, 2 * (27 + 40 + 53) + 3 * 25
        assert state.num_prefix_queries == looked_up * shares
        # The beginning, and of dialogues what was cached of the turn before; a head has not read all of its end.
        hits, less = 2 * (20 + 32 + 48) + 2 * 20, 4 * SIZE if kind in ("eagle", "block") else 0
        assert (hits - less) * shares <= state.num_prefix_hits <= hits * shares
        assert state.num_prompt_tokens == looked_up - state.num_prefix_hits
        assert_nothing_left(manager)
    (with_cache, its), (without, theirs) = found
    assert with_cache == without
    assert not any(map(differ, its, theirs))
    assert bool(runs) is (captured and kind != "ngram")


@pytest.mark.slow
def test_float32() -> None:
    """Rounding may decide between tokens that are almost as likely, and nothing else."""
    target, prompts = trained_target(), trained_prompts()["prompts"]
    own = Limits(num_blocks=300, block_size=SIZE, chunk_size=64)
    manager = manager_of(target, trained_head(), continuous_batching_config=own)
    dialogues = [prompts[-1][:22] + prompt[:12] for prompt in prompts[:6]]
    for _ in range(3):
        for dialogue, text in zip(dialogues, write(manager, *dialogues), strict=True):
            expected = text_alone(target, dialogue, max_new_tokens=9)
            if text != expected:
                same = next(n for n, pair in enumerate(zip(text, expected, strict=True)) if len({*pair}) > 1)
                logits = target(torch.tensor([dialogue + text[:same]])).logits[0, -1]
                best, second = logits.topk(2).values
                assert best - second < 1e-4
            dialogue += text + [5, 6, 7]
    assert manager.state.num_prefix_hits > 3 * 6 * 20


@pytest.mark.parametrize("kind", ["model", "eagle"])
@pytest.mark.some_cases(1)
def test_seeds_draw_the_same(kind: str) -> None:
    """Cold, warm and without the cache: drawn tokens depend on seeds and texts alone."""
    prompts = [random_tokens(18) + [token] for token in (5, 6)]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 3}
    managers = manager_for(kind), manager_for(kind, shares=False)
    texts = [write(manager, *prompts, **options) for manager in managers for _ in range(2)]
    assert texts == [texts[0]] * 4 and managers[0].state.num_prefix_hits == 16 + 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_few_blocks(kind: str) -> None:
    """Old prefixes give way; a request that loses its blocks finds those again that nobody has taken."""
    system = random_tokens(13)
    prompts = [system + random_tokens(count, count) for count in (1, 9, 4, 7, 2, 5)]
    texts = [text_alone(the_target(), prompt, max_new_tokens=16) for prompt in prompts]
    read = []
    for shares in (True, False):
        manager = manager_for(kind, 19, shares)
        for _ in range(2):
            assert write(manager, *prompts, max_new_tokens=16) == texts
        assert manager.state.num_preemptions > 0
        assert_nothing_left(manager)
        read.append(manager.state.num_prompt_tokens)
    assert read[0] < read[1] / 2


def test_what_was_used_least_recently_goes_first() -> None:
    manager = manager_for("ngram", 12)
    first, second, third = ([token] * 12 for token in (5, 6, 7))

    def hits(prompt: list[int]) -> int:
        before = manager.state.num_prefix_hits
        write(manager, prompt, max_new_tokens=2)
        return manager.state.num_prefix_hits - before

    assert [hits(prompt) for prompt in (first, second, first)] == [0, 0, 8]
    write(manager, third, max_new_tokens=26, speculate=False)  # takes what is free, and then the second's
    assert [hits(prompt) for prompt in (first, second)] == [8, 0]


def test_equal_prompts_are_read_once() -> None:
    """Those that come together wait for the first of them, and read what is not a full block."""
    prompt = random_tokens(43)
    for kind in ("ngram", "eagle"):
        manager = manager_for(kind)
        texts = write(manager, *[prompt] * 4)
        assert texts == [text_alone(the_target(), prompt, max_new_tokens=9)] * 4
        assert manager.state.num_prompt_tokens == 43 + 3 * 3 and manager.state.num_prefix_hits == 3 * 40


def test_nobody_waits_for_much_longer_prompts() -> None:
    """Of which only the beginning is equal: reading that again takes less time."""
    manager, beginning = manager_for("ngram", chunk_size=300), random_tokens(8)
    write(manager, *(beginning + random_tokens(count, count) for count in (60, 3, 2)))
    assert manager.state.num_prefix_hits == 8  # of the third, after the second


def test_nobody_waits_for_a_less_urgent_request() -> None:
    """Which would not be read as long as others are more urgent."""
    manager, prompt = manager_for("ngram", 900, chunk_size=32, max_requests=64), random_tokens(60)
    ask, engine, options = manager._admission.request, manager.engine, {"max_new_tokens": 2, "do_sample": False}
    with engine.running():
        engine.scheduler.add(ask("older", [*prompt, 5], options, priority=1))
        list(engine.step())
        urgent, num_steps = ask("urgent", [*prompt, 6], options), 0
        engine.scheduler.add(urgent)
        while not urgent.is_over and num_steps < 9:
            engine.scheduler.add(ask(f"other {num_steps}", random_tokens(32, num_steps + 1), options))
            list(engine.step())
            num_steps += 1
    assert urgent.is_over


# -------------------------------------------------------------------------------------------------------- kept apart


@pytest.mark.parametrize("kind, hits", [("model", 8), ("block", 8), ("eagle", 4)])
def test_the_token_behind_a_block(kind: str, hits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row t of an EAGLE head has token t + 1: a block whose next token is another one is not taken."""
    beginning = random_tokens(8)
    prompts = [beginning + random_tokens(5, seed) for seed in (1, 2)]
    kv, of_managers = held(monkeypatch), []
    for shares in (True, False):
        manager = manager_for(kind, shares=shares)
        for prompt in prompts:
            write(manager, prompt)
        of_managers.append(manager.state.num_prefix_hits)
    kept = list(kv.values())
    assert of_managers == [hits, 0] and not any(map(differ, kept[:2], kept[2:]))


def test_a_block_without_its_next_token_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleDrafter, "tokens_ahead", 0)
    with pytest.raises(AssertionError):
        test_the_token_behind_a_block("eagle", 8, monkeypatch)


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_blocks_without_the_drafts_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model reads what it lacks; where a head lacks its part, the target reads again."""
    kv, prompt = held(monkeypatch), random_tokens(19)
    manager, hits = manager_for(kind), []
    for speculate in (False, True, True, False):
        write(manager, prompt, speculate=speculate)
        hits.append(manager.state.num_prefix_hits)
    assert hits == ([0, 0, 16, 32] if kind == "eagle" else [0, 16, 32, 48])
    unshared = manager_for(kind, shares=False)
    write(unshared, prompt)
    kept = list(kv.values())
    assert not differ(kept[1], kept[4]) and not differ(kept[2], kept[4])
    assert_nothing_left(manager)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_adapters(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wrong:
        monkeypatch.setattr(prefix_keys, "_root_of", lambda request: b"")
    model, prompt, texts = adapted(), random_tokens(18), []
    own = Limits(num_blocks=99, block_size=SIZE, chunk_size=16)
    manager, choices = manager_of(model, NgramDraft(), continuous_batching_config=own), ("a", None, "c", "a")
    for adapter in choices:
        options = {"max_new_tokens": 9, "do_sample": False}
        manager.engine.target.adapters.check(adapter)
        texts += run_together(manager, [manager._admission.request("one", prompt, options, adapter=adapter)])
    expected = [alone(model, adapter, prompt, max_new_tokens=9) for adapter in choices]
    assert (texts == expected and manager.state.num_prefix_hits == 16) != is_wrong


@pytest.mark.parametrize("how", ["in place", "by data", "replaced", "draft", "told"])
@pytest.mark.some_cases(2)
def test_other_weights(how: str) -> None:
    """What was cached with earlier weights is not read with later ones, and texts in between are not kept."""
    target, prompt = tiny_model(), random_tokens(18)
    draft = noisy_copy(target, 0.05)
    own = Limits(num_blocks=99, block_size=SIZE, chunk_size=16)
    manager, weight = manager_of(target, draft, continuous_batching_config=own), target.lm_head.weight
    layer = (draft if how == "draft" else target).model.layers[0].self_attn.k_proj
    engine, running = manager.engine, requests_of(manager, [prompt], max_new_tokens=30)[0]
    write(manager, prompt)
    with engine.running():
        engine.scheduler.add(running)
        for _ in range(2):
            list(engine.step())
    assert manager.state.num_prefix_hits == 16 and weight is target.lm_head.weight
    with torch.no_grad():
        if how == "replaced":
            layer.weight = torch.nn.Parameter(layer.weight.flip(0))
        elif how == "by data":
            layer.weight.data.mul_(-1.0)
        elif how == "told":
            layer.weight.data[3, 3] += 2.0
            manager.reset_prefix_cache()
        else:
            layer.weight.mul_(-1.0)
    run_together(manager, [])
    with engine.running():
        while not running.is_over:
            list(engine.step())
        engine.end(running)
    for hits in (16, 32):
        assert write(manager, prompt) == [text_alone(target, prompt, anew=True, max_new_tokens=9)]
        assert manager.state.num_prefix_hits == hits
    assert_nothing_left(manager)


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_nan_stays_where_it_is(kind: str) -> None:
    """A text that ends with an error shares its beginning with others, whose blocks are not wiped for it."""
    target, prompt = tiny_model(), random_tokens(17)
    with torch.no_grad():
        target.get_input_embeddings().weight[60] = torch.nan
    draft = tiny_head(target) if kind == "eagle" else NgramDraft()
    own = Limits(num_blocks=99, block_size=SIZE, chunk_size=16)
    manager, bad = manager_of(target, draft, continuous_batching_config=own), [p for p in prompt if p != 60]
    expected = text_alone(target, bad, max_new_tokens=9)
    for _ in range(2):
        assert write(manager, bad) == [expected]
        with pytest.raises(AssertionError):
            write(manager, bad + [60, 5, 6, 7, 8, 9, 10, 11])
    assert manager.state.num_prefix_hits >= 3 * 12
    assert_nothing_left(manager)


# ------------------------------------------------------------------------------------------------------------ in whole


@pytest.mark.parametrize("kind", ["model", "eagle"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.some_cases(1)
def test_random_requests_that_end_at_any_time(seed: int, kind: str) -> None:
    """Texts are those of plain `generate`, and at the end nobody has a block."""
    choice = random.Random(seed)
    manager = manager_for(kind, 30, max_requests=5)
    engine, beginnings = manager.engine, [random_tokens(count, count) for count in (9, 16, 21)]
    prompts = [choice.choice(beginnings) + random_tokens(choice.randrange(4), n % 3) for n in range(40)]
    lengths = [choice.randint(1, 14) for _ in prompts]
    texts = [text_alone(the_target(), prompt, max_new_tokens=14) for prompt in prompts]
    requests = [
        requests_of(manager, [prompt], max_new_tokens=length, speculate=choice.random() < 0.8)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    pool = engine.pool
    for _ in run_with_ends(manager, requests, choice):
        if choice.random() < 0.02:
            manager.reset_prefix_cache()
        held = Counter(block for request in engine.scheduler.active for block in request.table.blocks)
        assert [pool._num_users[block] for block in held] == list(held.values())
        assert sorted([*held, *pool._free, *pool._idle]) == list(range(2, 32))
        assert pool._blocks == {key: block for block, key in pool._keys.items()}
        assert pool.drafted <= pool._keys.keys() and pool._idle.keys() <= pool._keys.keys()
    for request, text, length in zip(requests, texts, lengths, strict=True):
        written = request.tokens[len(request.prompt) :]
        assert written == text[: len(written)] and (request.error or written == text[:length])
    assert manager.state.num_prefix_hits > 200
    assert_nothing_left(manager)


def test_earlier_weights_beside_later_ones() -> None:
    """A request with blocks of before takes none of what is read afterwards: its head would begin anew among them."""
    prompt = random_tokens(40)
    manager = manager_for("eagle")
    write(manager, prompt[:9])
    options = {"max_new_tokens": 4, "do_sample": False}
    ask, engine = manager._admission.request, manager.engine
    older, one, urgent = (ask(str(n), [*prompt, 5], options, priority=-(n // 2)) for n in range(3))
    with engine.running():
        for request in (older, one):
            engine.scheduler.add(request)
        list(engine.step())
        assert one.table.num_shared == 2 and engine.prefixes.waits(one)
        manager.reset_prefix_cache()
        engine.scheduler.add(urgent)
        while urgent.length == len(urgent.prompt):
            list(engine.step())
        list(engine.step())
        assert one.table.num_shared == 2
        assert engine.drafting.cache.length_of(one.table) >= 8
    run_together(manager, [])
    assert one.tokens[41:] == text_alone(the_target(), [*prompt, 5], max_new_tokens=4)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_blocks_of_others_outlive_a_failure(kind: str) -> None:
    """One of two texts that share blocks fails after these are forgotten: the other goes on with them."""
    prompt = random_tokens(18)
    manager, options = manager_for(kind), {"max_new_tokens": 20}
    write(manager, prompt, max_new_tokens=2)
    one, other = requests_of(manager, [[*prompt, 5], [*prompt, 6]], **options)
    engine = manager.engine
    with engine.running():
        for request in (one, other):
            engine.scheduler.add(request)
        list(engine.step())
        manager.reset_prefix_cache()
        list(engine.step())
        one.fail("of its own")
        engine.bookkeeping.mark_nan_of_failed([one])
        engine.end(one)
    assert manager.state.num_prefix_hits == 32
    run_together(manager, [])
    assert other.tokens[19:] == text_alone(the_target(), [*prompt, 6], **options)
    assert_nothing_left(manager)


def test_off(caplog: pytest.LogCaptureFixture) -> None:
    config = limits(allow_block_sharing=False)
    manager = manager_of(the_target(), NgramDraft(), continuous_batching_config=config)
    write(manager, random_tokens(9), random_tokens(9))
    assert manager.state.num_prompt_tokens == 18 and not manager.engine.prefixes.is_on
    with_states = manager_of(hybrid("qwen3_5_text"), NgramDraft())
    assert not with_states.engine.prefixes.is_on
