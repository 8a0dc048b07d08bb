"""Ways to give the prompt: embeddings, chunks, masks with holes, positions, none at all."""

from __future__ import annotations

import pytest
import torch
from support.models import prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, TokenTree


PROMPT = 9
NEW_TOKENS = 18
Inputs = dict[str, torch.Tensor]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside input_ids"])
@pytest.mark.some_cases(2)
def test_inputs_embeds(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, beside: bool) -> None:
    """Embeddings that belong to no tokens; beside `input_ids` the draft has a prompt of its own."""
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    embeds = target.get_input_embeddings()(inputs["input_ids"].flip(1)).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    if beside:
        given["input_ids"] = inputs["input_ids"]
    plain = target.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert plain.shape[1] == NEW_TOKENS + (PROMPT if beside else 0)
    assert_same_text(target, given, draft, expected=plain, max_new_tokens=NEW_TOKENS)
    from_tokens = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert plain[:, -NEW_TOKENS:].tolist() != from_tokens[:, -NEW_TOKENS:].tolist()


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.some_cases(3)
def test_prefill_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, chunk: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=True)
    widths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        metrics = assert_same_text(
            target,
            inputs,
            draft,
            expected=plain_text(target, inputs, max_new_tokens=NEW_TOKENS),
            max_new_tokens=NEW_TOKENS,
            prefill_chunk_size=chunk,
        )
    finally:
        hook.remove()
    chunks = [min(chunk, PROMPT - start) for start in range(0, PROMPT, chunk)]
    prefill = widths[1 + NEW_TOKENS - 1 :][: len(chunks)]  # behind the plain call's prefill and steps
    assert prefill == chunks
    assert metrics.num_drafts > 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_token_types(batch_size: int) -> None:
    """GPT-2 adds an embedding for the type of a token; new ones are of the last one's type."""
    model = tiny_model("gpt2", seed=4, attention_sharpness=3.0)
    inputs = prompts(batch_size, PROMPT, padding=True)
    types = torch.randint(0, 61, (batch_size, PROMPT))
    untyped = plain_text(model, inputs, max_new_tokens=NEW_TOKENS)
    expected = plain_text(model, inputs | {"token_type_ids": types}, max_new_tokens=NEW_TOKENS)
    assert expected.tolist() != untyped.tolist()
    tree = TokenTree.from_branching((12, 3))  # wide, for a draft that gets no types
    assert_same_text(
        model, inputs | {"token_type_ids": types}, model, tree, expected=expected, max_new_tokens=NEW_TOKENS
    )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_prompts_of_one_token(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> None:
    for assistant in (draft, NgramDraft(min_ngram=1)):
        assert_same_text(target, prompts(batch_size, 1), assistant, max_new_tokens=30)


def test_masks_with_holes(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Padding on the right, and in the middle."""
    inputs = prompts(2, PROMPT)
    inputs["attention_mask"][0, 7:] = 0
    inputs["attention_mask"][1, 3:5] = 0
    unmasked = plain_text(target, {"input_ids": inputs["input_ids"]}, max_new_tokens=NEW_TOKENS)
    for kind in (torch.long, torch.bool, torch.float32):
        given = inputs | {"attention_mask": inputs["attention_mask"].to(kind)}
        expected = plain_text(target, given, max_new_tokens=NEW_TOKENS)
        assert expected.tolist() != unmasked.tolist()
        assert_same_text(target, given, draft, expected=expected, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize(
    "positions", [torch.arange(PROMPT)[None] + 30, torch.stack([torch.arange(PROMPT), 2 * torch.arange(PROMPT)])]
)
def test_given_positions(target: PreTrainedModel, draft: PreTrainedModel, positions: torch.Tensor) -> None:
    """Positions that do not count the tokens: those of the tree go on from the last."""
    assert_same_text(target, prompts(2, PROMPT) | {"position_ids": positions}, draft, max_new_tokens=NEW_TOKENS)


def test_calls_in_inference_mode(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """What a first call leaves behind for later ones does not hinder them outside."""
    for tree in ("[(0,), (2,), (2, 1), (2, 1, 0)]", DynamicTree(depth=3, top_k=2, num_nodes=5)):
        with torch.inference_mode():
            assert_same_text(target, prompts(2, PROMPT), draft, tree, max_new_tokens=NEW_TOKENS)
        assert_same_text(target, prompts(2, PROMPT), draft, tree, max_new_tokens=NEW_TOKENS)


def test_no_prompt_at_all(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """`generate()` starts from the token that begins a text."""
    plain = target.generate(max_new_tokens=NEW_TOKENS, do_sample=False, bos_token_id=1)
    out = target.generate(
        max_new_tokens=NEW_TOKENS, do_sample=False, bos_token_id=1, assistant_model=draft, tree=IRREGULAR
    )
    assert out.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
