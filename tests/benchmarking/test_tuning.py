"""`hf-specdec tune`, and the arithmetic behind it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarking import last_line, on_tiny_target
from support.models import tiny_model
from transformers import BatchEncoding, PreTrainedModel

import hf_specdec
from hf_specdec import TokenTree
from hf_specdec.benchmarking.prompts import EncodedPrompt
from hf_specdec.benchmarking.tuning import EvenAcceptance, Tuner, combine
from hf_specdec.drafters import ObservedDrafter, as_drafter
from hf_specdec.trees import AutoTree
from hf_specdec.trees.auto import best_plan
from hf_specdec.trees.auto_tables import expected_length


def prompt(*ids: int) -> EncodedPrompt:
    tokens = torch.tensor([ids])
    return EncodedPrompt("chat", BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}))


def test_step_times_add_up_to_what_was_measured() -> None:
    """Depth 1 costs 2 + n / 2, and every level of a chain 3 more: wide trees and chains are met again."""
    wide = {TokenTree.from_branching((n,)): 12 + n / 2 for n in (1, 2, 4, 8)}
    chains = {TokenTree.chain(d): 12 + d / 2 + 3 * (d - 1) for d in (2, 4)}
    times = combine(10.0, wide | chains)
    assert times.of(None) == 10.0
    for tree, seconds in (wide | chains).items():
        assert times.of(tree) == pytest.approx(seconds)
    # In between: on the line. 6 nodes of depth 3: 12 + 6 / 2 + 3 · 2.
    assert times.of(TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]")) == pytest.approx(21.0)


def test_step_times_do_not_fall_with_noise() -> None:
    wide = {TokenTree.from_branching((n,)): seconds for n, seconds in ((1, 5.0), (2, 4.0), (4, 7.0))}
    times = combine(3.0, wide | {TokenTree.chain(2): 4.5})
    assert times.rest.up_to(4) == pytest.approx([3.0, 3.0, 3.0, 4.0, 5.0])
    assert times.propose.up_to(2) == pytest.approx([0.0, 2.0, 2.0])


def test_the_best_tree_of_a_small_example() -> None:
    """
    Rank 0 is accepted half of the time and rank 1 a quarter, at each depth. All steps cost 10, a node 1 more and a
    level 1 more: all trees of at most 6 nodes and 2 levels are tried.
    """
    chances = [[0.5, 0.25], [0.5, 0.25]]
    wide = {TokenTree.from_branching((n,)): 11.0 + n for n in (1, 2)}
    times = combine(10.0, wide | {TokenTree.chain(2): 14.0})
    limits = AutoTree(max_nodes=6, max_depth=2, max_children=2)
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    rates = {}
    for number in range(1, 2 ** len(paths)):
        chosen = {path for index, path in enumerate(paths) if number >> index & 1}
        if all(path[:-1] in chosen for path in chosen if len(path) > 1):
            tree = TokenTree(chosen)
            rates[tree] = expected_length(tree.paths, chances) / times.of(tree)
    best = max(rates.values())
    assert rates[TokenTree.chain(1)] == pytest.approx(1.5 / 12)
    assert best_plan(chances, times, limits, 6).tokens_per_second == pytest.approx(max(best, 1 / 10))
    assert best_plan(chances, times, limits, 6).tree in [tree for tree, rate in rates.items() if rate == best]


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_is_counted(do_sample: bool, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Every step of a call that is recorded, and the call is as without the recorder."""
    table = EvenAcceptance(3, 2)
    texts = []
    for assistant in (ObservedDrafter(as_drafter(draft), table.observe), draft):
        torch.manual_seed(0)
        options = {"max_new_tokens": 40, "do_sample": do_sample, "tree": "[(0,), (1,), (0, 0)]"}
        texts.append(target.generate(torch.tensor([[3, 5, 7]]), assistant_model=assistant, **options).tolist())
    assert texts[0] == texts[1]
    metrics = hf_specdec.last_metrics()
    assert sum(map(sum, table._hits)) == metrics.num_accepted_tokens > 0
    # The last step may have room for its own token alone.
    assert metrics.num_drafts - 1 <= table._trials[0][0] <= metrics.num_drafts


@pytest.mark.slow
def test_a_draft_that_is_always_right_gets_a_chain(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a node costs a twentieth of a step: a chain as deep as may be, since second guesses are never right."""
    wide = {TokenTree.from_branching((n,)): 20.0 + n for n in (1, 6)}
    monkeypatch.setattr(Tuner, "step_times", lambda tuner: combine(20.0, wide | {TokenTree.chain(4): 24.0}))
    tuner = Tuner(
        model=target,
        draft=target,
        prompts=[prompt(3, 5, 7), prompt(9, 4)],
        limits=AutoTree(max_nodes=6, max_depth=4),
        max_new_tokens=30,
        rounds=1,
    )
    calls = []
    tuner.advance = lambda: calls.append(1)
    tuning = tuner.run()
    assert 0 < len(calls) <= tuner.num_calls
    assert all(ranks[0] > 0.8 and ranks[1] < 0.1 for ranks in tuning.chances)
    assert tuning.candidates[0].tree is None and tuning.candidates[0].measured_length == 1.0
    assert [candidate.tree for candidate in tuning.candidates[1:]] == [TokenTree.chain(d) for d in (1, 2, 4)]
    for candidate in tuning.candidates[1:]:
        assert candidate.measured_length == pytest.approx(candidate.expected_length, rel=0.25)
        assert candidate.expected == pytest.approx(candidate.expected_length / (20 + candidate.tree.num_nodes))
    assert tuning.best.measured == max(candidate.measured for candidate in tuning.candidates)


def test_texts_of_one_token(target: PreTrainedModel) -> None:
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = list(range(target.config.vocab_size))
    tuner = Tuner(model=target, draft=target, prompts=[prompt(3, 5)], limits=AutoTree(max_nodes=2), max_new_tokens=8)
    with pytest.raises(ValueError, match="ends every text after one token"):
        tuner.run()


def tune(prompts: Path, *arguments: Any) -> Any:
    options = ("--max-new-tokens", 16, "--rounds", 1, "--max-nodes", 4, "--max-depth", 3)
    return on_tiny_target("tune", "--prompts", prompts, *options, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_command(temperature: int, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("t5 t6 t7 t9\n")
    result = tune(path, "--temperature", temperature)
    assert result.exit_code == 0, result.output
    found = last_line(result)
    candidates = found["candidates"]
    assert candidates[0]["tree"] is None and len(candidates) >= 2
    best = max(candidates, key=lambda candidate: candidate["measured_tokens_per_second"])
    assert found["best"] == best
    for candidate in candidates[1:]:
        tree = TokenTree.parse(candidate["tree"])
        assert tree.num_nodes == candidate["num_nodes"] <= 4 and tree.depth <= 3
    if best["tree"] is None:
        assert "No tree pays here" in result.stdout
    else:
        assert f'tree="{best["tree"]}"' in result.stdout


def test_bad_arguments(tmp_path: Path) -> None:
    result = tune(tmp_path / "nowhere.txt")
    assert result.exit_code == 2 and "nowhere.txt" in result.output
    tiny_model(hidden_size=16, vocab_size=2000).save_pretrained(tmp_path / "draft")  # no padding
    result = on_tiny_target("tune", "--draft", tmp_path / "draft")
    assert result.exit_code == 2 and "--draft" in result.output and "vocab" in result.output
    result = on_tiny_target("tune", "--dtype", "int8")
    assert result.exit_code == 2 and "int8" in result.output
