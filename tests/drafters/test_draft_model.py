"""Draft models: what their cache holds, how far they draft, when they rest; and drafters that users write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.calls import (
    TREE,
    assert_same_calls,
    generate_plain,
    generate_with_tree,
    is_ragged,
    new_tokens,
    own_token,
    telling_prompts,
)
from support.models import noisy_copy, prompts, tiny_model, with_fewer_positions
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import Drafter, DraftTree, DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.drafters import DraftModelDrafter, DraftRequest
from hf_specdec.sequences import Sequences
from hf_specdec.trees import Topology


PROMPT = 12
WIDE = "[(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)]"


class CheckedDrafter(DraftModelDrafter):
    """
    A draft model that, at every step, holds its cache against plain forwards over each row's text alone, without
    padding, and keeps what it saw.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.seen: list[list[int]] = []
        """For every step the lengths of the rows."""

    def propose(self, sequences: Sequences) -> DraftTree | None:
        proposed = super().propose(sequences)
        if proposed is not None:
            self.seen.append(list(sequences.lengths))
            assert self.cache.lengths == sequences.lengths, "the cache must hold the text up to the root"
            for row, length in enumerate(sequences.lengths):
                self._check_row(sequences, row, length)
        return proposed

    def _check_row(self, sequences: Sequences, row: int, length: int) -> None:
        visible = torch.ones(length, dtype=torch.bool)
        if sequences.visible is not None:
            visible[: sequences.prompt_length] = sequences.visible[row]
        plain = self.model(sequences.row(row)[:, visible], use_cache=True).past_key_values
        for ours, theirs in zip(self.cache.layers, plain.layers, strict=True):
            for name in ("keys", "values"):
                mine = getattr(ours, name)[row, :, :length][:, visible]
                torch.testing.assert_close(mine, getattr(theirs, name)[0], rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("tree", [TREE, WIDE, DynamicTree(depth=3, top_k=3, num_nodes=9)], ids=str)
@pytest.mark.some_cases(2)
def test_cache_is_that_of_a_plain_forward(family: str, tree: Any) -> None:
    """Five rows with padding that accept different numbers of tokens in every step, some of which end early."""
    target = tiny_model(family)
    drafter = CheckedDrafter(noisy_copy(target, noise=0.1))
    inputs = telling_prompts(target, 5, PROMPT)
    text = new_tokens(target, inputs, 24)
    options = {"max_new_tokens": 24, "eos_token_id": [own_token(text, 0, 7), own_token(text, 3, 15)]}
    _, metrics = assert_same_calls(target, drafter, inputs, options, tree)
    assert is_ragged(metrics)
    assert any(max(lengths) - min(lengths) > 2 for lengths in drafter.seen), "rows never differed by much"


@pytest.mark.parametrize("do_sample", [False, True])
def test_cache_with_drawn_children(target: PreTrainedModel, draft: PreTrainedModel, do_sample: bool) -> None:
    drafter = CheckedDrafter(draft)
    config = SpeculativeConfig(tree=TREE, draft_sampling="sample")
    options = {"max_new_tokens": 24, "speculative_config": config, "do_sample": do_sample, "assistant_model": drafter}
    ours = generate_plain(target, prompts(5, PROMPT, padding=True), options)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0 and len(drafter.seen) > 4
    if not do_sample:
        plain = generate_plain(target, prompts(5, PROMPT, padding=True), {"max_new_tokens": 24})
        assert ours.tolist() == plain.tolist()


def test_cache_with_chunked_prefill(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options = {"max_new_tokens": 16, "prefill_chunk_size": 5}
    assert_same_calls(target, CheckedDrafter(draft), prompts(3, PROMPT, padding=True), options)


# ----------------------------------------------------------------------------------------------------- the bonus token


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8])
def test_the_bonus_token_is_never_missed(target: PreTrainedModel, depth: int, batch_size: int) -> None:
    """
    A model that drafts for itself is always right: each step gives all of its chain and the bonus token. It takes one
    forward of the draft per level and no other, the first of a step over what was accepted and the bonus token.
    """
    draft = noisy_copy(target, noise=0.0)
    widths: list[int] = []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    steps = 4
    options = {"max_new_tokens": 1 + steps * (depth + 1)}
    _, metrics = assert_same_calls(target, draft, inputs, options, TokenTree.chain(depth))
    assert metrics.accepted_per_step == [[depth] * steps] * batch_size
    assert metrics.mean_acceptance_length == depth + 1
    assert metrics.acceptance_per_position == [1.0] * depth
    # The prompt; then a first step, in which only the root is new; then the others.
    first, other = [1] * depth, [depth + 1] + [1] * (depth - 1)
    assert widths == [PROMPT, *first, *other * (steps - 1)]


@pytest.mark.parametrize("tree", [TREE, WIDE], ids=str)
def test_a_perfect_draft_fills_every_tree_to_its_depth(target: PreTrainedModel, tree: str) -> None:
    depth = TokenTree.parse(tree).depth
    options = {"max_new_tokens": 1 + 4 * (depth + 1)}
    _, metrics = assert_same_calls(target, target, prompts(3, PROMPT, padding=True), options, tree)
    assert metrics.accepted_per_step == [[depth] * 4] * 3


# ----------------------------------------------------------------------------------------------------- maximum lengths


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_a_draft_with_fewer_positions(family: str, batch_size: int) -> None:
    """It drafts as far as it knows positions, then steps are plain; the text goes on as if nothing had happened."""
    target = tiny_model("gpt2", max_position_embeddings=64)
    draft = tiny_model(family, seed=3, max_position_embeddings=24, n_positions=24)
    if family == "gpt2":
        draft = with_fewer_positions(target, 24)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    options = {"max_new_tokens": 40}
    plain = generate_plain(target, inputs, options)
    ours = generate_with_tree(target, draft, inputs, options, WIDE)
    assert ours.tolist() == plain.tolist()
    metrics = hf_specdec.last_metrics()
    assert metrics.num_draft_tokens > 0
    if family == "gpt2":
        assert metrics.num_accepted_tokens > 0
    padding = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    for row, steps in enumerate(metrics.accepted_per_step):
        end = PROMPT + 1
        for accepted in steps:
            # A draft token at position p is proposed only if the draft model knows p.
            assert accepted == 0 or end - padding[row] + accepted <= 24
            end += accepted + 1
        assert end == PROMPT + 40


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
@pytest.mark.parametrize("prompt", [23, 24, 25, 40])
def test_a_prompt_longer_than_the_draft_knows(family: str, prompt: int) -> None:
    """No crash, and no draft."""
    draft = tiny_model(family, seed=3, max_position_embeddings=24, n_positions=24)
    target = tiny_model()
    plain = generate_plain(target, prompts(1, prompt), {"max_new_tokens": 12})
    ours = generate_with_tree(target, draft, prompts(1, prompt), {"max_new_tokens": 12}, WIDE)
    assert ours.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_draft_tokens == 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("tree", [TREE, WIDE, TokenTree.chain(7), DynamicTree(depth=5, top_k=2, num_nodes=9)], ids=str)
@pytest.mark.some_cases(2)
def test_a_target_right_up_to_its_last_position(tree: Any, batch_size: int) -> None:
    """GPT-2 has a table of positions: a node one too deep would be an index error."""
    target = tiny_model("gpt2", max_position_embeddings=32)
    assert target.transformer.wpe.weight.shape[0] == 32
    draft = noisy_copy(target, noise=0.05)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    for length in (29, 31, 32) if batch_size == 1 else (30, 32):
        plain = generate_plain(target, inputs, {"max_length": length})
        for assistant in (target, draft, NgramDraft(min_ngram=1)):
            ours = generate_with_tree(target, assistant, inputs, {"max_length": length}, tree)
            assert ours.tolist() == plain.tolist()
            metrics = hf_specdec.last_metrics()
            assert metrics.num_draft_tokens > 0 if assistant is not target else metrics.num_accepted_tokens > 0


# ------------------------------------------------------------------------------------------------ off and on again


class Watched:
    """Notes, for every forward of a target behind the prompt, over how many tokens it was."""

    def __init__(self, target: PreTrainedModel):
        self.widths: list[int] = []
        self.handle = target.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> None:
        self.widths.append(kwargs["input_ids"].shape[1])

    def __enter__(self) -> list[int]:
        return self.widths

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


DRAFTERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "draft_model": CheckedDrafter,
    "ngram": lambda draft: NgramDraft(min_ngram=1),
}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, None])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.some_cases(2)
def test_disable_by_batch_size(target: PreTrainedModel, draft: PreTrainedModel, name: str, limit: int | None) -> None:
    """
    Rows end one after the other. With more than `limit` of them steps are plain; from then on the drafter proposes,
    and what it missed is in its cache exactly as if it had been there all along.
    """
    inputs = telling_prompts(target, 3, PROMPT)
    text = new_tokens(target, inputs, 40)
    ends = [own_token(text, 0, 6), own_token(text, 1, 13)]
    options = {"max_new_tokens": 40, "eos_token_id": ends}
    plain = generate_plain(target, inputs, options)
    config = SpeculativeConfig(tree=TREE, disable_by_batch_size=limit)
    drafter = DRAFTERS[name](draft)
    with Watched(target) as widths:
        ours = generate_plain(target, inputs, {**options, "assistant_model": drafter, "speculative_config": config})
    assert ours.tolist() == plain.tolist()

    metrics = hf_specdec.last_metrics()
    first_end, second_end = sorted(text[row].index(end) + 1 for row, end in enumerate(ends))
    assert 3 < first_end < second_end < 40
    plain_steps = {0: 39, 1: second_end - 1, 2: first_end - 1, 3: 0, None: 0}[limit]
    assert widths[0] == PROMPT and widths[1 : 1 + plain_steps] == [1] * plain_steps
    if limit == 0:
        assert len(widths) == 40
        assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.mean_acceptance_length) == (0, 0, 1.0)
        return
    assert len(widths) < 40
    assert metrics.num_accepted_tokens > 0
    assert sum(metrics.accepted_per_step[2]) > 0
    assert all(accepted == 0 for steps in metrics.accepted_per_step for accepted in steps[:plain_steps])
    # A draft is one unfinished row in one step for which the drafter was asked.
    assert metrics.num_drafts == sum(max(len(steps) - plain_steps, 0) for steps in metrics.accepted_per_step)


def test_off_and_on_and_off_again(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Two rows take turns at resting: one ends for good; a limit that was undercut stays so."""
    inputs = telling_prompts(target, 2, PROMPT)
    options = {"max_new_tokens": 30, "eos_token_id": own_token(new_tokens(target, inputs, 30), 0, 5)}
    plain = generate_plain(target, inputs, options)
    config = SpeculativeConfig(tree=TREE, disable_by_batch_size=1)
    call = {**options, "assistant_model": CheckedDrafter(draft), "speculative_config": config}
    assert generate_plain(target, inputs, call).tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


def test_what_was_missed_is_read_in_pieces(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of all that was missed, over a large vocabulary, would take gigabytes."""
    monkeypatch.setattr("hf_specdec.drafters.draft_model.LONGEST_FORWARD", 5)
    monkeypatch.setattr("hf_specdec.drafters.draft_model.MOST_WITH_LOGITS", 6)
    inputs = telling_prompts(target, 2, PROMPT)
    options = {"max_new_tokens": 40, "eos_token_id": own_token(new_tokens(target, inputs, 40), 0, 20)}
    plain = generate_plain(target, inputs, options)
    config = SpeculativeConfig(tree=TREE, disable_by_batch_size=1)
    call = {**options, "assistant_model": CheckedDrafter(draft), "speculative_config": config}
    shapes: list[tuple[int, int]] = []

    def note(module: PreTrainedModel, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if "input_ids" in kwargs:  # else it is a plain forward of `CheckedDrafter`
            shapes.append((kwargs["input_ids"].shape[1], outputs.logits.shape[1]))

    hook = draft.register_forward_hook(note, with_kwargs=True)
    try:
        assert generate_plain(target, inputs, call).tolist() == plain.tolist()
    finally:
        hook.remove()
    assert shapes.count((5, 1)) >= 3 and max(logits for tokens, logits in shapes if tokens != PROMPT) <= 6
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


# ------------------------------------------------------------------------------------------------ drafters of a user's


class Oracle(Drafter):
    """Proposes the text that is to come, as a chain; `wrong` tokens instead, or nothing, in some steps or rows."""

    default_tree = TokenTree.chain(4)

    def __init__(self, text: torch.Tensor, spoil: Callable[[int, int], str] = lambda step, row: "right"):
        self.text, self.spoil = text, spoil

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        self.steps = 0

    def propose(self, sequences: Sequences) -> DraftTree | None:
        tree = self.request.tree
        kinds = [self.spoil(self.steps, row) for row in range(sequences.batch_size)]
        self.steps += 1
        if set(kinds) == {"nothing"}:
            return None
        tokens = torch.zeros(sequences.batch_size, tree.num_nodes, dtype=torch.long)
        valid = torch.zeros(sequences.batch_size, tree.num_nodes, dtype=torch.bool)
        for row, kind in enumerate(kinds):
            start = sequences.lengths[row]
            count = 0 if kind == "nothing" else min(tree.num_nodes, max(sequences.room(row), 0))
            tokens[row, :count] = self.text[row, start : start + count] + (kind == "wrong")
            valid[row, :count] = True
        return DraftTree(tokens, Topology.of_tree(tree, sequences.device), valid)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_oracle_is_believed(target: PreTrainedModel, batch_size: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    text = generate_plain(target, inputs, {"max_new_tokens": 21})
    oracle = Oracle(text)
    for _ in range(2):
        _, metrics = assert_same_calls(target, oracle, inputs, {"max_new_tokens": 21}, oracle.default_tree)
        assert metrics.accepted_per_step == [[4] * 4] * batch_size
        assert metrics.draft_acceptance_rate == 1.0
        assert not hasattr(oracle, "steps") and not hasattr(oracle, "request"), "a call left its state on the drafter"
    _, metrics = assert_same_calls(target, oracle, inputs, {"max_new_tokens": 21}, TokenTree.chain(9))
    assert metrics.accepted_per_step == [[9, 9]] * batch_size


def test_a_false_oracle_is_not_believed(target: PreTrainedModel) -> None:
    inputs = prompts(3, PROMPT, padding=True)
    text = generate_plain(target, inputs, {"max_new_tokens": 16})
    oracle = Oracle(text, lambda step, row: "wrong")
    ours = generate_with_tree(target, oracle, inputs, {"max_new_tokens": 16}, oracle.default_tree)
    assert ours.tolist() == text.tolist()
    metrics = hf_specdec.last_metrics()
    assert metrics.num_draft_tokens > 0 and metrics.num_accepted_tokens == 0
    assert metrics.accepted_per_step == [[0] * 15] * 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_oracle_that_is_silent_at_times(target: PreTrainedModel, batch_size: int) -> None:
    """None for all rows, nothing that counts for some, lies for others: rows drift far apart."""
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    text = generate_plain(target, inputs, {"max_new_tokens": 40})
    kinds = ("right", "nothing", "wrong", "right", "right", "nothing", "nothing")

    def spoil(step: int, row: int) -> str:
        return "nothing" if step % 5 == 3 else kinds[(step * (row + 1) + row) % len(kinds)]

    _, metrics = assert_same_calls(target, Oracle(text, spoil), inputs, {"max_new_tokens": 40}, Oracle.default_tree)
    assert {0, 4} <= {accepted for steps in metrics.accepted_per_step for accepted in steps}
    assert is_ragged(metrics) or batch_size == 1


def test_an_oracle_when_sampling(target: PreTrainedModel) -> None:
    """Its children are not drawn, so the target alone decides; a seed gives the same text again."""
    inputs = prompts(2, PROMPT)
    text = generate_plain(target, inputs, {"max_new_tokens": 16})
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.05}
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(generate_with_tree(target, Oracle(text), inputs, options, Oracle.default_tree).tolist())
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert texts[0] == texts[1]
