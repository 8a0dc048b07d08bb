"""
With what surrounds a `generate` call: trained weights, pipelines, adapters, compiled and vision-language models,
threads, errors, and the random state.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from support.vision import VISION_MODELS
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel, pipeline
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.metrics import set_last_metrics


PROMPT = 9
NEW_TOKENS = 18


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", seed=5, attention_sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


# ----------------------------------------------------------------------------------------------------- trained weights


@pytest.fixture(scope="module")
def trained_draft() -> PreTrainedModel:
    return noisy_copy(trained_target(), noise=0.2)


TRAINED_TREES = [TokenTree.chain(5), IRREGULAR, DynamicTree(depth=5, top_k=3, num_nodes=16)]


@pytest.mark.parametrize("tree", TRAINED_TREES, ids=["chain", "irregular", "dynamic"])
def test_trained_model_prompt_by_prompt(trained_draft: PreTrainedModel, tree: Any) -> None:
    """In float32 and against greedy texts that were written by plain `generate` elsewhere."""
    target, goldens = trained_target(), trained_prompts()
    for ids, expected in list(zip(goldens["prompts"], goldens["greedy_64"], strict=True))[:6]:
        out = target.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, assistant_model=trained_draft, tree=tree
        )
        assert out.tolist() == [ids + expected]
        assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("tree", TRAINED_TREES, ids=["chain", "irregular", "dynamic"])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_trained_model_in_a_batch(trained_draft: PreTrainedModel, kind: str, tree: Any) -> None:
    """All prompts at once, of lengths from 8 to 57."""
    target, goldens = trained_target(), trained_prompts()
    inputs = trained_tokenizer().pad({"input_ids": goldens["prompts"]}, return_tensors="pt")
    assert (inputs["attention_mask"][:, 0] == 0).any()
    out = target.generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        assistant_model=trained_draft if kind == "model" else NgramDraft(),
        tree=tree,
    )
    assert out[:, inputs["input_ids"].shape[1] :].tolist() == goldens["greedy_64"]
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0
    if kind == "model":
        assert metrics.mean_acceptance_length > 2


# ----------------------------------------------------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return trained_tokenizer().batch_decode(trained_prompts()["prompts"][:5])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipeline_with_an_assistant(trained_draft: PreTrainedModel, texts: list[str], batch_size: int) -> None:
    target, tokenizer = trained_target(), trained_tokenizer()
    options = {"max_new_tokens": 24, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    speculative = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=trained_draft)
    expected = plain(texts, **options)
    set_last_metrics(None)
    assert speculative(texts, **options, tree=IRREGULAR) == expected
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert speculative(texts, **options, speculative_config=SpeculativeConfig(tree=TokenTree.chain(3))) == expected
    set_last_metrics(None)
    assert speculative(texts[0], max_new_tokens=24, do_sample=False, tree=IRREGULAR) == expected[0]
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipeline_with_a_drafter_of_ours(texts: list[str], batch_size: int) -> None:
    """It is passed to the call: `pipeline(assistant_model=…)` itself takes models only."""
    plain = pipeline("text-generation", model=trained_target(), tokenizer=trained_tokenizer())
    options = {"max_new_tokens": 48, "do_sample": False, "batch_size": batch_size}
    expected = plain(texts, **options)
    set_last_metrics(None)
    assert plain(texts, **options, assistant_model=NgramDraft(min_ngram=1)) == expected
    assert hf_specdec.last_metrics().num_drafts > 0


def test_assistants_named_by_their_folder(texts: list[str]) -> None:
    speculative = pipeline(
        "text-generation", model=trained_target(), tokenizer=trained_tokenizer(), assistant_model=str(TINY_TARGET)
    )
    speculative(texts[0], max_new_tokens=16, do_sample=False, tree="[(0,), (0, 0)]")
    assert hf_specdec.last_metrics().accepted_per_step == [[2] * 5]


# ------------------------------------------------------------------------------------------------------------ adapters


def with_lora(model: PreTrainedModel, seed: int) -> Any:
    """The model with an adapter of random weights (a fresh one changes nothing)."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lora_target(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> None:
    adapted = with_lora(target, seed=1)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    expected = plain_text(adapted, inputs, max_new_tokens=NEW_TOKENS)
    assert expected.tolist() != plain_text(target, inputs, max_new_tokens=NEW_TOKENS).tolist()
    assert_same_text(adapted, inputs, draft, expected=expected, max_new_tokens=NEW_TOKENS)
    with adapted.disable_adapter():
        assert_same_text(adapted, inputs, draft, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lora_draft(target: PreTrainedModel, batch_size: int) -> None:
    """A draft with an adapter is what it would be with the adapter merged into its weights."""
    adapted = with_lora(noisy_copy(target), seed=1)
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    metrics = [
        assert_same_text(target, inputs, assistant, TokenTree.chain(4), max_new_tokens=40)
        for assistant in (adapted, copy.deepcopy(adapted).merge_and_unload(), noisy_copy(target))
    ]
    steps = [run.accepted_per_step for run in metrics]
    assert steps[0] == steps[1] != steps[2]


def test_lora_target_that_drafts_for_itself(target: PreTrainedModel) -> None:
    adapted = with_lora(target, seed=1)
    metrics = assert_same_text(adapted, prompts(2, PROMPT), adapted, TokenTree.chain(4), max_new_tokens=21)
    assert metrics.accepted_per_step == [[4] * 4] * 2


def test_learned_prompts_are_refused(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(copy.deepcopy(target), config)
    with pytest.raises(ValueError, match="`assistant_model`: the target is tuned with .*PROMPT_TUNING"):
        tuned.generate(**prompts(1, PROMPT), max_new_tokens=4, assistant_model=draft, tree=IRREGULAR)
    with pytest.raises(ValueError, match="`assistant_model`: the draft is tuned with .*PROMPT_TUNING"):
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, assistant_model=tuned, tree=IRREGULAR)


# ----------------------------------------------------------------------------------------------------- compiled models


def test_compiled_target(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """`torch.compile(model).generate` is the model's own."""
    compiled = torch.compile(target, backend="eager")
    assert_same_text(compiled, prompts(2, PROMPT, padding=True), draft, max_new_tokens=NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
def test_compiled_forward(target: PreTrainedModel, draft: PreTrainedModel, role: str) -> None:
    inputs = prompts(2, PROMPT, padding=True)
    expected = assert_same_text(target, inputs, draft, TokenTree.chain(3), max_new_tokens=NEW_TOKENS)
    if role == "target":
        target = copy.deepcopy(target)
        target.compile(backend="eager")
    else:
        draft = torch.compile(copy.deepcopy(draft), backend="eager")
    metrics = assert_same_text(target, inputs, draft, TokenTree.chain(3), max_new_tokens=NEW_TOKENS)
    assert metrics.accepted_per_step == expected.accepted_per_step


# ---------------------------------------------------------------------------------------------- vision-language models


@pytest.fixture(scope="module", params=VISION_MODELS)
def vision(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Callable[[int, bool], dict[str, torch.Tensor]]]:
    make, inputs = VISION_MODELS[request.param]
    return make(), inputs


@pytest.mark.parametrize("batch_size, padding", [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize("kind", ["text model", "self", "ngram"])
def test_prompts_with_an_image(vision: Any, kind: str, batch_size: int, padding: bool) -> None:
    model, inputs_of = vision
    inputs = inputs_of(batch_size, padding)
    expected = plain_text(model, inputs, max_new_tokens=24)
    other_image = inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    assert expected.tolist() != model.generate(**other_image, max_new_tokens=24, do_sample=False).tolist()
    assistant = {"text model": tiny_model("llama", seed=3), "self": model, "ngram": NgramDraft(min_ngram=1)}[kind]
    # A wide tree, for a draft that has not seen the image.
    tree = TokenTree.from_branching((12, 2)) if kind == "text model" else IRREGULAR
    assert_same_text(model, inputs, assistant, tree, expected=expected, max_new_tokens=24)


def test_prompts_without_an_image(vision: Any) -> None:
    """The model drafts for itself and knows all there is: everything is accepted."""
    model, _ = vision
    metrics = assert_same_text(model, prompts(1, PROMPT, seed=4), model, TokenTree.chain(4), max_new_tokens=21)
    assert metrics.accepted_per_step == [[4] * 4]


def test_turns_behind_an_image(vision: Any) -> None:
    """The second turn has its image in the cache only."""
    model, inputs_of = vision
    texts = []
    for options in ({}, {"assistant_model": model, "tree": IRREGULAR}):
        inputs = inputs_of(1, False)
        first = model.generate(
            **inputs, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, use_cache=True, **options
        )
        ids = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        second = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=first.past_key_values,
            max_new_tokens=10,
            do_sample=False,
            **options,
        )
        texts.append(second.tolist())
    assert texts[0] == texts[1]
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


# ------------------------------------------------------------------------------------------------------------- threads

ROUNDS = 20


def at_once(*calls: Callable[[], torch.Tensor]) -> list[list[list[int]]]:
    """What the calls return, each made by a thread of its own and all begun at the same time."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(place: int) -> None:
        barrier.wait()
        results[place] = calls[place]().tolist()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("company", ["plain", "another tree", "itself as the draft"])
def test_two_threads_on_one_model(family: str, company: str) -> None:
    model = tiny_model(family, attention_sharpness=3.0)
    draft = noisy_copy(model)
    implementation = model.config._attn_implementation
    inputs, others = prompts(2, PROMPT, seed=1, padding=True), prompts(1, 14, seed=5)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = [plain_text(model, inputs, max_new_tokens=12), plain_text(model, others, max_new_tokens=12)]
    second = {
        "plain": {},
        "another tree": {"assistant_model": draft, "tree": DynamicTree(depth=3, top_k=2, num_nodes=6)},
        "itself as the draft": {"assistant_model": model, "tree": TokenTree.chain(2)},
    }[company]
    for _ in range(ROUNDS):
        texts = at_once(
            lambda: model.generate(**inputs, **options, assistant_model=draft, tree=IRREGULAR),
            lambda: model.generate(**others, **options, **second),
        )
        assert texts == [text.tolist() for text in expected]
        assert model.config._attn_implementation == draft.config._attn_implementation == implementation


def test_a_plain_call_within_a_speculative_one(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A streamer that generates with the same model: calls nest."""
    inputs, others = prompts(1, PROMPT), prompts(2, 12, seed=3, padding=True)
    expected = plain_text(target, others, max_new_tokens=6).tolist()
    nested = []

    class Nesting(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            assert target.config._attn_implementation == "tree_attention" or not nested
            nested.append(target.generate(**others, max_new_tokens=6, do_sample=False).tolist())
            options = {"assistant_model": draft, "tree": "[(0,), (1,)]"}
            nested.append(target.generate(**others, max_new_tokens=6, do_sample=False, **options).tolist())

        def end(self) -> None: ...

    plain = plain_text(target, inputs, max_new_tokens=6)
    out = target.generate(
        **inputs, max_new_tokens=6, do_sample=False, assistant_model=draft, tree=IRREGULAR, streamer=Nesting()
    )
    assert out.tolist() == plain.tolist()
    assert len(nested) == 14 and all(text == expected for text in nested)
    assert target.config._attn_implementation == "sdpa"


# ----------------------------------------------------------------------------- the model and the random state after it


class FailingProcessor(LogitsProcessor):
    def __init__(self, error: BaseException, after: int):
        self.error, self.left = error, after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


class FailingStreamer(BaseStreamer):
    def __init__(self, error: BaseException, after: int):
        self.error, self.left = error, after

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self) -> None: ...


def failing_options(where: str, after: int) -> tuple[dict[str, Any], type[BaseException]]:
    if where == "processor":
        return {"logits_processor": [FailingProcessor(RuntimeError("by design"), after)]}, RuntimeError
    return {"streamer": FailingStreamer(KeyboardInterrupt(), after)}, KeyboardInterrupt


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_attention_implementation_is_restored(family: str, implementation: str) -> None:
    if (family, implementation) == ("gemma2", "sdpa"):
        implementation = None  # the default: old versions have sdpa, new ones refuse it
    model = tiny_model(family, attn_implementation=implementation)
    draft = noisy_copy(model)
    before = model.config._attn_implementation
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    seen = set()

    def remember(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.add(model.config._attn_implementation)
        return scores

    model.generate(
        **prompts(1, PROMPT),
        max_new_tokens=6,
        do_sample=False,
        assistant_model=draft,
        tree=IRREGULAR,
        logits_processor=[remember],
    )
    assert seen == {"tree_attention"}
    for config in (*configs, draft.config):
        assert config._attn_implementation == before
    assert not hf_specdec.attention.switch._switches


@pytest.mark.parametrize("where", ["processor", "streamer"])
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("do_sample", [False, True])
def test_after_an_error_all_is_as_before(
    target: PreTrainedModel, draft: PreTrainedModel, where: str, after: int, do_sample: bool
) -> None:
    inputs = prompts(1, PROMPT)
    options, error = failing_options(where, after)
    state = torch.get_rng_state()
    with pytest.raises(error):
        target.generate(
            **inputs, max_new_tokens=12, do_sample=do_sample, assistant_model=draft, tree=TokenTree.chain(3), **options
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"
    assert not hf_specdec.attention.switch._switches
    assert_same_text(target, inputs, draft, max_new_tokens=NEW_TOKENS)


def test_an_error_in_one_thread_leaves_the_other_alone(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=12)

    def fail() -> torch.Tensor:
        options, error = failing_options("processor", 3)
        with pytest.raises(error):
            target.generate(**inputs, max_new_tokens=12, assistant_model=draft, tree=IRREGULAR, **options)
        return torch.zeros(0)

    for _ in range(ROUNDS):
        _, text = at_once(
            fail,
            lambda: target.generate(
                **inputs, max_new_tokens=12, do_sample=False, assistant_model=draft, tree=IRREGULAR
            ),
        )
        assert text == expected.tolist()
    assert target.config._attn_implementation == "sdpa"


def test_refusals_touch_nothing(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    inputs = prompts(1, PROMPT)
    other_vocabulary = tiny_model("llama", vocab_size=50)
    forwards = []
    hooks = [model.register_forward_pre_hook(lambda *args: forwards.append(1)) for model in (target, draft)]
    refused: list[dict[str, Any]] = [
        {"assistant_model": draft, "tree": "[(0, 0)]"},
        {"assistant_model": draft, "tree": "[(61,)]"},
        {"assistant_model": draft, "tree": "[(1,)]", "do_sample": True},
        {"assistant_model": draft, "tree": "[(0,)]", "num_beams": 2},
        {"assistant_model": other_vocabulary, "tree": "[(0,)]"},
        {"tree": "[(0,)]"},
    ]
    state = torch.get_rng_state()
    before = target.config.to_dict(), target.generation_config.to_dict()
    for options in refused:
        with pytest.raises(ValueError):
            target.generate(**inputs, max_new_tokens=4, **options)
        assert torch.equal(torch.get_rng_state(), state)
        assert target.config._attn_implementation == "sdpa"
        assert (target.config.to_dict(), target.generation_config.to_dict()) == before
    assert not forwards
    for hook in hooks:
        hook.remove()


def test_greedy_calls_draw_nothing(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    state = torch.get_rng_state()
    for tree in (IRREGULAR, DynamicTree(depth=3, top_k=2, num_nodes=6)):
        target.generate(**prompts(2, PROMPT), max_new_tokens=12, do_sample=False, assistant_model=draft, tree=tree)
        assert torch.equal(torch.get_rng_state(), state)


SAMPLING = {
    "drawn": (TokenTree.from_branching((2, 2)), {}),
    "drawn, dynamic": (DynamicTree(depth=3, top_k=2, num_nodes=6), {}),
    "best tokens": (IRREGULAR, {"draft_sampling": "greedy"}),
    "drawn, verified by the target": (TokenTree.chain(3), {"verification": "target"}),
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_seed_reproduces_a_run(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, name: str) -> None:
    tree, values = SAMPLING[name]
    config = SpeculativeConfig(tree=tree, **values)

    def run(seed: int) -> tuple[list[list[int]], list[list[int]]]:
        torch.manual_seed(seed)
        out = target.generate(
            **prompts(batch_size, PROMPT, padding=True),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=1.5,
            assistant_model=draft,
            speculative_config=config,
        )
        return out.tolist(), hf_specdec.last_metrics().accepted_per_step

    runs = [run(seed) for seed in (0, 0, 1, 2)]
    assert runs[0] == runs[1]
    assert len({str(text) for text, _ in runs}) == 3


def test_saving_and_loading_goes_on_as_ever(target: PreTrainedModel, draft: PreTrainedModel, tmp_path: Any) -> None:
    """Nothing of ours ends up in a saved model."""
    assert_same_text(target, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
    target.save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        content = (tmp_path / file).read_text()
        assert "tree" not in content and "speculative" not in content
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_same_text(loaded, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
