"""What callers hand in and get back: caches, criteria, hidden states, threads; and what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from support.caches import assert_same_states
from support.criteria import Custom
from support.heads import tiny_head
from support.hybrids import ONE_OF_EACH, Oracle, hybrid, padded
from support.models import tiny_model
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList

from hf_specdec import Drafter, DraftTree, NgramDraft, TokenTree, Topology
from hf_specdec.compat import CACHE


def converse(
    model: PreTrainedModel, batch_size: int, drafts: Any, rereads: bool = False, **options: Any
) -> tuple[list[list[int]], Any]:
    """
    Two turns on one cache, or each on a new one that reads the whole text (`rereads`); `drafts` makes the draft of a
    turn.
    """
    inputs = padded(batch_size, seed=2)
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], DynamicCache(config=model.config)
    for turn in range(2):
        if rereads:
            cache = DynamicCache(config=model.config)
        held = {CACHE: cache, "attention_mask": mask, **drafts(turn)}
        ids = model.generate(ids, max_new_tokens=10, do_sample=False, **held, **options)
        if turn == 0:
            ids = torch.cat(
                [ids, torch.randint(3, 60, (batch_size, 3), generator=torch.Generator().manual_seed(5))], 1
            )
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return ids.tolist(), cache


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(2)
def test_turns_on_one_cache(family: str, batch_size: int) -> None:
    model = hybrid(family)
    # Plain forwards of several tokens behind a filled cache forget the states of Mamba-1.
    texts, plain = converse(model, batch_size, lambda turn: {}, rereads=family == "zamba")
    found, ours = converse(model, batch_size, lambda turn: {"assistant_model": Oracle(texts, turn, rests=0.1)})
    assert found == texts
    assert_same_states(ours, plain)


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(2)
def test_rows_that_end_early(family: str) -> None:
    """The cache holds padding after their ends, as that of plain `generate` does."""
    assert_padding(hybrid(family), synced_gpus=False)


@pytest.mark.parametrize("others", [0, 2])
def test_rows_that_end_early_beside_other_ranks(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """These join the forward of the padding, even if they have no text left, and may need more forwards after it."""
    model, said, left = hybrid("lfm2"), list[bool](), iter([True] * others + [False])

    def goes_on(ended: bool, synced: bool, device: torch.device) -> bool:
        said.append(ended)
        return not ended or (synced and next(left))

    monkeypatch.setattr(model, "_has_unfinished_sequences", goes_on)
    assert_padding(model, synced_gpus=True)
    assert next(left, None) is None and said[-others - 2 :] == [False] + [True] * (others + 1)


def assert_padding(model: PreTrainedModel, **ours_only: Any) -> None:
    inputs = padded(3, seed=3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    ends = [int(text[0, 17]), int(text[1, 22])]
    options = {"eos_token_id": ends, "max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant_model=Oracle(text.tolist(), 2, rests=0.1), **ours_only)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert_same_states(ours[CACHE], plain[CACHE])


class RunsAhead(Drafter):
    """Drafts four tokens of the first row in its first step, and nothing else."""

    default_tree = TokenTree.chain(4)

    def __init__(self, text: torch.Tensor):
        self.text = text

    def propose(self, sequences: Any) -> DraftTree | None:
        start = sequences.prompt_length + 1
        if sequences.lengths[0] > start:
            return None
        tokens = self.text[:, start : start + 4]
        valid = torch.zeros_like(tokens, dtype=torch.bool)
        valid[0] = True
        return DraftTree(tokens, Topology.of_tree(self.default_tree, sequences.device), valid)


GREEDY = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(2)
def test_a_row_that_ends_ahead(family: str) -> None:
    """An end token that was drafted enters no state before other rows have gone on past it; here they do not."""
    model = hybrid(family)
    for seed in range(3, 200):
        inputs = padded(2, seed=seed)
        text = model.generate(**inputs, do_sample=False, max_new_tokens=5)
        options = GREEDY | {"eos_token_id": text[:, -1].tolist()}
        plain = model.generate(**inputs, **options)
        if plain.sequences.tolist() == text.tolist():  # no row has an end token before its last
            break
    assert plain.sequences.tolist() == text.tolist()
    ours = model.generate(**inputs, **options, assistant_model=RunsAhead(text), tree=RunsAhead.default_tree)
    assert ours.speculation.accepted_per_step == [[4], [0] * 4]
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert_same_states(ours[CACHE], plain[CACHE])


def test_a_text_that_ends_before_those_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forwards are joined until all have ended, without a change to the states."""
    model, inputs = hybrid("lfm2"), padded(1, seed=3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    options = GREEDY | {"eos_token_id": int(text[0, -1])}
    plain, left = model.generate(**inputs, **options), iter([True, True, False])
    monkeypatch.setattr(model, "_has_unfinished_sequences", lambda ended, synced, device: not ended or next(left))
    options |= {"tree": RunsAhead.default_tree, "synced_gpus": True}
    ours = model.generate(**inputs, **options, assistant_model=RunsAhead(text))
    assert next(left, None) is None and ours.speculation.accepted_per_step == [[4]]
    assert_same_states(ours[CACHE], plain[CACHE])


def test_a_criterion_that_ends_within_a_path() -> None:
    model, inputs = hybrid("qwen3_5_text"), padded(1)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    for count in (14, 17, 18, 19):
        stop = StoppingCriteriaList([Custom(lambda ids, scores, call, end=count: ids.shape[1] >= end)])
        options = {"stopping_criteria": stop, "max_new_tokens": 20, "return_dict_in_generate": True}
        plain = model.generate(**inputs, do_sample=False, **options)
        options["tree"] = Oracle.default_tree
        ours = model.generate(**inputs, do_sample=False, assistant_model=Oracle(text.tolist(), 1, 0.0), **options)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        assert_same_states(ours[CACHE], plain[CACHE])


def test_nodes_that_are_not_numbers() -> None:
    """A drafted token whose embedding is NaN spoils its step, not the states."""
    model, inputs = copy.deepcopy(hybrid("qwen3_5_text")), padded(2)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=16).tolist()
    spoilt = next(token for token in range(3, 61) if not any(token in row for row in text))
    with torch.no_grad():
        model.get_input_embeddings().weight[spoilt] = torch.nan
    wrong = [row[:16] + [spoilt] * 12 for row in text]
    options = {"assistant_model": Oracle(wrong + text, 1, 0.0), "tree": Oracle.default_tree}
    found = model.generate(**inputs, do_sample=False, max_new_tokens=16, **options)
    assert found.tolist() == text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_heads(batch_size: int) -> None:
    """A head reads hidden states of a hybrid target."""
    model = hybrid("qwen3_5_text")
    inputs = padded(batch_size)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    head = tiny_head(model)
    found = model.generate(
        **inputs, do_sample=False, max_new_tokens=16, assistant_model=head, tree="[(0,), (1,), (0, 0)]"
    )
    assert found.tolist() == text.tolist()


def test_plain_calls_beside_speculative_ones() -> None:
    """Functions are replaced in the model's file for all threads, and do what they did in calls without trees."""
    model, inputs = hybrid("qwen3_5_text"), padded(1)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()
    plain: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: plain.append(model.generate(**inputs, do_sample=False, max_new_tokens=24).tolist())
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    found = model.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=Oracle(text, 1)).tolist()
    for thread in threads:
        thread.join()
    assert [found, *plain] == [text] * 3


# ------------------------------------------------------------------------------------------------------------ refusals


def test_padding_behind_a_cache_is_refused() -> None:
    model, inputs = hybrid("qwen3_5_text"), padded(2)
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([out.sequences, torch.full((2, 3), 5)], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 7), value=1)
    mask[1, 16] = 0
    out[CACHE]._is_user_defined = True
    options = {"assistant_model": NgramDraft(), "tree": "[(0,)]", "max_new_tokens": 4, CACHE: out[CACHE]}
    with pytest.raises(ValueError, match="`attention_mask`.*padding behind its 15 tokens.*states"):
        model.generate(ids, attention_mask=mask, **options)


def test_caches_of_other_models_are_refused() -> None:
    model, inputs = hybrid("qwen3_5_text"), padded(1)
    options = {"max_new_tokens": 4, "assistant_model": NgramDraft(), "tree": "[(0,)]"}
    other = DynamicCache(config=tiny_model("llama").config)
    with pytest.raises(ValueError, match=f"`{CACHE}` has a DynamicLayer at layer 0.*keeps states"):
        model.generate(**inputs, **options, **{CACHE: other})
    with pytest.raises(ValueError, match=f"`{CACHE}` has 0 layers.*4.*DynamicCache\\(config=model.config\\)"):
        model.generate(**inputs, **options, **{CACHE: DynamicCache()})
    filled = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)[CACHE]
    for layer in filled.layers:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0] = layer.recurrent_states[0].half()
    with pytest.raises(ValueError, match=f"`{CACHE}` has states .*float16.*keeps .*float32"):
        model.generate(**inputs, **options, **{CACHE: filled})


def test_criteria_that_would_take_states_back_are_refused() -> None:
    model = hybrid("lfm2")
    stop = StoppingCriteriaList([Custom(lambda ids, scores, call: ids.shape[1] > 14)])
    options = {"stopping_criteria": stop, "max_new_tokens": 9, "assistant_model": NgramDraft(), "tree": "[(0,)]"}
    with pytest.raises(ValueError, match="`stopping_criteria`: Custom.*cannot be taken back"):
        model.generate(**padded(2), **options, return_dict_in_generate=True)
    text = model.generate(**padded(2), **options)
    assert text.shape[1] == 15


def test_kernels_of_whole_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_5_text")
    monkeypatch.setattr(type(model), "use_kernels", True, raising=False)
    with pytest.raises(ValueError, match="`use_kernels=True`.*Load it without"):
        model.generate(**padded(1), max_new_tokens=4, assistant_model=NgramDraft(), tree="[(0,)]")
