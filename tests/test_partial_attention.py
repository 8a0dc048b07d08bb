"""Layers that attend to a chunk, or to keys that they select: texts equal to plain `generate` in every call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.caches import assert_same_cache
from support.exact import SIGNIFICANCE, enumerate_tokens, fit, sample_tokens
from support.models import PARTIAL, PARTS, attention_of, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import DynamicTree, NgramDraft, TokenTree, graphs, last_metrics
from hf_specdec.compat import CACHE
from hf_specdec.graphs import obstacle_to_graphs


NEW_TOKENS = 22  # with prompts of 13 tokens, rows pass several chunks, and more tokens than are selected
PROMPT = 13
DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=10)
TARGETS = [(family, implementation) for family in PARTIAL for implementation in attention_of(family)]


@lru_cache
def target_of(family: str, implementation: str = "sdpa", **overrides: Any) -> PreTrainedModel:
    model_type, values = PARTIAL[family]
    values = values | overrides
    return tiny_model(model_type, attn_implementation=implementation, attention_sharpness=3.0, **values)


@lru_cache
def draft_of(family: str, implementation: str = "sdpa") -> PreTrainedModel:
    return noisy_copy(target_of(family, implementation))


@lru_cache
def text_of(family: str, implementation: str, batch_size: int) -> torch.Tensor:
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    return plain_text(target_of(family, implementation), inputs, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("batch_size, kind", [(1, "model"), (3, "model"), (1, "ngram"), (3, "self")])
@pytest.mark.parametrize("family, implementation", TARGETS)
@pytest.mark.some_cases(8)
def test_greedy_equality(family: str, implementation: str, batch_size: int, kind: str) -> None:
    target = target_of(family, implementation)
    draft = {"model": draft_of(family, implementation), "ngram": NgramDraft(min_ngram=1), "self": target}[kind]
    metrics = assert_same_text(
        target,
        prompts(batch_size, PROMPT, padding=batch_size > 1),
        draft,
        TokenTree.chain(4) if kind == "self" else IRREGULAR,
        expected=text_of(family, implementation, batch_size),
        max_new_tokens=NEW_TOKENS,
    )
    if kind == "self":  # a draft that went wrong somewhere would show as a refusal
        assert {accepted for row in metrics.accepted_per_step for accepted in row[:-1]} == {4}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", PARTIAL)
@pytest.mark.some_cases(3)
def test_dynamic_trees_after_chunked_prefill(family: str, batch_size: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    assert_same_text(
        target_of(family),
        inputs,
        draft_of(family),
        DYNAMIC,
        expected=text_of(family, "sdpa", batch_size),
        max_new_tokens=NEW_TOKENS,
        prefill_chunk_size=5,
    )


@pytest.mark.parametrize("family", PARTIAL)
def test_parts_matter(family: str) -> None:
    """The texts above depend on the size of the parts: with larger ones they are others."""
    wide = target_of(family, **{PARTS[family]: 128})
    text = wide.generate(**prompts(3, PROMPT, padding=True), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert text.tolist() != text_of(family, "sdpa", 3).tolist()


@pytest.mark.parametrize("family", PARTIAL)
@pytest.mark.some_cases(1)
def test_requests_that_share_steps(family: str) -> None:
    """Prompts in chunks of 16, and requests that wait for blocks of others."""
    target, texts = target_of(family), ragged_prompts((9, 1, 30, 17))
    outputs = target.generate_batch(
        texts,
        assistant_model=draft_of(family),
        tree=IRREGULAR,
        max_new_tokens=NEW_TOKENS,
        continuous_batching_config=limits(27),
    )
    for text, output in zip(texts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, text, max_new_tokens=NEW_TOKENS)
    assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("family", PARTIAL)
@pytest.mark.some_cases(1)
def test_turns(family: str, batch_size: int) -> None:
    """Speculation returns the cache of plain `generate`, goes on with one, and lets it be gone on with."""
    target, found = target_of(family), {}
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    for speculates in ((True, True, False, True), (False,) * 4):
        text, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
        for turn, is_ours in enumerate(speculates):
            options = {"assistant_model": draft_of(family), "tree": IRREGULAR} if is_ours else {}
            out = target.generate(
                text,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=7,
                return_dict_in_generate=True,
                **{CACHE: cache},
                **options,
            )
            assert not is_ours or last_metrics().num_accepted_tokens > 0
            said = prompts(batch_size, 3, seed=turn)["input_ids"]
            text, cache = torch.cat([out.sequences, said], dim=1), out[CACHE]
            mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        found[speculates[0]] = out.sequences, cache
    (ours, our_cache), (plain, plain_cache) = found[True], found[False]
    assert ours.tolist() == plain.tolist()
    assert_same_cache(our_cache, plain_cache, mask[:, : our_cache.get_seq_length()].bool(), rtol=1e-6, atol=1e-6)


def test_sampled_texts_follow_their_distribution() -> None:
    """Texts of 3 tokens of 8, longer than what is selected. A bias of 0.25 is found in 800 of them."""
    target = target_of("deepseek_v32", vocab_size=8, sharpness=6.0, index_topk=3)
    inputs = {"input_ids": torch.tensor([[5, 3, 7, 4, 6]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    law = enumerate_tokens(target, inputs, 3)
    texts = sample_tokens(target, inputs, 800, 3, assistant_model=noisy_copy(target, 0.4), tree=IRREGULAR)
    found = fit(texts[0], law)
    assert found.p_value > SIGNIFICANCE and found.cells > 12, found
    assert last_metrics().num_accepted_tokens > 0


def test_a_cache_without_a_place_for_the_keys_of_indexers() -> None:
    """Plain `generate` fails in its first forward."""
    target, cache = target_of("deepseek_v32"), DynamicCache()
    with pytest.raises(ValueError, match=r"no place for the keys of the indexers.*config=model.config"):
        target.generate(**prompts(1, 5), max_new_tokens=3, assistant_model=NgramDraft(), **{CACHE: cache})
    assert not cache.layers


@pytest.mark.parametrize("family", PARTIAL)
def test_models_that_attend_to_a_part_are_not_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their obstacle has a name: the attention kernel has no mask of theirs."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", lambda *args: None)
    kinds = set(target_of(family).config.layer_types) - {"full_attention"}
    assert obstacle_to_graphs(target_of(family), "auto").startswith(
        f"attends to a part of the keys ({', '.join(kinds)})"
    )
