"""`generate_batch`: every request gets the text that `generate` gives it alone."""

from __future__ import annotations

import copy
import threading
from functools import cache
from typing import Any

import pytest
import torch
from support import vision
from support.batches import LENGTHS, accepted, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.heads import tiny_head, trained_head
from support.models import FAMILIES, noisy_copy, tiny_model
from support.parity import IRREGULAR, expected_acceptance
from support.tokenizer import tiny_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.batching import methods


DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)


def check_texts(
    model: PreTrainedModel, draft: Any, prompts: list[list[int]], texts: Any = None, **options: Any
) -> list[GenerationOutput]:
    """Asserts that all texts are those of `generate` (`texts`, if known), and that drafts had a part in them."""
    new_tokens = options.pop("max_new_tokens", 24)
    texts = texts or [text_alone(model, prompt, max_new_tokens=new_tokens) for prompt in prompts]
    outputs = model.generate_batch(prompts, assistant_model=draft, max_new_tokens=new_tokens, **options)
    for prompt, text, output in zip(prompts, texts, outputs.values(), strict=True):
        assert output.error is None and output.status == RequestStatus.FINISHED
        assert output.prompt_ids == prompt
        assert output.generated_tokens == text
    assert sum(map(accepted, outputs.values())) > 0, "nothing was accepted: the test would not see a fault"
    return list(outputs.values())


@cache
def of_family(family: str, count: int = 4, new_tokens: int = 16) -> tuple[PreTrainedModel, list[list[int]]]:
    """A model, which no test changes, and what it writes after the first prompts; past windows of 12 tokens."""
    model = tiny_model(family)
    return model, [text_alone(model, prompt, max_new_tokens=new_tokens) for prompt in ragged_prompts()[:count]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(3)
def test_families_with_a_draft_model(family: str) -> None:
    model, texts = of_family(family)
    call = {"max_new_tokens": len(texts[0]), "tree": IRREGULAR, "continuous_batching_config": limits()}
    check_texts(model, noisy_copy(model), ragged_prompts()[: len(texts)], texts, **call)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(3)
def test_families_with_a_head(family: str) -> None:
    model, texts = of_family(family)
    head = tiny_head(model, aux_layer_ids=[0, 1, model.config.get_text_config().num_hidden_layers])
    wide = TokenTree.from_branching((20, 2))  # a random head is seldom right
    call = {"max_new_tokens": len(texts[0]), "tree": wide, "continuous_batching_config": limits()}
    check_texts(model, head, ragged_prompts()[: len(texts)], texts, **call)


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel) -> list[list[int]]:
    return [text_alone(target, prompt, max_new_tokens=30) for prompt in ragged_prompts()[:6]]


@pytest.mark.smoke
@pytest.mark.parametrize("tree", [None, "[(0,), (1,), (0, 0)]", DYNAMIC, "auto", [(0, "[(0,)]"), (20, DYNAMIC)]])
@pytest.mark.parametrize("kind", ["draft", "ngram"])
@pytest.mark.some_cases(2)
def test_trees(target: PreTrainedModel, draft: PreTrainedModel, texts: list[list[int]], kind: str, tree: Any) -> None:
    assistant = draft if kind == "draft" else NgramDraft()
    config = SpeculativeConfig() if tree is None else None
    call = {"tree": tree, "speculative_config": config, "continuous_batching_config": limits()}
    check_texts(target, assistant, ragged_prompts()[: len(texts)], texts, max_new_tokens=30, **call)


@pytest.mark.parametrize("name", ["safeailab_eagle1", "safeailab_eagle3", "specforge_eagle3"])
@pytest.mark.parametrize("tree", [None, "[(0,), (1,), (0, 0), (0, 0, 0)]"])
@pytest.mark.some_cases(1)
def test_trained_heads(name: str, tree: str | None) -> None:
    prompts = trained_prompts()["prompts"][:8]
    call = {"tree": tree, "continuous_batching_config": limits()}
    outputs = check_texts(trained_target(), trained_head(name), prompts, max_new_tokens=30, **call)
    drafts = sum(output.speculation.num_drafts for output in outputs)
    assert 1 + sum(map(accepted, outputs)) / drafts > 1.5


@pytest.mark.parametrize("num_blocks", [17, 24, 40])
@pytest.mark.parametrize("kind", ["draft", "ngram", "head"])
@pytest.mark.some_cases(2)
def test_few_blocks(kind: str, num_blocks: int) -> None:
    """Requests wait, and lose their K/V to older ones; texts and acceptance do not change."""
    model, expected = of_family("llama", count=len(ragged_prompts()), new_tokens=24)
    assistant = {"draft": noisy_copy(model), "ngram": NgramDraft(), "head": tiny_head(model)}[kind]
    tree = TokenTree.from_branching((30, 2)) if kind == "head" else IRREGULAR
    config = limits(num_blocks)
    with model.continuous_batching_context_manager(
        assistant_model=assistant, tree=tree, continuous_batching_config=config
    ) as manager:
        names = manager.add_requests(ragged_prompts(), max_new_tokens=24, do_sample=False)
        texts = {name: manager.get_result(name).generated_tokens for name in names}
    assert manager.state.num_preemptions > 0 or num_blocks == 40
    assert list(texts.values()) == expected
    assert manager.state.num_free_blocks == num_blocks


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.some_cases(1)
def test_memory_as_it_comes_is_never_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has written may be anything, NaN too, which no mask can hide."""
    model = tiny_model()
    new_empty = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory = new_empty(self, *args, **kwargs)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    draft = noisy_copy(model) if kind == "draft" else tiny_head(model)
    tree = TokenTree.from_branching((30, 2)) if kind == "head" else IRREGULAR
    check_texts(model, draft, ragged_prompts(), tree=tree, continuous_batching_config=limits(40))


def test_acceptance_is_that_of_the_definition(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """However requests come and go, each step accepts what the draft's plain forward says it must."""
    tree = TokenTree.parse(IRREGULAR)
    prompts = ragged_prompts()
    outputs = target.generate_batch(
        prompts, assistant_model=draft, tree=tree, max_new_tokens=30, continuous_batching_config=limits()
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        text = torch.tensor(prompt + output.generated_tokens)
        expected = expected_acceptance(draft, text, len(prompt), tree)
        assert output.speculation.accepted_per_step == [expected]
        assert output.speculation.num_accepted_tokens == sum(expected)


@pytest.mark.slow
def test_a_heads_acceptance_is_that_of_generate() -> None:
    model, head = trained_target(), trained_head()
    prompts = [prompt for prompt in trained_prompts()["prompts"] if len(prompt) > 1][:5]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        call = {"assistant_model": head, "tree": IRREGULAR, "do_sample": False, "max_new_tokens": 30}
        model.generate(ids, attention_mask=torch.ones_like(ids), **call)
        expected.append(hf_specdec.last_metrics().accepted_per_step)
    outputs = model.generate_batch(
        prompts, assistant_model=head, tree=IRREGULAR, max_new_tokens=30, continuous_batching_config=limits()
    )
    assert [output.speculation.accepted_per_step for output in outputs.values()] == expected
    assert sum(map(accepted, outputs.values())) > len(prompts) * 8


def test_without_our_arguments_it_is_transformers_own(target: PreTrainedModel, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setitem(methods.METHODS, "generate_batch", lambda *args, **kwargs: seen.append("ours"))
    with pytest.raises(TypeError, match="unknown_to_all|unexpected"):
        # The original's own complaint: it makes a manager, whose attention it asks for.
        target.init_continuous_batching(unknown_to_all=1)
    assert target.generate_batch([]) == {} and seen == []


def test_options_of_a_generation_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=11, do_sample=False, repetition_penalty=1.4, tree="[(0,), (1,)]")
    prompts = ragged_prompts(LENGTHS[:4])
    outputs = target.generate_batch(prompts, config, assistant_model=draft)
    plain = GenerationConfig(max_new_tokens=11, do_sample=False, repetition_penalty=1.4)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, generation_config=plain)
    assert config.tree == "[(0,), (1,)]"
    assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]


def test_a_tree_of_the_models_own_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """As in `generate`: it is taken where the call names none, and refused without a draft."""
    model = copy.deepcopy(target)
    model.generation_config.tree = "[(0,), (1,)]"
    prompts = ragged_prompts()[:2]
    call = {"max_new_tokens": 8, "continuous_batching_config": limits()}
    outputs = model.generate_batch(prompts, assistant_model=draft, **call)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=8)
        assert 0 < output.speculation.num_draft_tokens <= 2 * output.speculation.num_drafts
    with pytest.raises(ValueError, match="`tree`='.*' without a draft"):
        model.generate_batch(prompts, **call)
    assert model.generation_config.tree == "[(0,), (1,)]"


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown option": ({"max_new_token": 3}, ("`max_new_token=3`", "not known")),
    "beams": ({"num_beams": 2}, ("beam", "num_beams")),
    "several sequences": ({"num_return_sequences": 2, "do_sample": True}, ("`num_return_sequences=2`", "seed")),
    "scores": ({"output_scores": True}, ("`output_scores=True`", "`generate`")),
    "a prompt of nothing": ({"inputs": [[4], []]}, ("`input_ids`", "[]")),
    "a token of another model": ({"inputs": [[4, 61]]}, ("`input_ids`", "61")),
    "a negative token": ({"inputs": [[-1, 6]]}, ("`input_ids`", "-1")),
    "one prompt in place of several": ({"inputs": [4, 5, 6]}, ("`input_ids`", "int: 4", "list of such lists")),
    "a tree beside a config": (
        {"generation_config": GenerationConfig(speculative_config=SpeculativeConfig(tree="[(0,)]"))},
        ("`tree`", "`speculative_config`"),
    ),
    "a config that is none": ({"generation_config": {"tree": 3}}, ("`generation_config`", "dict")),
    "a text": ({"inputs": ["hello"]}, ("`input_ids`", "hello"[0])),
    "more than ever fits": ({"max_new_tokens": 999}, ("`max_new_tokens=999`", "never fit", "num_blocks")),
    "a tree without a draft": ({"assistant_model": None}, ("`tree`", "without a draft")),
    "a tree that is none": ({"tree": "[(1, 0)]"}, ("(1, 0)",)),
    "a seed that is none": ({"seed": "7", "do_sample": True}, ("`seed`", "'7'")),
    "a cache of one's own": ({"past_key_values": object()}, ("`past_key_values", "not known")),
    "stop strings without a tokenizer": ({"stop_strings": "x"}, ("tokenizer",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    options, words = REFUSED[case]
    forwards = []
    call = {"inputs": [[5, 6, 7]], "assistant_model": draft, "tree": "[(0,)]", "max_new_tokens": 4}
    call |= {"continuous_batching_config": limits()} | options
    with (
        target.register_forward_pre_hook(lambda *args: forwards.append(1)),
        pytest.raises((ValueError, TypeError)) as error,
    ):
        target.generate_batch(**call)
    assert all(word in str(error.value) for word in words), error.value
    assert not forwards
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
@pytest.mark.some_cases(1)
def test_texts_past_the_last_position_of_a_table(family: str) -> None:
    """Such a request fails there, and the others go on."""
    model = tiny_model(family)
    check_texts(
        model, noisy_copy(model), [[7] * 200, [5, 9, 4]], tree=IRREGULAR, max_new_tokens=57
    )  # the last token has no position
    short, long = model.generate_batch(
        [[5, 9, 4], [7] * 200], assistant_model=model, tree=IRREGULAR, max_new_tokens=58
    ).values()
    assert short.generated_tokens == text_alone(model, [5, 9, 4], max_new_tokens=58) and short.error is None
    assert long.generated_tokens == text_alone(model, [7] * 200, max_new_tokens=57)
    assert long.error.startswith("IndexError: the target knows 256 positions") and long.finish_reason is None


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
@pytest.mark.some_cases(1)
def test_texts_of_models_that_could_see(name: str) -> None:
    model = getattr(vision, name)()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    check_texts(model, NgramDraft(), ragged_prompts((9, 20)), max_new_tokens=30)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_texts_past_the_boundary_of_a_rotary_embedding(rope_type: str) -> None:
    """Whatever passes it changes the embedding of all that is in the same forward, itself excepted or not."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=32 if rope_type == "dynamic" else 128)
    draft, prompts = noisy_copy(model), ragged_prompts((5, 12, 9))
    check_texts(model, draft, prompts, tree=IRREGULAR, max_new_tokens=20)
    for length in (20, 40):
        with pytest.raises(ValueError, match="passes 32 tokens"):
            model.generate_batch([*prompts, [7] * length], assistant_model=draft, tree=IRREGULAR, max_new_tokens=20)


def test_a_target_that_cannot_be_served(draft: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        tiny_model(vocab_size=2000).generate_batch([[1, 2]], assistant_model=draft, tree="[(0,)]")


def test_streaming_gives_whole_texts(target: PreTrainedModel) -> None:
    outputs = check_texts(target, NgramDraft(), ragged_prompts(), max_new_tokens=20, tree="[(0,)]", streaming=True)
    assert all(output.is_finished() for output in outputs)


def test_a_batch_is_no_queue(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    few = limits(max_queue_size=3)
    call = {"tree": "[(0,)]", "max_new_tokens": 5, "continuous_batching_config": few}
    check_texts(target, draft, ragged_prompts(), **call)


def test_stop_strings_of_the_generation_config(target: PreTrainedModel) -> None:
    tokenizer, prompt = tiny_tokenizer(), ragged_prompts()[0]
    stop = tokenizer.decode([text_alone(target, prompt, max_new_tokens=20)[6]])
    config = GenerationConfig(stop_strings=[stop], max_new_tokens=20, do_sample=False)
    call = {"assistant_model": NgramDraft(), "tree": "[(0,)]", "tokenizer": tokenizer}
    (output,) = target.generate_batch([prompt], generation_config=config, **call).values()
    expected = text_alone(target, prompt, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)
    assert output.generated_tokens == expected and len(expected) < 20


class Alternates(LogitsProcessor):
    """Forbids every second token half of the vocabulary, by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 3 :: 3] -= 5.0
        return scores


class EndsAfter(StoppingCriteria):
    """Ends a text after so many calls."""

    def __init__(self, number: int):
        self.number, self.calls = number, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= self.number)


def test_processors_and_criteria_with_state(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Every request has its own, the first the user's objects, which see what they would of a single text."""
    prompts, processor, criterion = ragged_prompts(LENGTHS[:3]), Alternates(), EndsAfter(9)
    call: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    outputs = target.generate_batch(
        prompts,
        assistant_model=draft,
        tree="[(0,), (1,)]",
        logits_processor=[processor],
        stopping_criteria=[criterion],
        **call,
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        own: dict[str, Any] = {"logits_processor": [Alternates()], "stopping_criteria": [EndsAfter(9)]}
        text = target.generate(torch.tensor([prompt]), **call, **own)[0, len(prompt) :]
        assert output.error is None and output.generated_tokens == text.tolist() and len(text) == 9
    assert processor.calls == criterion.calls == 9


@pytest.mark.parametrize("of", ["batch", "request"])
def test_a_config_without_end_tokens(of: str, target: PreTrainedModel) -> None:
    """Its -1 is as that of a keyword argument: the model's own end tokens end nothing."""
    prompt = ragged_prompts(LENGTHS[:1])[0]
    text = text_alone(target, prompt, max_new_tokens=12)
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = text[4]
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1)
    if of == "batch":
        (output,) = model.generate_batch([prompt], config, assistant_model=NgramDraft(), tree="[(0,)]").values()
    else:
        with model.init_continuous_batching(assistant_model=NgramDraft(), tree="[(0,)]") as manager:
            output = manager.get_result(manager.add_request(prompt, generation_config=config), timeout=60)
    assert output.generated_tokens == text


def test_a_prefix_function_with_state_and_lists_in_lists(target: PreTrainedModel) -> None:
    prompts, call = ragged_prompts(LENGTHS[:3]), {"max_new_tokens": 8, "do_sample": False}

    def new() -> dict[str, Any]:
        calls: list[int] = []

        def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
            calls.append(batch_id)
            return [token for token in range(61) if token % 3 != len(calls) % 3]

        criteria = StoppingCriteriaList([StoppingCriteriaList([EndsAfter(6)])])
        return call | {"prefix_allowed_tokens_fn": allowed, "stopping_criteria": criteria}

    outputs = target.generate_batch(prompts, assistant_model=NgramDraft(), tree="[(0,)]", **new())
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        text = target.generate(torch.tensor([prompt]), **new())[0, len(prompt) :]
        assert output.generated_tokens == text.tolist() and len(text) == 6


def test_objects_that_cannot_be_copied_or_need_not_be(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompts, call = ragged_prompts(LENGTHS[:2]), {"assistant_model": draft, "tree": "[(0,)]", "max_new_tokens": 4}
    criterion = EndsAfter(3)
    criterion.lock = threading.Lock()
    with pytest.raises(ValueError, match="`stopping_criteria`: EndsAfter cannot be copied .* one by one"):
        target.generate_batch(prompts, stopping_criteria=[criterion], **call)
    assert len(target.generate_batch(prompts[:1], stopping_criteria=[criterion], **call)) == 1
    known = StopStringCriteria(tiny_tokenizer(), ["ab"])
    known.lock = threading.Lock()  # a table as large as the vocabulary is not copied
    assert len(target.generate_batch(prompts, stopping_criteria=[known], **call)) == 2
