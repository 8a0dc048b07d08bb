"""
The tiny target, drafts, prompts and settings whose sampled texts are held against their enumerated distribution, and
with which wrong samplers have to fail.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    SuppressTokensAtBeginLogitsProcessor,
)

import hf_specdec
from hf_specdec import BlockHead, DynamicTree, EagleHead, SpeculativeConfig, TokenTree
from hf_specdec.drafters.growth import drawing
from hf_specdec.trees import DraftTree
from hf_specdec.verification import Verifier, Walk
from hf_specdec.verification.penalties import OccurrencePenalty

from .exact import Fit, FrequencyPenalty, enumerate_tokens, fit, sample_tokens
from .heads import BLOCK_KINDS, tiny_block_head, tiny_head
from .models import noisy_copy, tiny_model


VOCAB = 8
LENGTH = 4
ROWS = 1_400
"""Any bias with a total variation of 0.2 over the strings of four tokens is found, most of them much earlier."""

BY_ROW = ("repetition", "custom", "no repeated pair", "strong repetition", "all at once")
"""
Settings whose processors are called row by row, which takes most of the time: 800 rows, with which a bias of 0.26 is
found. What they give p is also compared without sampling (`error_of_p`).
"""

TREE = TokenTree.parse("[(0,), (1,), (2,), (0,0), (0,1), (1,0), (0,0,0)]")
LIMITS = DynamicTree(depth=3, top_k=3, num_nodes=7)

METHODS: dict[str, SpeculativeConfig] = {
    "target, best tokens": SpeculativeConfig(tree=TREE, draft_sampling="greedy"),
    "target, re-ranked": SpeculativeConfig(tree=LIMITS, draft_sampling="greedy"),
    "target, drawn": SpeculativeConfig(tree=TREE, draft_sampling="sample", verification="target"),
    "rejection, chain": SpeculativeConfig(tree=TokenTree.chain(2)),
    "rejection, irregular": SpeculativeConfig(tree=TREE),
    "rejection, budgets": SpeculativeConfig(tree=LIMITS, draft_sampling="sample"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "custom": {"logits_processor": LogitsProcessorList([FrequencyPenalty(1.5)])},
}
MORE_SETTINGS: dict[str, dict[str, Any]] = {
    "min-p": {"min_p": 0.1},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "low temperature": {"temperature": 0.02},
    "strong repetition": {"repetition_penalty": 3.0},
    "all at once": {
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "logits_processor": LogitsProcessorList([FrequencyPenalty(0.5)]),
    },
}
PROCESSED_SETTINGS: dict[str, dict[str, Any]] = {
    "all filters": {
        "temperature": 1.5,
        "top_h": 0.97,
        "top_k": 7,
        "top_p": 0.97,
        "min_p": 0.02,
        "typical_p": 0.95,
        "epsilon_cutoff": 0.03,
        "eta_cutoff": 0.05,
    },
    "hidden tokens": {
        "temperature": 1.5,
        "suppress_tokens": [6],
        "logits_processor": LogitsProcessorList(
            [
                MinLengthLogitsProcessor(6, [3, 2]),
                MinNewTokensLengthLogitsProcessor(4, 3, [1]),
                SuppressTokensAtBeginLogitsProcessor([7], 4),
            ]
        ),
    },
    "penalties": {
        "repetition_penalty": 1.5,
        "logits_processor": LogitsProcessorList([OccurrencePenalty(3, 2.0, 1.5)]),
    },
    "biases": {
        "sequence_bias": {(4,): 1.5, (3,): -1.0, (7, 2): 2.0, (2, 4): -3.0},
        "bad_words_ids": [[6], [1, 2], [7, 5, 3]],
        "no_repeat_ngram_size": 2,
    },
}
"""Settings whose processors captured steps have, too: by scores, by ids and positions, by the tokens of the text."""
ALL_SETTINGS = SETTINGS | MORE_SETTINGS | PROCESSED_SETTINGS

PROMPT = {"input_ids": torch.tensor([[5, 5, 3, 7]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
PADDED = {
    "input_ids": torch.tensor([[0, 0, 0, 6], [0, 5, 3, 7], [4, 6, 4, 5]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]),
}


def small_model(seed: int, **overrides: Any) -> PreTrainedModel:
    """A Llama of 8 tokens whose next token depends on all before it; a position has about four likely tokens."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model("llama", seed=seed, sharpness=20.0, **(sizes | heads | overrides))


@cache
def the_target() -> PreTrainedModel:
    return small_model(seed=0)


@cache
def a_draft(name: str) -> PreTrainedModel:
    """`"noisy"`: the target with noise in its weights; `"other"`: another model; `"itself"`: the target."""
    if name == "itself":
        return the_target()
    return noisy_copy(the_target(), noise=0.4) if name == "noisy" else small_model(seed=50)


@cache
def a_head(draft_vocab_size: int | None) -> EagleHead:
    """A random EAGLE-3 head for the target, over all tokens or some."""
    layers = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_head(the_target(), draft_vocab_size=draft_vocab_size, aux_layer_ids=[0, 1], layers=layers)


@cache
def a_block_head(kind: str) -> BlockHead:
    """A random block head of one of `BLOCK_KINDS` for the target."""
    return tiny_block_head(the_target(), **BLOCK_KINDS[kind])


@cache
def expected_tokens(setting: str, prompt: int | None = None) -> torch.Tensor:
    """The enumerated distribution after `PROMPT`, or after a row of `PADDED`, `[VOCAB] * LENGTH`."""
    inputs = PROMPT if prompt is None else {name: values[prompt : prompt + 1] for name, values in PADDED.items()}
    return enumerate_tokens(the_target(), inputs, LENGTH, **ALL_SETTINGS[setting])


def rows_of(setting: str) -> int:
    """How many texts are sampled with a setting."""
    return 800 if setting in BY_ROW else ROWS


def fit_samples(config: SpeculativeConfig | None, assistant: Any, setting: str, rows: int | None = None) -> Fit:
    """How well speculative samples after `PROMPT` fit the enumeration."""
    tokens = sample_tokens(
        the_target(),
        PROMPT,
        rows or rows_of(setting),
        LENGTH,
        assistant_model=assistant,
        speculative_config=config,
        **ALL_SETTINGS[setting],
    )
    return fit(tokens[0], expected_tokens(setting))


def error_of_p(config: SpeculativeConfig, assistant: Any, setting: str, padded: bool) -> float:
    """
    The largest difference between a probability from which a speculative call drew a token (as it returns them with
    `output_scores`) and the enumerated one after that token's own history. Over a batch with left padding, or over
    batches of one, which call processors in a way of their own.
    """
    batches = [(PROMPT, [None])] * 2
    if padded:
        prompts = [0, 1, 2] * 3
        batches = [({name: values[prompts] for name, values in PADDED.items()}, prompts)]
    torch.manual_seed(0)
    error = 0.0
    for inputs, prompts in batches:
        outputs = the_target().generate(
            **inputs,
            **({"top_k": 0} | ALL_SETTINGS[setting]),
            assistant_model=assistant,
            speculative_config=config,
            do_sample=True,
            max_new_tokens=LENGTH + 2,
            output_scores=True,
            return_dict_in_generate=True,
        )
        start = inputs["input_ids"].shape[1]
        for row, text in enumerate(outputs.sequences[:, start:].tolist()):
            for column in range(LENGTH):
                given = expected_tokens(setting, prompts[row])[tuple(text[:column])].reshape(VOCAB, -1).sum(dim=1)
                drawn_from = outputs.scores[column][row].double().softmax(dim=-1)
                error = max(error, float((drawn_from - given / given.sum()).abs().max()))
    return error


def sampled_tokens(
    target: PreTrainedModel, draft: Any, config: SpeculativeConfig, rows: int = ROWS, **options: Any
) -> torch.Tensor:
    """The first `LENGTH` new tokens of `rows` texts that one call of `generate` draws, `[rows, LENGTH]`."""
    ids = PROMPT["input_ids"].to(target.device).expand(rows, -1)
    torch.manual_seed(0)
    text = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **({"top_k": 0} | options),
        do_sample=True,
        max_new_tokens=LENGTH + 2,
        eos_token_id=None,
        assistant_model=draft,
        speculative_config=config,
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    return text[:, ids.shape[1] :][:, :LENGTH]


def draw_from_flatter_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: children are drawn from other scores than those that are returned."""
    right = drawing.draw_without_replacement

    def flatter(scores: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return right(0.2 * scores, *rest)

    monkeypatch.setattr(drawing, "draw_without_replacement", flatter)


def accept_first_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets verifiers of the host wrongly accept the first child where they should refuse all."""
    right = Verifier.walk

    def wrong(verifier: Verifier, draft: DraftTree, *args: Any) -> Walk:
        walk = right(verifier, draft, *args)
        for row, path in enumerate(walk.paths):
            if path == [] and draft.num_nodes > 0 and draft.tokens_list[row][0] >= 0:
                walk.paths[row] = [1]
                walk.tokens[row].insert(0, draft.tokens_list[row][0])
        return walk

    monkeypatch.setattr(Verifier, "walk", wrong)
