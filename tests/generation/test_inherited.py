"""Options that stand in the model's own `generation_config`: set aside, or refused with the way to override them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import tiny_model
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.generation import inherited


GREEDY = {"max_new_tokens": 12, "do_sample": False}
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def plain(target: PreTrainedModel) -> list[int]:
    return target.generate(**inputs(), **GREEDY)[0, len(PROMPT) :].tolist()


def inputs() -> dict[str, Any]:
    ids = torch.tensor([PROMPT])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is said as information."""
    found: list[str] = []
    monkeypatch.setattr(inherited.logger, "info_once", found.append)
    yield found


def with_own(options: dict[str, Any]) -> PreTrainedModel:
    """The target with options in its own config, as a published one may have."""
    model = tiny_model()
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model


def texts(model: PreTrainedModel, assistant: Any, **options: Any) -> list[list[int]]:
    """By `generate` and by `generate_batch`."""
    call = {"assistant_model": assistant, "tree": "chain:2", **GREEDY, **options}
    one = model.generate(**inputs(), **call)[0, len(PROMPT) :].tolist()
    call.pop("trust_remote_code", None)
    (of_batch,) = model.generate_batch([PROMPT], **call).values()
    return [one, of_batch.generated_tokens]


IDLE: dict[str, Any] = {
    "cache_implementation": "static",
    "use_cache": False,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 4,
    "max_matching_ngram_size": 3,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.some_cases(4)
def test_options_that_change_no_text(draft: PreTrainedModel, plain: list[int], told: list[str], name: str) -> None:
    """Those of caches and of transformers' own assisted generation; the model's config stays as it is."""
    model = with_own({name: IDLE[name]})
    before = model.generation_config.to_dict()
    attributes = set(vars(model))
    assert texts(model, draft) == [plain, plain]
    assert texts(model, NgramDraft()) == [plain, plain]
    assert told and all(f"`{name}` of the model's `generation_config` is set aside" in message for message in told)
    assert model.generation_config.to_dict() == before
    assert set(vars(model)) <= attributes | {"prepare_inputs_for_generation"}


def test_several_at_once(draft: PreTrainedModel, plain: list[int], told: list[str]) -> None:
    model = with_own({"cache_implementation": "static", "num_assistant_tokens": 7})
    assert texts(model, draft) == [plain, plain]
    assert all(
        "`num_assistant_tokens`, `cache_implementation`" in message and "are set" in message for message in told
    )


def test_nothing_is_said_of_what_is_not_there(draft: PreTrainedModel, plain: list[int], told: list[str]) -> None:
    assert texts(tiny_model(), draft) == [plain, plain]
    assert not told


def test_what_the_call_names_is_refused_still(draft: PreTrainedModel) -> None:
    model = with_own({"cache_implementation": "static"})
    for options in ({"cache_implementation": "quantized"}, {"num_assistant_tokens": 9}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}=.*Leave"):
            model.generate(**inputs(), assistant_model=draft, tree="chain:2", **GREEDY, **options)


CHANGING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_beams": ({"num_beams": 3}, {"num_beams": 1}),
    "dola_layers": ({"dola_layers": "low"}, {"dola_layers": None}),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, {"penalty_alpha": 0.0}),
}


@pytest.mark.parametrize("name", CHANGING)
def test_options_that_change_the_text(draft: PreTrainedModel, plain: list[int], name: str) -> None:
    """Refused, with their origin and with the override, which works, and so does None, in a running manager, too."""
    own, override = CHANGING[name]
    model = with_own(own)
    call = {"assistant_model": draft, "tree": "chain:2", **GREEDY}
    remote = {"trust_remote_code": True} if name == "penalty_alpha" else {}  # else transformers refuses it first
    said = ["the model's `generation_config`", f"`{name}={override[name]!r}`"]
    with pytest.raises(ValueError) as caught:
        model.generate(**inputs(), **call, **remote)
    assert all(words in str(caught.value) for words in (name, *said))
    assert model.generate(**inputs(), **call, **override)[0, len(PROMPT) :].tolist() == plain
    with pytest.raises(ValueError) as caught:
        model.generate_batch([PROMPT], **call)
    assert all(words in str(caught.value) for words in (name, *said))
    assert texts(model, draft, **override) == [plain, plain]
    with pytest.raises(ValueError, match=said[1]):
        model.init_continuous_batching(assistant_model=draft, tree="chain:2")
    config = GenerationConfig(**GREEDY, tree="chain:2")
    (of_batch,) = model.generate_batch([PROMPT], config, assistant_model=draft, **{name: None}).values()
    assert of_batch.generated_tokens == plain
    manager = tiny_model().init_continuous_batching(assistant_model=draft, tree="chain:2")
    for option, value in own.items():
        setattr(manager.model.generation_config, option, value)
    with manager:
        with pytest.raises(ValueError, match=said[1]):
            manager.add_request(PROMPT, **GREEDY)
        request = manager.add_request(PROMPT, **GREEDY, **{name: None})
        assert manager.get_result(request, timeout=60).generated_tokens == plain


OVERRIDDEN: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": list(range(40))},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(40))},
    "do_sample": {"do_sample": True, "temperature": 9.0},
    "max_time": {"max_time": 0.0},
    "stop_strings": {"stop_strings": ["a"]},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("name", OVERRIDDEN)
@pytest.mark.some_cases(4)
def test_none_overrides(draft: PreTrainedModel, plain: list[int], name: str) -> None:
    """As in plain `generate`, whether the model's own config says something else, or one that the call is given."""
    own, greedy = OVERRIDDEN[name], GREEDY | {name: None}
    model = with_own(own)
    expected = model.generate(**inputs(), **greedy)[0, len(PROMPT) :].tolist()
    assert expected == plain or name == "min_new_tokens"
    assert texts(model, draft, **{name: None}) == [expected, expected]
    if name in ("use_cache", "cache_implementation"):
        return
    config = GenerationConfig(**GREEDY | own, tree="chain:2")
    outputs = tiny_model().generate_batch([PROMPT], config, assistant_model=draft, **{name: None})
    assert [output.generated_tokens for output in outputs.values()] == [expected]


def test_lengths_and_ends_that_are_none(target: PreTrainedModel, draft: PreTrainedModel, plain: list[int]) -> None:
    """In requests they are defaults, as in transformers' manager, which the config fills in."""
    config = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=plain[6], tree="chain:2")
    ended = plain[: plain.index(plain[6]) + 1]
    call = {"max_new_tokens": None, "eos_token_id": None, "logits_processor": None}
    outputs = target.generate_batch([PROMPT], config, assistant_model=draft, **call)
    assert [output.generated_tokens for output in outputs.values()] == [ended]


def test_outputs_that_requests_do_not_have(draft: PreTrainedModel) -> None:
    model = with_own({"output_scores": True})
    with pytest.raises(
        ValueError, match="output_scores=True.*model's `generation_config`: pass `output_scores=False`"
    ):
        model.generate_batch([PROMPT], assistant_model=draft, tree="chain:2", **GREEDY)
    model.generate_batch([PROMPT], assistant_model=draft, tree="chain:2", **GREEDY, output_scores=False)


def test_a_config_of_the_call_is_not_the_models(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    config = GenerationConfig(**GREEDY, num_beams=3)
    with pytest.raises(ValueError, match="num_beams=3.*Use num_beams=1"):
        target.generate(**inputs(), assistant_model=draft, tree="chain:2", generation_config=config)


# ------------------------------------------------------------------------------------------------- models as they come


def traced(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose `forward` a tracing tool has replaced."""
    model = copy.deepcopy(model)
    forward = model.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = wrapper
    return model


@pytest.mark.parametrize("role", ["target", "draft", "both"])
def test_forwards_replaced_by_wrappers(
    target: PreTrainedModel, draft: PreTrainedModel, plain: list[int], role: str
) -> None:
    model = target if role == "draft" else traced(target)
    assistant = draft if role == "target" else traced(draft)
    assert texts(model, assistant) == [plain, plain]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_models_that_return_tuples(
    target: PreTrainedModel, draft: PreTrainedModel, plain: list[int], role: str
) -> None:
    """With `return_dict=False` in their configs, from which plain `generate` fails."""
    pair = [copy.deepcopy(target), copy.deepcopy(draft)]
    pair[role == "draft"].config.return_dict = False
    assert texts(*pair) == [plain, plain]
    assert [model.config.return_dict for model in pair] == [role == "draft", role == "target"]
