"""Corners in which plain `generate` works: ours does too, or says no before the first forward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from support.models import noisy_copy, prompts, tiny_model
from transformers import (
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_specdec
from hf_specdec import attention


TREE = "[(0,), (1,), (0, 0), (0, 0, 0)]"


def assert_equal_to_plain(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    options = {"max_new_tokens": 24, "do_sample": False} | options
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**inputs, **options)
    output = target.generate(**inputs, **options, assistant_model=draft, tree=TREE)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert torch.equal(plain, output)


def test_a_maximum_length_below_the_prompts_still_gives_one_token() -> None:
    target, inputs = tiny_model(), prompts(2, 12)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=5)])
    plain = target.generate(**inputs, do_sample=False, stopping_criteria=criteria)
    output = target.generate(
        **inputs, do_sample=False, stopping_criteria=criteria, assistant_model=hf_specdec.NgramDraft()
    )
    assert plain.shape == (2, 13)
    assert torch.equal(plain, output)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_prompts_of_32_bit_integers(batch_size: int) -> None:
    target = tiny_model()
    inputs = {name: values.int() for name, values in prompts(batch_size, 12).items()}
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **options)
    output = target.generate(**inputs, **options, assistant_model=noisy_copy(target), tree=TREE)
    assert output.dtype == plain.dtype == torch.int64
    assert torch.equal(plain, output)


@pytest.mark.skipif(not attention.switch.COPIES_ARE_AS_BEFORE, reason="needs torch 2.13")
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_copies_of_a_model_made_during_a_call(family: str) -> None:
    """As another thread makes them, for an average of weights or a checkpoint: they are as if there were no call."""
    target = tiny_model(family, attn_implementation="eager")
    draft, inputs, copies = noisy_copy(target), prompts(1, 16), {}

    def copy_model(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not copies:
            assert target.config._attn_implementation == attention.NAME
            copies.update(deep=copy.deepcopy(target), shallow=copy.copy(target.config), pickled=pickle.dumps(target))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": draft, "tree": TREE}
    text = target.generate(**inputs, **options, stopping_criteria=[copy_model])
    assert b"hf_specdec" not in copies["pickled"], "it can be read without this library"
    for copied in (copies["deep"], pickle.loads(copies["pickled"])):
        assert {module.config._attn_implementation for module in copied.modules() if hasattr(module, "config")} == {
            "eager"
        }
        assert torch.equal(copied(**inputs).logits, target(**inputs).logits)
        assert torch.equal(copied.generate(**inputs, **options), text)
    shallow = type(target)(copies["shallow"]).eval()
    shallow.load_state_dict(target.state_dict())
    assert torch.equal(shallow(**inputs).logits, target(**inputs).logits)


class TestLengthDependentRotaryEmbeddings:
    @staticmethod
    def model(rope_type: str) -> PreTrainedModel:
        rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 8.0}
        rope["original_max_position_embeddings"] = 32
        if rope_type == "longrope":
            rope |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
        return tiny_model(rope_parameters=rope, max_position_embeddings=256)

    def test_below_the_boundary_and_past_it_longrope_is_exact(self) -> None:
        assert_equal_to_plain(self.model("longrope"), prompts(1, 6))
        assert_equal_to_plain(self.model("longrope"), prompts(3, 40, padding=True))

    @pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
    def test_texts_that_pass_the_boundary_are_refused(self, rope_type: str) -> None:
        target = self.model(rope_type)
        if rope_type == "dynamic":
            target.config.rope_parameters.pop("original_max_position_embeddings", None)
            target.config.max_position_embeddings = 32
        with pytest.raises(ValueError, match=f"max_length.*{rope_type}.*32.*max_new_tokens"):
            target.generate(**prompts(1, 12), max_new_tokens=40, do_sample=False, assistant_model=target, tree=TREE)


class OwnAttention(LlamaAttention):
    """A user's attention layer, in a file without an eager function."""


def test_eager_attention_of_a_layer_subclassed_in_another_file() -> None:
    target = tiny_model(attn_implementation="eager")
    for layer in target.model.layers:
        layer.self_attn.__class__ = OwnAttention
    assert_equal_to_plain(target, prompts(2, 9))


def test_what_falls_through_sees_the_implementation_the_model_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention asks the layer's config which kernel to run."""
    target = tiny_model(attn_implementation="sdpa")
    seen: list[str] = []
    original = attention.functions.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noting(module: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(module.config._attn_implementation)
        return original(module, *arguments, **options)

    monkeypatch.setitem(attention.functions.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", noting)
    target.generate(**prompts(1, 6), max_new_tokens=1, do_sample=False, assistant_model=target, tree=TREE)
    assert set(seen) == {"sdpa"}


def test_an_implementation_set_during_the_call_stays() -> None:
    target = tiny_model(attn_implementation="sdpa", dtype=torch.float32)

    class Sets(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            target.set_attn_implementation("eager")
            return scores

    target.generate(
        **prompts(1, 6),
        max_new_tokens=8,
        logits_processor=[Sets()],
        assistant_model=hf_specdec.NgramDraft(3, 1),
    )
    assert target.config._attn_implementation == "eager"


def test_an_offloaded_target_and_draft() -> None:
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    inputs = prompts(2, 9, padding=True)
    plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    cpu_offload(target, execution_device=torch.device("cpu"))
    cpu_offload(draft, execution_device=torch.device("cpu"))
    output = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=draft, tree=TREE)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert torch.equal(plain, output)


class Counts(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


class StopsWithTheProcessor(StoppingCriteria):
    """Looks at what a processor has counted, as grammars do."""

    def __init__(self, processor: Counts):
        self.processor = processor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.processor.calls >= 10)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_criterion_that_reads_a_processors_state(batch_size: int) -> None:
    """
    With one sequence the processor is called as in plain `generate`. In a batch, where rows run ahead of each other,
    the user's own object follows the first row.
    """
    target, inputs = tiny_model(), prompts(batch_size, 9)

    def generate(**options: Any) -> tuple[torch.Tensor, int]:
        processor = Counts()
        output = target.generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            logits_processor=[processor],
            stopping_criteria=[StopsWithTheProcessor(processor)],
            **options,
        )
        return output, processor.calls

    plain, plain_calls = generate()
    output, calls = generate(assistant_model=noisy_copy(target, 0.05), tree=TREE)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert plain_calls == 10
    if batch_size == 1:
        assert torch.equal(plain, output)
        assert calls == plain_calls
    else:
        assert 9 < calls < 30


def test_float64_logits_that_are_equal_in_float32() -> None:
    """Plain `generate` takes the argmax in float32, where they are a tie, which the first wins."""
    target = tiny_model(tie_word_embeddings=False)
    text = target.generate(**prompts(1, 9), max_new_tokens=30, do_sample=False)[0, 9:]
    often = int(text.mode().values)
    first, second = (often - 1, often) if often > 0 else (0, 1)
    with torch.no_grad():
        target.lm_head.weight[first] = target.lm_head.weight[often]
        target.lm_head.weight[second] = target.lm_head.weight[first] * (1 + 1e-12)
    assert_equal_to_plain(target, prompts(1, 9))
