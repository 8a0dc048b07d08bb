"""
Calls and requests with block heads of every kind: the text of plain `generate`, whatever the rows, the tree and the
path; and in every step the trees that the head would propose for that text from scratch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts, text_alone
from support.device_steps import Steps
from support.heads import (
    BLOCK_KINDS,
    HOST_KINDS,
    RecordingBlockDrafter,
    block_from_scratch,
    pads_of,
    tiny_block_head,
)
from support.models import prompts, tiny_model
from support.plain import greedy_text
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import BlockHead, DynamicTree, SpeculativeConfig, TokenTree


CHAIN, IRREGULAR = TokenTree.chain(3), TokenTree.parse("[(0,), (1,), (2,), (0,0), (0,2), (1,1), (0,0,1)]")
DYNAMIC = DynamicTree(depth=3, top_k=4, num_nodes=9)
CHUNKS = {"prefill_chunk_size": 4}
ALL_KINDS = BLOCK_KINDS | HOST_KINDS
KINDS = pytest.mark.parametrize("kind", ALL_KINDS)
TREES = {"static": IRREGULAR, "dynamic": DYNAMIC}


def in_turn(kinds: Iterable[str]) -> pytest.MarkDecorator:
    """Parameters `kind` and `tree`: every kind with one of the trees, in turn; with the other where there is time."""
    return pytest.mark.parametrize(
        "kind, tree",
        [
            pytest.param(kind, tree, id=f"{kind}-{name}", marks=() if (place + number) % 2 == 0 else pytest.mark.slow)
            for place, kind in enumerate(kinds)
            for number, (name, tree) in enumerate(TREES.items())
        ],
    )


def a_target(**options: Any) -> PreTrainedModel:
    return tiny_model("llama", seed=1, dtype=torch.float32, **options)


@torch.no_grad()
def paths_from_scratch(
    head: BlockHead, target: PreTrainedModel, ids: torch.Tensor, count: int
) -> dict[tuple[int, ...], float]:
    """
    Paths of draft tokens, the `count` best of all among them, with their summed log-probabilities, by the head's own
    forward over nothing but the text: the context of all tokens but the last, then a block. A path is never better
    than one that it goes on from: those that are worse than `count` others are not followed.
    """
    root, (states, base) = ids[None, -1:], block_from_scratch(head, target, ids)
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[float, tuple[int, ...], Any]] = [(0.0, (), None)]
    while waiting:
        score, path, carried = waiting.pop(max(range(len(waiting)), key=lambda place: waiting[place][0]))
        if len(found) > count and score < sorted(found.values())[-count] - 1e-2:
            break
        level = slice(len(path), len(path) + 1)
        parent = torch.tensor([[path[-1]]]) if path else root
        logits, carried = head.conditional_logits(base[:, level], states[:, level], parent, carried)
        for index, log_q in enumerate(logits[0, 0].log_softmax(-1).tolist()):
            token = index if head.target_ids is None else int(head.target_ids[index])
            found[*path, token] = score + log_q
            if len(path) + 1 < base.shape[1]:
                waiting.append((score + log_q, (*path, token), carried))
    return found


@pytest.mark.parametrize(
    "kind, options",
    [*((kind, {}) for kind in ALL_KINDS), ("dflash", CHUNKS), ("peagle", CHUNKS), ("windows", CHUNKS)],
)
@pytest.mark.some_cases(2)
def test_every_step_drafts_as_from_scratch(kind: str, options: dict[str, Any]) -> None:
    """Over a ragged batch with padding: the best nodes of all are those of the text alone."""
    target = tiny_model("llama", seed=1, dtype=torch.float32, vocab_size=12)
    head = tiny_block_head(target, **ALL_KINDS[kind])
    drafter, nodes = RecordingBlockDrafter(head), min(9, head.config.num_draft_tokens)
    inputs = {
        name: value % 12 if name == "input_ids" else value for name, value in prompts(3, 9, padding=True).items()
    }
    options = {"do_sample": False, "max_new_tokens": 14} | options
    depth = head.num_drafts
    text = target.generate(
        **inputs, **options, assistant_model=drafter, tree=DynamicTree(depth=depth, top_k=nodes, num_nodes=nodes)
    )
    assert text.equal(target.generate(**inputs, **options))
    compared, pads = 0, pads_of(inputs)
    for draft, lengths in zip(drafter.trees, drafter.lengths, strict=True):
        for row, length in enumerate(lengths):
            if draft.topology.depth < depth or draft.num_valid(row) < draft.num_nodes:
                continue  # at the end of the text
            all_paths = paths_from_scratch(head, target, text[row, pads[row] : length], nodes)
            best = sorted(all_paths.values(), reverse=True)[:nodes]
            own = [all_paths.get(path, -math.inf) for path in paths_of(draft, row)]
            torch.testing.assert_close(torch.tensor(sorted(own, reverse=True)), torch.tensor(best), atol=1e-4, rtol=0)
            compared += 1
    assert compared > 10


def paths_of(draft: Any, row: int) -> list[tuple[int, ...]]:
    tokens, parents = (
        draft.tokens[row].tolist(),
        draft.topology.parents.expand(len(draft.tokens), -1)[row, 1:].tolist(),
    )
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@KINDS
@pytest.mark.parametrize("tree", [CHAIN, IRREGULAR, DYNAMIC, "auto"], ids=["chain", "static", "dynamic", "auto"])
@pytest.mark.some_cases(4)
def test_the_text_is_plain_generates(kind: str, tree: Any) -> None:
    target = a_target()
    head, inputs = tiny_block_head(target, **ALL_KINDS[kind]), prompts(3, 9, padding=True)
    options = {"do_sample": False, "max_new_tokens": 24}
    text = target.generate(**inputs, **options, assistant_model=head, tree=tree)
    assert text.equal(greedy_text(target, inputs, max_new_tokens=24))
    assert hf_specdec.last_metrics().num_draft_tokens > 0


@in_turn(ALL_KINDS)
@pytest.mark.some_cases(2)
def test_requests_in_flight(kind: str, tree: Any) -> None:
    """Prompts in chunks, texts longer than the head's window, and steps in which the head has to catch up."""
    target, ragged = a_target(), ragged_prompts((3, 17, 8, 30))
    head = tiny_block_head(target, **ALL_KINDS[kind])
    found = target.generate_batch(ragged, max_new_tokens=20, do_sample=False, assistant_model=head, tree=tree)
    texts = [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]
    assert texts == [text_alone(target, prompt, max_new_tokens=20) for prompt in ragged]


@in_turn(BLOCK_KINDS)
@pytest.mark.filterwarnings("error:.*could not be captured")
@pytest.mark.some_cases(1)
def test_whole_steps(kind: str, tree: Any, steps: Steps) -> None:
    """A call's steps run whole, with the same text and the same drafts as on the host."""
    target = a_target()
    head, inputs = tiny_block_head(target, **ALL_KINDS[kind]), prompts(2, 9, padding=True)
    found = []
    for cuda_graphs in (False, True):
        before, config = steps.replays, SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        options = {"do_sample": False, "max_new_tokens": 24}
        text = target.generate(**inputs, **options, assistant_model=head, speculative_config=config)
        assert (steps.replays > before) is cuda_graphs
        metrics = hf_specdec.last_metrics()
        found.append((text.tolist(), [row[:-2] for row in metrics.accepted_per_step]))
    assert found[0] == found[1]
    assert found[0][0] == target.generate(**inputs, **options).tolist()


@pytest.mark.parametrize(
    "field, message",
    [
        ("vocab_size", "is for a vocabulary of 40 tokens"),
        ("hidden_size", "reads hidden states of size"),
        ("num_hidden_layers", "layer"),
    ],
)
def test_a_head_of_another_target_is_refused(field: str, message: str) -> None:
    """Before anything runs, with what does not fit."""
    target, sizes = a_target(), {"vocab_size": 40, "hidden_size": 48, "num_hidden_layers": 9}
    fields = {"aux_layer_ids": [1, 8]} if field == "num_hidden_layers" else {}
    head = tiny_block_head(tiny_model("llama", **{field: sizes[field]}), **fields)
    with pytest.raises(ValueError, match=message):
        target.generate(**prompts(1, 5), assistant_model=head, max_new_tokens=5, tree=CHAIN)


def test_a_tree_deeper_than_a_block_is_refused() -> None:
    target = a_target()
    head = tiny_block_head(target)
    with pytest.raises(ValueError, match="deep|levels"):
        target.generate(**prompts(1, 5), assistant_model=head, max_new_tokens=9, tree="chain:4")


@pytest.mark.parametrize("kind", ["dflash", "rnn", "peagle"])
@pytest.mark.some_cases(1)
def test_catches_up_after_steps_without_drafts(kind: str) -> None:
    """Speculation goes off and on again with the number of requests: the head reads what it has missed."""
    target, ragged = a_target(), ragged_prompts((3, 17, 8, 30))
    head = tiny_block_head(target, **ALL_KINDS[kind])
    config = SpeculativeConfig(tree=DYNAMIC, disable_by_batch_size=2)
    limits = [4, 30, 6, 40]
    manager = target.init_continuous_batching(assistant_model=head, speculative_config=config)
    with manager:
        names = [manager.add_request(ids, max_new_tokens=most) for ids, most in zip(ragged, limits, strict=True)]
        outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in names)}
    texts = [outputs[name].generated_tokens for name in names]
    assert texts == [text_alone(target, ids, max_new_tokens=most) for ids, most in zip(ragged, limits, strict=True)]
