"""Targets that read a text or sound by an encoder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from support.models import noisy_copy
from support.whisper import tiny_whisper
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    BartForCausalLM,
    MarianConfig,
    MoonshineConfig,
    PreTrainedModel,
    T5Config,
    WhisperForCausalLM,
)

from hf_specdec import NgramDraft, last_metrics


TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
IDS: dict[str, Any] = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
IDS |= {"decoder_start_token_id": 3}
BART: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
CONFIGS = {"bart": lambda: BartConfig(**IDS, **BART), "marian": lambda: MarianConfig(**IDS, **BART)}
CONFIGS["t5"] = lambda: T5Config(**IDS, **T5)


def model_of(family: str) -> PreTrainedModel:
    """A model whose text is varied, in float64."""
    torch.manual_seed(3)
    model = spread(AutoModelForSeq2SeqLM.from_config(CONFIGS[family]()).double().eval())
    model.generation_config.update(forced_eos_token_id=None, forced_bos_token_id=None, num_beams=1)
    return model


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights by which tokens differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def inputs_of(rows: int) -> dict[str, Any]:
    ids = torch.randint(4, 61, (rows, 9), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.some_cases(1)
def test_offloaded_tables_of_positions(family: str) -> None:
    """The weights of a table lie on the meta device before and after its forward."""
    target, inputs = model_of(family), inputs_of(2)
    plain = target.generate(**inputs)
    draft = noisy_copy(target, 0.02)
    for model in (target, draft):
        cpu_offload(model, execution_device=torch.device("cpu"))
    text = target.generate(**inputs, assistant_model=draft, tree=TREE)
    assert text.equal(plain)
    assert last_metrics().num_accepted_tokens > 0
    assert {parameter.device.type for parameter in target.get_decoder().embed_positions.parameters()} == {"meta"}


@pytest.mark.parametrize("family, rows, tree", [("bart", 3, TREE), ("marian", 3, TREE), ("t5", 1, "chain:4")])
@pytest.mark.some_cases(2)
def test_greedy_texts(family: str, rows: int, tree: str) -> None:
    """BART's kind counts slots; nodes get positions where its table is read. T5's bias does not follow a tree."""
    target = model_of(family)
    plain = target.generate(**inputs_of(rows))
    assert len(plain.unique()) > 3
    draft = noisy_copy(target, 0.05)
    for assistant in (draft, NgramDraft(min_ngram=1)):
        assert torch.equal(target.generate(**inputs_of(rows), assistant_model=assistant, tree=tree), plain)
        assert last_metrics().num_accepted_tokens > 0 or assistant is not draft


@pytest.mark.parametrize("family, rows, tree", [("bart", 3, TREE), ("t5", 1, "chain:4")])
def test_recorded_outputs(family: str, rows: int, tree: str) -> None:
    """Attentions, to the encoder too, and hidden states of every token, as plain `generate` records them."""
    target = model_of(family)
    target.set_attn_implementation("eager")
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    expected = target.generate(**inputs_of(rows), **options, output_scores=True)
    draft = noisy_copy(target, 0.05)
    found = target.generate(**inputs_of(rows), **options, output_scores=True, assistant_model=draft, tree=tree)
    assert last_metrics().num_accepted_tokens > 0
    assert {*found} == {*expected}
    for name in {*expected} - {"past_key_values", "cache"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)


def test_relative_biases_follow_no_tree() -> None:
    target = model_of("t5")
    with pytest.raises(ValueError, match="takes no `position_ids`"):
        target.generate(**inputs_of(1), assistant_model=NgramDraft(), tree=TREE)
    with pytest.raises(ValueError, match="takes no `position_ids`.* rows"):
        target.generate(**inputs_of(3), assistant_model=NgramDraft(), tree="chain:4")


def test_padding_before_the_text() -> None:
    """Plain `generate` counts it."""
    target = model_of("bart")
    inputs = inputs_of(2) | {"decoder_input_ids": torch.tensor([[3, 0, 0, 7, 8], [3, 5, 9, 11, 4]])}
    inputs["decoder_attention_mask"] = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    plain = target.generate(**inputs)
    draft = noisy_copy(target, 0.05)
    assert torch.equal(target.generate(**inputs, assistant_model=draft, tree=TREE), plain)
    assert last_metrics().num_accepted_tokens > 0


def test_a_decoder_of_bart_alone() -> None:
    target = spread(BartForCausalLM(BartConfig(**IDS, **BART | {"encoder_layers": 2})).double().eval())
    inputs = inputs_of(3)
    inputs["input_ids"][1, :4], inputs["attention_mask"][1, :4] = 0, 0
    plain, draft = target.generate(**inputs), noisy_copy(target, 0.05)
    assert torch.equal(target.generate(**inputs, assistant_model=draft, tree=TREE), plain)
    prompts = [inputs["input_ids"][0].tolist(), inputs["input_ids"][2, :5].tolist()]
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    found = target.generate_batch(prompts, **options, assistant_model=draft, tree=TREE)
    assert [output.generated_tokens for output in found.values()] == alone


@pytest.mark.slow
def test_calls_of_two_threads() -> None:
    """Each reads the rows of its own positions."""
    target = model_of("bart")
    draft = noisy_copy(target, 0.05)
    inputs = [inputs_of(rows) for rows in (1, 3)]
    plain = [target.generate(**one) for one in inputs]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda one: target.generate(**one, assistant_model=draft, tree=TREE), inputs * 3))
    assert all(torch.equal(text, expected) for text, expected in zip(texts, plain * 3, strict=True))


def test_a_decoder_that_attends_to_the_encoder() -> None:
    """The states of the target's encoder, behind the padding of its input."""
    target = model_of("bart")
    draft = BartForCausalLM(BartConfig(**IDS, **BART)).double().eval()
    state = {name: value for name, value in target.state_dict().items() if "decoder" in name or "lm_head" in name}
    draft.load_state_dict(state, strict=False)
    inputs = inputs_of(1)
    inputs["attention_mask"][0, 5:] = 0
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=draft, tree=TREE), plain)
    assert last_metrics().mean_acceptance_length > 3


def test_positions_and_rows() -> None:
    """Moonshine's decoder takes positions: trees, and several rows."""
    layers = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2}
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    torch.manual_seed(3)
    target = AutoModelForSpeechSeq2Seq.from_config(
        MoonshineConfig(**IDS, **layers, **heads, hidden_size=32, intermediate_size=48)
    )
    target = spread(target.double().eval())
    sound = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {"input_values": sound, "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**options)
    assert len(plain.unique()) > 3
    for assistant in (noisy_copy(target, 0.05), NgramDraft(min_ngram=1)):
        assert torch.equal(target.generate(**options, assistant_model=assistant, tree=TREE), plain)
        assert last_metrics().num_accepted_tokens > 0


def test_a_decoder_of_whisper_alone() -> None:
    """`generate` does not look for the positions that it takes: padding shifts none."""
    target = WhisperForCausalLM(tiny_whisper(vocab_size=61, encoder_layers=2).config).double().eval()
    spread(target)
    target.generation_config.update(eos_token_id=None, suppress_tokens=None, begin_suppress_tokens=None)
    inputs = inputs_of(3)
    inputs["input_ids"][1, :4], inputs["attention_mask"][1, :4] = 0, 0
    plain = target.generate(**inputs)
    for assistant in (noisy_copy(target, 0.05), NgramDraft(min_ngram=1)):
        assert torch.equal(target.generate(**inputs, assistant_model=assistant, tree=TREE), plain)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_drafts_by_name(family: str, tmp_path: Any) -> None:
    """Those of the target's sizes, too, are read with their encoder and all of their weights."""
    target = model_of(family)
    target.save_pretrained(tmp_path)
    plain = target.generate(**inputs_of(1))
    found = target.generate(**inputs_of(1), assistant_model=str(tmp_path), tree="chain:3")
    assert torch.equal(found, plain) and last_metrics().mean_acceptance_length > 3


def test_embeddings_in_place_of_tokens() -> None:
    target = model_of("bart")
    inputs = inputs_of(1)
    inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(ValueError, match="`inputs_embeds` with `assistant_model`.*Pass `input_ids`"):
        target.generate(**inputs, assistant_model=noisy_copy(target, 0.05), tree="chain:3")
