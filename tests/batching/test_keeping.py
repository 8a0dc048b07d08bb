"""A manager that a model keeps between calls."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.graphs import install_stand_in
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from support.sampling import a_draft, the_target
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.batching import Limits, SpeculativeBatchingManager
from hf_specdec.batching.keeping import keep, let_go
from hf_specdec.cache.paged_cache import PagedCache


TREE = "[(0,), (1,), (0, 0)]"
PROMPTS = ragged_prompts((9, 14, 5))


def generate(model: PreTrainedModel, draft: Any, **options: Any) -> list[list[int]]:
    call = {"max_new_tokens": 14, "do_sample": False, "continuous_batching_config": limits()} | options
    if "speculative_config" not in call:
        call = {"tree": TREE} | call
    return [out.generated_tokens for out in model.generate_batch(PROMPTS, assistant_model=draft, **call).values()]


def kept_by(model: PreTrainedModel) -> SpeculativeBatchingManager | None:
    manager = let_go(model)
    if manager is not None:
        keep(manager)
    return manager


def alone(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    return [text_alone(model, prompt, **({"max_new_tokens": 14} | options)) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["draft", "head", "ngram"])
@pytest.mark.some_cases(1)
def test_the_next_call_has_the_kept_manager(kind: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has captured. Its options are those of the new call."""
    stand_in = install_stand_in(monkeypatch, with_kernel=True)
    model = tiny_model()
    draft = {"draft": noisy_copy, "head": tiny_head, "ngram": lambda _: NgramDraft()}[kind](model)
    for _ in range(3):  # sizes are captured when they come for the second time: whole prompts, then what is not cached
        assert generate(model, draft, persistent_manager=True) == alone(model)
    captures = stand_in.captures
    assert captures > 0
    assert generate(model, draft, persistent_manager=True) == alone(model)
    assert stand_in.captures == captures and len(made) == 1
    assert_nothing_left(kept_by(model))
    config = GenerationConfig(max_new_tokens=6, repetition_penalty=1.4, do_sample=False)
    options = {"generation_config": config, "max_new_tokens": None}
    texts = generate(model, draft, **options)
    assert texts == alone(model, max_new_tokens=6, repetition_penalty=1.4) and len(made) == 1
    assert kept_by(model) is None
    gc.collect()
    assert made[0]() is None


def test_a_call_with_other_options_makes_another_manager(made: list[Any]) -> None:
    model = tiny_model()
    draft, ngram = noisy_copy(model), NgramDraft()
    calls: list[tuple[Any, dict[str, Any]]] = [
        (draft, {}),
        (ngram, {}),
        (ngram, {"tree": "[(0,)]"}),
        (ngram, {"speculative_config": SpeculativeConfig(tree="[(0,)]", disable_by_batch_size=2)}),
        (ngram, {"continuous_batching_config": limits(90)}),
    ]
    for number, (assistant, options) in enumerate(calls):
        assert generate(model, assistant, persistent_manager=True, **options) == alone(model)
        assert len(made) == number + 1
        assert [one() is not None for one in made] == [False] * number + [True]


def test_memory_of_a_kept_manager_is_free_before_the_next_measures_it(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    blocks = Limits.blocks

    def measured(self: Limits, *args: Any) -> int:
        alive.append(sum(one() is not None for one in made[:-1]))
        return blocks(self, *args)

    monkeypatch.setattr(Limits, "blocks", measured)
    model = tiny_model()
    gc.collect()
    gc.disable()
    try:
        for tree in ("[(0,)]", "[(0,), (1,)]"):
            generate(model, NgramDraft(), tree=tree, persistent_manager=True)
        assert alive == [0, 0] and kept_by(model)._loop.results.listener is None
        model.destroy_cached_continuous_batching_manager()
        assert made[1]() is None
    finally:
        gc.enable()


def test_transformers_own_manager_finds_its_memory_free(made: list[Any]) -> None:
    model = tiny_model().float()
    generate(model, NgramDraft(), persistent_manager=True)
    with contextlib.suppress(Exception):  # its manager asks for more than a CPU has
        model.init_continuous_batching()
    assert kept_by(model) is None and made[0]() is None


@pytest.mark.parametrize("change", ["dtype", "vocabulary"])
def test_no_manager_is_kept_for_a_changed_model(change: str, made: list[Any]) -> None:
    model, draft = tiny_model().float(), NgramDraft()
    generate(model, draft, persistent_manager=True)
    prompt = PROMPTS[0]
    if change == "dtype":
        model.double()
    else:
        model.resize_token_embeddings(70)
        prompt = [65, *prompt]
    call = {"tree": TREE, "max_new_tokens": 9, "continuous_batching_config": limits(), "do_sample": False}
    [output] = model.generate_batch([prompt], assistant_model=draft, **call).values()
    assert output.generated_tokens == text_alone(model, prompt, max_new_tokens=9) and len(made) == 2


def test_a_refused_call_changes_nothing(made: list[Any]) -> None:
    model, draft = tiny_model(), NgramDraft()
    generate(model, draft, persistent_manager=True)
    kept = kept_by(model)
    for options in ({"max_new_token": 3}, {"generation_config": GenerationConfig(num_beams=3)}):
        with pytest.raises(ValueError, match="max_new_token|beam"):
            generate(model, draft, **options)
        assert kept_by(model) is kept
        with kept:
            kept.get_result(kept.add_request([4, 5, 6], max_new_tokens=3), timeout=20)
        kept.stop(keep_for_next_session=True)
    kept.renew(GenerationConfig(num_beams=1))
    model.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="beam"):
        kept.renew(None)  # the model's own
    model.generation_config.num_beams = None
    kept.renew(None)
    assert generate(model, draft) == alone(model) and len(made) == 1


def test_a_kept_manager_can_be_destroyed_and_belongs_to_the_model(made: list[Any]) -> None:
    model, draft = tiny_model(), NgramDraft()
    model.destroy_cached_continuous_batching_manager()
    generate(model, draft, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    gc.collect()
    assert made[0]() is None and kept_by(model) is None
    generate(model, draft, persistent_manager=True)
    del model
    gc.collect()
    assert made[1]() is None


def test_copies_of_the_model_have_no_kept_manager() -> None:
    model, draft = tiny_model(), NgramDraft()
    generate(model, draft, persistent_manager=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kept_by(other) is None and generate(other, draft) == alone(model)
    assert kept_by(model) is not None


def test_a_manager_kept_by_a_context_is_as_good_as_new(made: list[Any]) -> None:
    """Results that nobody has asked for, and a listener, are no more."""
    model, draft = tiny_model(), NgramDraft()
    told: list[Any] = []
    options = {"assistant_model": draft, "tree": TREE, "continuous_batching_config": limits()}
    with model.continuous_batching_context_manager(persistent_manager=True, **options) as manager:
        manager.add_requests(PROMPTS, max_new_tokens=5)
    manager = model.init_continuous_batching(**options)
    assert len(made) == 1 and manager is made[0]() and kept_by(model) is None
    manager.listen(told.append)
    manager.start()
    name = manager.add_request(PROMPTS[0], max_new_tokens=5)
    manager.stop(keep_for_next_session=True)
    assert [result.request_id for results in told for result in results] == [name]
    assert generate(model, draft) == alone(model) and len(made) == 1


@pytest.mark.parametrize("kind", ["draft", "head", "head with some rows"])
@pytest.mark.some_cases(1)
def test_calls_inside_inference_mode_and_outside_it(kind: str, made: list[Any]) -> None:
    """What the first call makes is written by the second, weights too. Neither knows of the caller's autocast."""
    model = tiny_model().float()
    vocabulary = {"draft_vocab_size": 30, "has_lm_head": False} if kind == "head with some rows" else {}
    draft = noisy_copy(model) if kind == "draft" else tiny_head(model, **vocabulary).double()
    for number in range(4):
        expected = alone(model)
        with torch.inference_mode(number % 2 == 0), torch.autocast("cpu", torch.bfloat16):
            assert generate(model, draft, persistent_manager=True) == expected
        with torch.no_grad():
            model.lm_head.weight.neg_()
            for weight in draft.parameters():
                weight.mul_(0.9)
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.some_cases(2)
def test_calls_with_another_default_device(kind: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if graphs:
        install_stand_in(monkeypatch, with_kernel=True)
    model = tiny_model()
    draft, expected = (noisy_copy if kind == "draft" else tiny_head)(model), alone(model)
    with torch.device("meta"):
        assert generate(model, draft) == expected


def test_an_interrupted_manager_is_not_kept(made: list[Any]) -> None:
    model, draft, calls = tiny_model(), NgramDraft(), []

    def interrupts(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt("the user had enough")

    generate(model, draft, persistent_manager=True)
    with model.register_forward_pre_hook(interrupts), pytest.raises(KeyboardInterrupt, match="had enough"):
        generate(model, draft, persistent_manager=True)
    assert kept_by(model) is None and model.config._attn_implementation == "sdpa"
    assert generate(model, draft) == alone(model) and len(made) == 2


def test_a_failed_manager_is_not_kept(made: list[Any]) -> None:
    model, draft = tiny_model(), NgramDraft()

    def fails(*_: Any) -> None:
        raise OSError("no more")

    with model.register_forward_pre_hook(fails), pytest.raises(RuntimeError, match="no more"):
        generate(model, draft, persistent_manager=True)
    assert kept_by(model) is None
    with model.continuous_batching_context_manager(
        persistent_manager=True, assistant_model=draft, tree=TREE, continuous_batching_config=limits()
    ) as manager:
        with model.register_forward_pre_hook(fails):
            manager.add_request(PROMPTS[0], max_new_tokens=5)
            while manager.is_running():
                manager.get_result(timeout=0.1)
    assert kept_by(model) is None
    assert generate(model, draft, persistent_manager=True) == alone(model) and len(made) == 3
    torch.testing.assert_close(kept_by(model).model.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
def test_a_seed_reproduces_calls_of_a_kept_manager(made: list[Any]) -> None:
    """What the first call has learnt of the draft's temperature is not the next one's."""
    model, draft, texts = the_target(), a_draft("other"), []
    for _ in range(3):
        torch.manual_seed(7)
        call = {"do_sample": True, "top_k": 0, "max_new_tokens": 60, "persistent_manager": True}
        call |= {"eos_token_id": -1, "continuous_batching_config": limits()}
        outputs = model.generate_batch([[5, 5, 3, 7], [4, 6], [3, 3, 3]], assistant_model=draft, tree=TREE, **call)
        texts.append([output.generated_tokens for output in outputs.values()])
    assert len(made) == 1 and texts[0] == texts[1] == texts[2]
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("kind", ["ngram", "draft", "head"])
def test_memory_is_free_after_a_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, although its parts refer to each other: a collection of Python's may be long in coming."""
    model = tiny_model()
    draft: Any = {"ngram": NgramDraft(), "draft": noisy_copy(model), "head": tiny_head(model)}[kind]
    caches: list[Any] = []
    init = PagedCache.__init__

    def noted(self: PagedCache, *args: Any) -> None:
        caches.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(PagedCache, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        generate(model, draft)
        assert len(caches) == 1 + (kind != "ngram") and all(cache() is None for cache in caches)
    finally:
        gc.enable()
