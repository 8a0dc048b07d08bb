"""Greedy equality for random combinations of models, prompts, options of `generate`, drafts and trees."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import VOCAB, noisy_copy, prompts, tiny_model
from support.trees import paths_of_trees
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree


FAMILIES = ("llama", "mistral", "gemma3_text", "gpt2", "falcon", "qwen2_moe")
LONGEST = 24


@lru_cache
def target_of(family: str, seed: int) -> PreTrainedModel:
    return tiny_model(family, seed, attention_sharpness=3.0)


@lru_cache
def draft_of(family: str, seed: int, kind: str) -> Any:
    target = target_of(family, seed)
    drafts = {"self": lambda: target, "ngram": lambda: NgramDraft(min_ngram=1)}
    return drafts.get(kind, lambda: noisy_copy(target, float(kind)))()


class StopAtSum(StoppingCriteria):
    """Stops a row now and then, whatever its tokens are."""

    def __init__(self, divisor: int):
        self.divisor = divisor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -3:].sum(dim=1) % self.divisor == 0


tokens, end_tokens = st.integers(3, 10), st.integers(11, VOCAB - 1)  # an end token must not be suppressed
OPTIONS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, LONGEST)},
    optional={
        "eos_token_id": st.lists(end_tokens, min_size=1, max_size=5, unique=True),
        "min_new_tokens": st.integers(1, 12),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=2),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=4),
        "forced_eos_token_id": end_tokens,
        "stopping_criteria": st.sampled_from([5, 11]).map(lambda divisor: [StopAtSum(divisor)]),
        "prefill_chunk_size": st.integers(1, 8),
    },
)


@st.composite
def dynamic_trees(draw: st.DrawFn) -> DynamicTree:
    depth, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return DynamicTree(depth=depth, top_k=top_k, num_nodes=draw(st.integers(1, top_k + (depth - 1) * top_k**2)))


CONFIGS = st.builds(
    SpeculativeConfig,
    tree=st.one_of(paths_of_trees().map(TokenTree), dynamic_trees(), st.integers(1, 8).map(TokenTree.chain)),
    disable_by_batch_size=st.none() | st.integers(0, 3),
)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2),
    kind=st.sampled_from(["0.05", "0.3", "self", "ngram"]),
    batch_size=st.integers(1, 4),
    prompt=st.sampled_from([1, 2, 7, 13, 30]),
    padding=st.booleans(),
    turns=st.integers(1, 3),
    options=OPTIONS,
    config=CONFIGS,
)
def test_random_calls(
    family: str,
    seed: int,
    kind: str,
    batch_size: int,
    prompt: int,
    padding: bool,
    turns: int,
    options: dict[str, Any],
    config: SpeculativeConfig,
) -> None:
    """The same text, turn by turn on one cache, and the same scores."""
    target = target_of(family, seed)
    if "eos_token_id" in options:
        options = options | {"exponential_decay_length_penalty": (3, 1.2)}
    if turns > 1:
        # Behind a filled cache old versions of transformers forward chunks wrongly (test_cache.py has that right).
        options = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    inputs = prompts(batch_size, prompt, seed=prompt, padding=padding)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for turn in range(turns):
        plain, ours = (
            target.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
                **speculation,
            )
            for cache, speculation in zip(
                caches,
                ({}, {"assistant_model": draft_of(family, seed, kind), "speculative_config": config}),
                strict=True,
            )
        )
        assert ours.sequences.tolist() == plain.sequences.tolist()
        assert len(ours.scores) == len(plain.scores)
        for mine, theirs in zip(ours.scores, plain.scores, strict=True):
            for row in range(batch_size):
                # A row that has finished has zeros. Penalties on forbidden tokens make NaN, as in plain `generate`.
                is_close = torch.allclose(mine[row], theirs[row], rtol=1e-5, atol=1e-5, equal_nan=True)
                assert is_close or not mine[row].any()
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == ours.sequences.shape[1] - 1
        assert hf_specdec.last_metrics() is ours.speculation
        said = prompts(batch_size, 3, seed=turn)["input_ids"]
        ids = torch.cat([ours.sequences, said], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
