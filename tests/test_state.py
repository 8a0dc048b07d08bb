"""The state of model, threads and random numbers during and after calls, also after errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree


PROMPT = 9
NEW_TOKENS = 18
ROUNDS = 8


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", seed=5, attention_sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


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


@pytest.mark.parametrize("family", ["mistral", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("company", ["plain", "another tree", "itself as the draft"])
@pytest.mark.some_cases(1)
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
@pytest.mark.some_cases(5)
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
    other_vocabulary = tiny_model("llama", vocab_size=2000)
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


@pytest.mark.parametrize("batch_size, name", [(3, "drawn"), *zip((1, 3, 1, 3), SAMPLING, strict=True)])
@pytest.mark.some_cases(2)
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
