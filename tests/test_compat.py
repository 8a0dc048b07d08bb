"""What differs between releases of transformers: the name of the cache, and releases newer than those tried."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec import compat
from hf_specdec.models.structure import forward_parameters


SPECULATES: tuple[bool, ...] = (False, True)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


def test_the_name_is_that_of_the_release() -> None:
    assert compat.CACHE in inspect.signature(LlamaForCausalLM.forward).parameters
    assert compat.CACHE in GenerateDecoderOnlyOutput.__dataclass_fields__


def test_a_forward_names_its_own_argument(target: PreTrainedModel) -> None:
    assert compat.cache_argument(forward_parameters(target)) == compat.CACHE
    assert compat.cache_argument({"input_ids", "past_key_values"}) == "past_key_values"
    assert compat.cache_argument({"input_ids"}) is None


@pytest.mark.parametrize("name", ["past_key_values", "cache", "cache_params"])
def test_names_that_generate_takes(target: PreTrainedModel, draft: PreTrainedModel, name: str) -> None:
    """A cache goes in by each name by which plain `generate` takes it; else both raise the same error."""
    outcomes = []
    for speculates in SPECULATES:
        cache, inputs = DynamicCache(config=target.config), prompts(1, 9)
        try:
            ids = target.generate(**inputs, **_options(draft, speculates), **{name: cache})
            outcomes.append((ids.tolist(), cache.get_seq_length()))
        except ValueError as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def test_outputs_have_the_field_of_the_release(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    plain, ours = (
        target.generate(**prompts(1, 9), **_options(draft, speculates), return_dict_in_generate=True)
        for speculates in SPECULATES
    )
    assert set(ours.keys()) - {"speculation"} == set(plain.keys())
    assert ours[compat.CACHE].get_seq_length() == plain[compat.CACHE].get_seq_length() == ours.sequences.shape[1] - 1
    assert ours.past_key_values is ours[compat.CACHE]


def test_a_deprecated_name_is_never_used(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own calls do not make transformers warn about names."""
    warned: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, message, *_: warned.append(str(message)))
    target.generate(**prompts(2, 9, padding=True), **_options(draft, True), return_dict_in_generate=True)
    target.generate_batch([[1, 2, 3]], assistant_model=draft, tree=IRREGULAR, max_new_tokens=4, progress_bar=False)
    assert not [message for message in warned if "deprecated" in message]


def test_one_warning_for_a_release_that_was_not_tried(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(compat.logger, "warning_once", lambda message, *_: warned.append(message), raising=False)
    target.generate(**prompts(1, 9), **_options(draft, True))
    assert warned == []
    monkeypatch.setattr(compat, "_RELEASE", (5, compat.NEWEST_TRIED[1] + 1, 0))
    target.generate(**prompts(1, 9), **_options(draft, True))
    assert len(warned) == 1 and "5.17 to" in warned[0]


def _options(draft: PreTrainedModel, speculates: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"max_new_tokens": 8, "do_sample": False}
    return options | ({"assistant_model": draft, "tree": IRREGULAR} if speculates else {})
