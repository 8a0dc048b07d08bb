"""
Rows with a grammar in whole steps on the device: tokens that it asks for are forced, and the host takes tokens up to
the first that is not allowed.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.batches import assert_nothing_left, limits
from support.device_steps import Steps
from support.exact import SIGNIFICANCE, Fit, enumerate_tokens, fit
from support.grammar import NaiveMask, small_tokenizer
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from support.sampling import LENGTH, PROMPT, TREE, VOCAB, a_draft, a_head, sampled_tokens, the_target
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessorList

from hf_specdec import DynamicTree, SpeculativeConfig, last_metrics
from hf_specdec.engine.captured import grammars
from hf_specdec.engine.captured.grammars import force
from hf_specdec.grammar import GrammarMask
from hf_specdec.trees import Topology


ROWS, END = 500, 2
FORCED = LLMatcher.grammar_from_regex("[ab]bca[abc]{8,}")
"""Tokens that the grammar asks for, after the first one: `bc` or `b`, and what is left of `bca`."""
GRAMMAR = LLMatcher.grammar_from_regex("(a|b|ca)[abc](bca|cab)?[abc]{8,}")
LINES = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\.")


@cache
def expected(grammar: str) -> torch.Tensor:
    mask = NaiveMask(grammar, small_tokenizer(), PROMPT["input_ids"].shape[1], [0], VOCAB)
    return enumerate_tokens(
        the_target(), PROMPT, LENGTH, logits_processor=LogitsProcessorList([mask]), temperature=0.8
    )


def sampled(config: SpeculativeConfig, assistant: Any, grammar: str = GRAMMAR) -> Fit:
    target, options = copy.deepcopy(the_target()).float(), {"grammar": grammar, "tokenizer": small_tokenizer()}
    found = sampled_tokens(target, assistant.float(), config, ROWS, temperature=0.8, **options)
    return fit(found, expected(grammar))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["target", "auto"])
def test_the_distribution(method: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong version of it, which takes the next best token of the step, does not fit."""
    config = SpeculativeConfig(tree=TREE, verification=method, cuda_graphs=True)
    found = sampled(config, copy.deepcopy(a_draft("noisy")))
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found
    if method == "auto":
        monkeypatch.setattr(grammars, "choose", lambda scores, do_sample: scores.argmax(dim=-1))
        assert sampled(config, copy.deepcopy(a_draft("noisy"))).p_value < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("tree", [TREE, DynamicTree(depth=2, top_k=2, num_nodes=4)], ids=["static", "dynamic"])
def test_the_distribution_with_forced_tokens(tree: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by a head that lacks some tokens. A wrong version forces what may also be otherwise, and does not fit."""
    config = SpeculativeConfig(tree=tree, cuda_graphs=True)
    found = sampled(config, copy.deepcopy(a_head(6)), FORCED)
    assert steps.replays > 0
    assert found.p_value > SIGNIFICANCE, found
    if isinstance(tree, DynamicTree):
        forced = GrammarMask.forced
        monkeypatch.setattr(GrammarMask, "forced", lambda *args: forced(*args) or [1])
        assert sampled(config, copy.deepcopy(a_head(6)), FORCED).p_value < SIGNIFICANCE


@pytest.mark.parametrize("is_static", [True, False])
def test_forced_logits(is_static: bool) -> None:
    """Against a walk down the chain, node by node, of rows with chains of all lengths."""
    draw = torch.Generator().manual_seed(3)
    rows, vocab = 40, 3
    if is_static:
        topology = Topology.of_tree(TREE, torch.device("cpu"))
    else:
        parents = [torch.randint(0, max(node, 1), (rows, 1), generator=draw) for node in range(12)]
        topology = Topology.of_parents(torch.cat(parents, dim=1), 11)
    count = topology.parents.shape[1]
    tokens = torch.randint(-1, vocab, (rows, count), generator=draw)
    logits = torch.randn(rows, count, vocab, generator=draw)
    forced = torch.randint(0, vocab, (rows, topology.depth + 1), generator=draw)
    forced = forced.masked_fill(torch.arange(topology.depth + 1) >= torch.arange(rows)[:, None] % 5, -1)
    expected = logits.clone()
    for row, chain in enumerate(forced.tolist()):
        nodes, parents = {0}, topology.parents[row if topology.rows > 1 else 0].tolist()
        for token in [token for token in chain if token >= 0]:
            for node in sorted(nodes)[:1]:  # of two alike, a walk takes the first
                expected[row, node, [other for other in range(vocab) if other != token]] = -torch.inf
            nodes = {n for n in range(1, count) if parents[n] in nodes and int(tokens[row, n]) == token}
    highest = force(logits, logits.amax(dim=-1), forced, tokens, topology)
    assert torch.equal(logits, expected) and torch.equal(highest, expected.amax(dim=-1))


@pytest.mark.parametrize("tree", [IRREGULAR, DynamicTree(depth=3, top_k=3, num_nodes=9)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.some_cases(1)
def test_greedy_calls(kind: str, tree: Any, steps: Steps) -> None:
    """With padding, and with features that wait for a head."""
    target = tiny_model(dtype=torch.float32) if kind == "draft" else copy.deepcopy(the_target()).float()
    grammar, tokenizer = (LINES, tiny_tokenizer()) if kind == "draft" else (GRAMMAR, small_tokenizer())
    inputs = prompts(3, 9) if kind == "draft" else {name: value.expand(2, -1) for name, value in PROMPT.items()}
    draft = noisy_copy(target, 0.05) if kind == "draft" else copy.deepcopy(a_head(None)).float()
    options: dict[str, Any] = {"grammar": grammar, "tokenizer": tokenizer, "max_new_tokens": 40, "do_sample": False}
    options |= {"eos_token_id": END, "min_new_tokens": 16} if kind == "draft" else {"eos_token_id": 0}
    options["pad_token_id"] = 0
    alone = target.generate(**inputs, **options)
    found = target.generate(**inputs, **options, assistant_model=draft, tree=tree)
    assert torch.equal(found, alone)
    assert steps.replays > 4
    if grammar == LINES:  # `start` and more
        assert min(of_row[0] for of_row in last_metrics().accepted_per_step) >= 3


def test_requests_beside_others(steps: Steps) -> None:
    """One with a grammar, one without, one that nothing continues: all of them in whole steps."""
    target = tiny_model(dtype=torch.float32)
    given: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 9, 12], {"grammar": LINES}),
        ([7, 7, 3, 8], {}),
        ([4, 30], {"grammar": LLMatcher.grammar_from_regex("abcde[0-9]")}),
    ]
    with target.init_continuous_batching(
        assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR, continuous_batching_config=limits()
    ) as manager:
        for number, (prompt, own) in enumerate(given):
            own = own | ({"tokenizer": tiny_tokenizer()} if own else {})
            manager.add_request(prompt, str(number), 40, eos_token_id=END, **own)
        found: dict[str, Any] = {}
        while len(found) < len(given):
            output = manager.get_result(timeout=60)
            if output is not None and output.is_finished():
                found[output.request_id] = output
    for number in (0, 1):
        prompt, own = given[number]
        own = own | ({"tokenizer": tiny_tokenizer()} if own else {})
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=END, **own)
        assert found[str(number)].generated_tokens == alone[0, len(prompt) :].tolist()
    assert "no token of the vocabulary continues the text" in found["2"].error
    assert found["2"].fails_by_its_options and len(found["2"].generated_tokens) == 5
    assert steps.replays > 4
    assert_nothing_left(manager)
