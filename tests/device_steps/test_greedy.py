"""Whole steps on the device, with a stand-in for CUDA graphs: texts and counts are those of the host's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.caches import assert_same_states
from support.device_steps import BY_ATTENTION, Steps
from support.goldens import trained_prompts, trained_target
from support.heads import tiny_head, trained_head
from support.hybrids import CAPTURED, draft_of, hybrid, is_known
from support.models import FAMILIES, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, rows_and_trees
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.attention import supports_switching


DYNAMIC = hf_specdec.DynamicTree(depth=3, top_k=3, num_nodes=9)
TREES = pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC], ids=["static", "dynamic"])


STATES = pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
"""A target with keys and values alone, and one with states as well."""


def pair(family: str, inputs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """A tiny target of a family, and a draft that is often right about what it writes behind these prompts."""
    if family not in CAPTURED:
        target = tiny_model(family, dtype=torch.float32)
        return target, noisy_copy(target, 0.05)
    if not is_known(family):
        pytest.skip("this release has no such family")
    target = hybrid(family)
    return target, draft_of(target.generate(**inputs, max_new_tokens=24, do_sample=False).tolist())


def counts(tree: Any) -> tuple[Any, ...]:
    """
    What the last call accepted and drafted. A dynamic tree is grown by the host no deeper than the text goes on, by
    the device as deep as ever: the last steps differ.
    """
    metrics = hf_specdec.last_metrics()
    if isinstance(tree, hf_specdec.DynamicTree):
        return ([before_the_end(row) for row in metrics.accepted_per_step],)
    return metrics.accepted_per_step, metrics.num_draft_tokens, metrics.num_accepted_per_position


def before_the_end(row: list[int], tokens: int = 5) -> list[int]:
    """The accepted numbers of a row's steps, but of those that come so near to its end."""
    written = torch.tensor(row).add(1).cumsum(0).tolist()
    return [count for count, end in zip(row, written, strict=True) if end <= written[-1] - tokens]


def both(model: Any, steps: Steps, tree: Any, **call: Any) -> torch.Tensor:
    """A call twice, by the host's steps and by the device's; returns the text of the latter."""
    found = []
    for cuda_graphs in (False, True):
        before = steps.replays
        config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        text = model.generate(**call, do_sample=False, speculative_config=config)
        assert (steps.replays > before) is cuda_graphs
        found.append((text.tolist(), counts(tree)))
    assert found[0] == found[1]
    return text


@BY_ATTENTION
@rows_and_trees(IRREGULAR, DYNAMIC)
@pytest.mark.parametrize("family", (*FAMILIES, *CAPTURED))
@pytest.mark.some_cases(6)
def test_families(family: str, batch_size: int, tree: Any, steps: Steps) -> None:
    target, draft = pair(family, prompts(batch_size, 9, padding=batch_size > 1))
    if family not in CAPTURED and not supports_switching(target):
        pytest.skip("does not attend through transformers' interface, and so runs without graphs")
    captures = []
    for length in (14, 9):
        inputs = prompts(batch_size, length, padding=batch_size > 1)
        text = both(target, steps, tree, **inputs, assistant_model=draft, max_new_tokens=16)
        assert torch.equal(text, target.generate(**inputs, max_new_tokens=16, do_sample=False))
        captures.append(steps.captures)
    assert captures[0] == captures[1] == 1
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "tree",
    [
        hf_specdec.DynamicTree(depth=6, top_k=2, num_nodes=3),
        hf_specdec.DynamicTree(depth=2, top_k=40, num_nodes=1024),
    ],
    ids=["fewer nodes than levels", "as many nodes as there may be"],
)
@pytest.mark.some_cases(1)
def test_extreme_trees(tree: Any, steps: Steps) -> None:
    target, call = tiny_model(dtype=torch.float32), prompts(1, 14)
    text = target.generate(
        **call,
        assistant_model=noisy_copy(target, 0.05),
        speculative_config=hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=True),
        max_new_tokens=5,
        do_sample=False,
    )
    assert torch.equal(text, target.generate(**call, max_new_tokens=5, do_sample=False))
    assert steps.captures == 1


@pytest.mark.slow
def test_a_tree_of_few_of_its_candidates(steps: Steps) -> None:
    """The draft's memory holds all 72 candidates that are expanded, the target's only the 16 that are verified."""
    tree = hf_specdec.DynamicTree(depth=10, top_k=8, num_nodes=16)
    assert tree.num_slots == 72
    target = tiny_model(dtype=torch.float32)
    both(target, steps, tree, **prompts(1, 8), assistant_model=noisy_copy(target, 0.05), max_new_tokens=38)


@BY_ATTENTION
@TREES
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases
def test_heads(batch_size: int, tree: Any, steps: Steps) -> None:
    target, head = trained_target(), trained_head()
    ids = torch.tensor([prompt[:8] for prompt in trained_prompts()["prompts"][:batch_size]])
    for length in (8, 5):
        call = {"input_ids": ids[:, :length], "attention_mask": torch.ones(batch_size, length, dtype=torch.long)}
        text = both(target, steps, tree, **call, assistant_model=head, max_new_tokens=16)
        assert torch.equal(text, target.generate(**call, max_new_tokens=16, do_sample=False))
    assert steps.captures == 1 and hf_specdec.last_metrics().mean_acceptance_length > 1.5


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.some_cases(1)
def test_the_same_prompt_again_and_again(kind: str, steps: Steps) -> None:
    """
    From the third call on the draft reads the prompt by a graph, which no layer of its cache takes part in: the memory
    that it writes must not be taken, and so cleared, afterwards.
    """
    target, assistant, prompt = trained_target(), trained_head(), trained_prompts()["prompts"][0][:8]
    call = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    if kind == "model":
        target, call = tiny_model(dtype=torch.float32), prompts(1, 8)
        assistant = noisy_copy(target, 0.02)
    for tree in (IRREGULAR, IRREGULAR, DYNAMIC, IRREGULAR, DYNAMIC):
        both(target, steps, tree, **call, assistant_model=assistant, max_new_tokens=12)
        assert hf_specdec.last_metrics().mean_acceptance_length > 1.5
    assert steps.captures == 2


@pytest.mark.smoke
@BY_ATTENTION
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_heads_with_padding_and_draft_vocabularies(draft_vocab_size: int | None, steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    head = tiny_head(target, draft_vocab_size=draft_vocab_size)
    both(target, steps, IRREGULAR, **prompts(3, 11, padding=True), assistant_model=head, max_new_tokens=25)


def test_heads_of_another_dtype(steps: Steps) -> None:
    """A head runs in the target's dtype, as a copy, and so does its cache."""
    target = tiny_model(dtype=torch.float32)
    head = tiny_head(target).double()
    both(target, steps, IRREGULAR, **prompts(1, 11), assistant_model=head, max_new_tokens=12)


@pytest.mark.smoke
@STATES
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 7])
def test_short_texts(max_new_tokens: int, family: str, steps: Steps) -> None:
    """A row never grows past its end, however deep the tree."""
    target, draft = pair(family, prompts(2, 9))
    call = {"assistant_model": draft, "max_new_tokens": max_new_tokens}
    if max_new_tokens == 1:  # the prefill's token is all there is
        text = target.generate(**prompts(2, 9), **call, do_sample=False, tree=IRREGULAR)
        assert text.shape[1] == 10
    else:
        both(target, steps, IRREGULAR, **prompts(2, 9), **call)


@BY_ATTENTION
def test_texts_up_to_the_last_position(steps: Steps) -> None:
    """Learned positions end where the text does; nodes that would lie behind have none."""
    target = tiny_model("gpt2", dtype=torch.float32, max_position_embeddings=24)
    draft = noisy_copy(target, 0.02)
    both(target, steps, IRREGULAR, **prompts(1, 9), assistant_model=draft, max_length=24)


@STATES
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(1)
def test_end_tokens(batch_size: int, family: str, steps: Steps) -> None:
    """Tokens of a text end it, each in turn; finished rows are padded, and rest."""
    inputs = prompts(batch_size, 9)
    target, draft = pair(family, inputs)
    text = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    first = {1: 10, 3: 11}[batch_size]  # every second one with each number of rows
    for token in dict.fromkeys(text[0, first:17:2].tolist()):
        call = inputs | {"max_new_tokens": 24, "eos_token_id": [token, 60], "pad_token_id": 0}
        plain = target.generate(**call, do_sample=False)
        assert torch.equal(both(target, steps, IRREGULAR, **call, assistant_model=draft), plain)


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.some_cases(1)
def test_processors(kind: str, steps: Steps) -> None:
    """
    End tokens of short texts, and others: by position, which padding takes part in. (What looks at the tokens of texts
    takes padding for one of them, and is the host's.)
    """
    target, inputs = tiny_model(dtype=torch.float32), prompts(3, 9, padding=kind == "head")
    draft = noisy_copy(target, 0.05) if kind == "model" else tiny_head(target)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)[:, 9:].tolist()
    hidden = {"suppress_tokens": [plain[0][5]], "begin_suppress_tokens": [plain[1][0], plain[2][4]]}
    hidden |= {"sequence_bias": {(plain[0][2],): -3.0, (7,): 1.0}, "forced_eos_token_id": 2}
    if kind == "model":
        hidden |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [plain[1][2:4]]}
    hidden |= {"min_new_tokens": 14} if kind == "model" else {"min_length": 16}
    call = inputs | {"max_new_tokens": 24, "eos_token_id": [plain[0][3], plain[1][2]], "pad_token_id": 0} | hidden
    text = both(target, steps, IRREGULAR, **call, assistant_model=draft)
    assert torch.equal(text, target.generate(**call, do_sample=False))


@STATES
@pytest.mark.some_cases(1)
def test_forced_first_tokens(family: str, steps: Steps) -> None:
    """
    Padding is the first token of a text, behind which none is forced: neither by the device nor by the host, which
    chooses the first tokens where prompts are read without a graph, as with states.
    """
    inputs = {"input_ids": torch.tensor([[0, 0, 0, 5], [7, 9, 11, 5]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    target, draft = pair(family, inputs)
    for only in (slice(0, 1), slice(0, 2), slice(1, 2)):
        call = {name: value[only] for name, value in inputs.items()} | {"forced_bos_token_id": 33}
        call |= {"max_new_tokens": 12, "pad_token_id": 0}
        text = both(target, steps, IRREGULAR, **call, assistant_model=draft)
        assert torch.equal(text, target.generate(**call, do_sample=False))
    one = {"input_ids": torch.tensor([[5]]), "max_new_tokens": 12, "forced_bos_token_id": 33}
    assert both(target, steps, IRREGULAR, **one, assistant_model=draft)[0, 1] == 33


@STATES
@pytest.mark.parametrize("batch_size", [5, 9])
@pytest.mark.some_cases(1)
def test_rows_that_end_early(batch_size: int, family: str, steps: Steps) -> None:
    """Nothing is captured for the rows that are left, even for a single one."""
    inputs = prompts(batch_size, 9)
    target, draft = pair(family, inputs)
    rows = target.generate(**inputs, max_new_tokens=24, do_sample=False)[:, 9:].tolist()
    ends = [row[2] for row in rows[1:]]
    call = inputs | {"max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 0, "do_sample": False}
    text = target.generate(**call, assistant_model=draft, tree=IRREGULAR)
    assert torch.equal(text, target.generate(**call))
    assert steps.captures == 1


class Columns(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("batch_size", [1, 3])
def test_streamers(batch_size: int, steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    draft, inputs = noisy_copy(target, 0.05), prompts(batch_size, 9)
    end = target.generate(**inputs, max_new_tokens=20, do_sample=False)[0, 16].item()
    call = inputs | {"max_new_tokens": 20, "eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    plain, streamed = Columns(), Columns()
    target.generate(**call, streamer=plain)
    target.generate(**call, streamer=streamed, assistant_model=draft, tree=IRREGULAR)
    assert steps.replays > 0
    assert streamed.columns == plain.columns and streamed.has_ended


@STATES
@pytest.mark.some_cases(1)
def test_caches_over_two_turns(family: str, steps: Steps) -> None:
    """The cache that a call was given holds what plain `generate` leaves there, and serves the next turn."""
    inputs = prompts(1, 9)
    target, draft = pair(family, inputs)
    ids, found = inputs["input_ids"], []
    for options in ({}, {"assistant_model": draft, "tree": IRREGULAR}):
        cache, text = DynamicCache(config=target.config), ids
        for _ in range(2):
            text = target.generate(
                text,
                past_key_values=cache,
                max_new_tokens=12,
                do_sample=False,
                **options,
                attention_mask=torch.ones_like(text),
            )
            text = torch.cat([text, torch.tensor([[7, 8]])], dim=1)
        found.append((text, cache))
    assert steps.replays > 0
    assert torch.equal(found[0][0], found[1][0])
    assert_same_states(found[1][1], found[0][1])


@STATES
@pytest.mark.some_cases(1)
def test_returned_caches_of_rows_that_end_within_a_path(family: str, steps: Steps) -> None:
    """A row is cut where its text ends, while others go on."""
    inputs = prompts(3, 9)
    target, draft = pair(family, inputs)
    rows = target.generate(**inputs, max_new_tokens=16, do_sample=False)[:, 9:].tolist()
    for place in (3, 4, 5):
        options = {"eos_token_id": [rows[0][place], rows[1][place + 5]], "pad_token_id": 0, "max_new_tokens": 16}
        call = inputs | options | {"do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(**call)
        found = target.generate(**call, assistant_model=draft, tree=IRREGULAR)
        assert torch.equal(found.sequences, plain.sequences)
        assert_same_states(found.past_key_values, plain.past_key_values, atol=1e-3)  # as by the host's steps
    assert steps.replays > 0


@pytest.mark.slow
@BY_ATTENTION
def test_a_text_that_outgrew_its_capture_is_captured_anew(steps: Steps) -> None:
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    for max_new_tokens in (12, 110):  # of 96 slots
        both(target, steps, IRREGULAR, **prompts(1, 9), assistant_model=draft, max_new_tokens=max_new_tokens)
    assert steps.captures == 2
