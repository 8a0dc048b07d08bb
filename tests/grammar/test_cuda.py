"""Texts with a grammar on a GPU: real CUDA graphs, in `generate` and in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.batches import limits, ragged_prompts
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from support.tokenizer import tiny_tokenizer

from hf_specdec import last_metrics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LINES = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( (aa|bb|zz)[a-f]{0,3}end){2,4}\.")
WORDS = LLMatcher.grammar_from_regex(r"start[a-m]{2,9}( [a-z]{2,9}){2,4}\.")
"""Where no token is bound to come twice after the same two."""
CALL: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"repetition_penalty": 1.2, "min_new_tokens": 12},
        {"no_repeat_ngram_size": 3, "sequence_bias": [[[9], 1.0], [[9, 12], -3.0]]},
        {"encoder_repetition_penalty": 1.3},
    ],
)
def test_texts(options: dict[str, Any]) -> None:
    """By whole steps, but where the host looks at the prompt: greedy texts are those of plain `generate`."""
    model, tokenizer = tiny_model(dtype=torch.float32).cuda(), tiny_tokenizer()
    grammar = {"grammar": WORDS if "no_repeat_ngram_size" in options else LINES, "tokenizer": tokenizer}
    speculative = {"tree": IRREGULAR, "assistant_model": noisy_copy(model, 0.05).cuda()}
    inputs = {name: value.cuda() for name, value in prompts(3, 9).items()}
    text = model.generate(**inputs, **CALL | options, **grammar, **speculative)
    assert ("steps" in last_metrics().seconds) == ("encoder_repetition_penalty" not in options)
    assert all(line.startswith("start") for line in tokenizer.batch_decode(text[:, 9:]))
    outputs = model.generate_batch(
        ragged_prompts((5, 9)), continuous_batching_config=limits(), **CALL | options, **grammar, **speculative
    )
    if not options.get("do_sample"):
        assert torch.equal(text, model.generate(**inputs, **CALL | options, **grammar))
        for output in outputs.values():
            alone = model.generate(torch.tensor([output.prompt_ids]).cuda(), **CALL | options, **grammar)
            assert output.prompt_ids + output.generated_tokens == alone[0].tolist()
