"""Real weights: SmolLM2-135M-Instruct on the CPU, in float32, greedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.smollm2 import smollm2_folder


REPETITIVE = """Repeat this shopping list word for word, twice:

- two bottles of milk
- a loaf of rye bread
- twelve brown eggs
- three green apples
- a bag of basmati rice"""
QUESTION = "Tell a story about a lighthouse keeper and a storm, in at least ten sentences."


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder(), padding_side="left")


def chat(tokenizer: PreTrainedTokenizerBase, *contents: str) -> Any:
    turns = [[{"role": "user", "content": content}] for content in contents]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


@pytest.mark.slow
def test_a_model_drafting_for_itself_accepts_every_token(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """
    A chain of 4 from the target itself. One forward over five tokens rounds otherwise than five over one, so that a
    near-tie may cost an acceptance now and then: one step of all may fall short. The last step is cut by the length.
    """
    inputs = chat(tokenizer, QUESTION)
    plain = target.generate(**inputs, max_new_tokens=26, do_sample=False)
    output = target.generate(
        **inputs, max_new_tokens=26, do_sample=False, assistant_model=target, tree=hf_specdec.TokenTree.chain(4)
    )
    assert torch.equal(plain, output)
    steps = hf_specdec.last_metrics().accepted_per_step[0][:-1]
    assert len(steps) >= 4
    assert sum(accepted < 4 for accepted in steps) <= 1


@pytest.mark.slow
def test_ngram_trees_on_a_repetitive_prompt(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = chat(tokenizer, REPETITIVE)
    plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
    output = target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=hf_specdec.NgramDraft())
    assert torch.equal(plain, output)
    assert hf_specdec.last_metrics().mean_acceptance_length > 1.5


@pytest.mark.slow
def test_a_padded_batch_with_a_branching_tree(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = chat(tokenizer, QUESTION, REPETITIVE)
    assert (inputs["attention_mask"] == 0).any()
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    output = target.generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=hf_specdec.NgramDraft(3, 1),
        tree="[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]",
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert torch.equal(plain, output)


@pytest.mark.slow
def test_stop_strings_and_sampling_with_a_seed(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = chat(tokenizer, REPETITIVE)
    options: dict[str, Any] = {"max_new_tokens": 40, "stop_strings": ["bread"], "tokenizer": tokenizer}
    plain = target.generate(**inputs, **options, do_sample=False)
    output = target.generate(**inputs, **options, do_sample=False, assistant_model=hf_specdec.NgramDraft())
    assert torch.equal(plain, output)
    assert "bread" in tokenizer.decode(output[0, -4:])

    def sampled() -> torch.Tensor:
        torch.manual_seed(3)
        return target.generate(
            **inputs, max_new_tokens=8, do_sample=True, assistant_model=target, tree="[(0,), (1,), (0, 0)]"
        )

    assert torch.equal(sampled(), sampled())
