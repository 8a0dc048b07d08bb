"""Caches of a call's callers: reused over turns, returned, or left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from support.caches import assert_same_cache
from support.models import KV_SHARING, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

import hf_specdec
from hf_specdec.compat import CACHE


NEW_TOKENS = 13
PROMPT = 9
EXACT = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3_text"])
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, attention_sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


class Conversation:
    """Turns on one model: its answer, then some new tokens of the user, and so on, all with one cache."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache | None, batch_size: int):
        self.model, self.cache = model, cache
        inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
        self.text, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.batch_size, self.turn = batch_size, 0

    def answer(self, returned: bool, **options: Any) -> None:
        """One turn; `returned`: ask for the cache by `return_dict_in_generate`."""
        if self.turn > 0:
            said = prompts(self.batch_size, 4, seed=self.turn)["input_ids"]
            self.text = torch.cat([self.text, said], dim=1)
        self.turn += 1
        self.mask = torch.nn.functional.pad(self.mask, (0, self.text.shape[1] - self.mask.shape[1]), value=1)
        out = self.model.generate(
            self.text,
            attention_mask=self.mask,
            past_key_values=self.cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=returned,
            **options,
        )
        if returned:
            assert self.cache is None or out.past_key_values is self.cache
            self.cache = out.past_key_values
        self.text = out.sequences if returned else out

    def visible(self) -> torch.Tensor:
        """Slots of the cache that hold tokens, `[batch, slots]`."""
        return torch.nn.functional.pad(
            self.mask, (0, self.cache.get_seq_length() - self.mask.shape[1]), value=1
        ).bool()

    def assert_same(self, plain: Conversation) -> None:
        assert self.text.tolist() == plain.text.tolist()
        assert self.cache.get_seq_length() == self.text.shape[1] - 1
        assert_same_cache(self.cache, plain.cache, self.visible(), **EXACT)


@pytest.mark.parametrize("batch_size, given", [(2, False), (1, True)], ids=["2-returned", "1-given"])
@pytest.mark.some_cases(2)
def test_turns(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, given: bool) -> None:
    """Speculating turns on one cache; then plain `generate` goes on with it, and speculation after that."""
    ours, plain = (
        Conversation(target, DynamicCache(config=target.config) if given else None, batch_size) for _ in range(2)
    )
    for speculates in (True, True, False, True):
        ours.answer(not given, **({"assistant_model": draft, "tree": IRREGULAR} if speculates else {}))
        if speculates:
            assert hf_specdec.last_metrics().num_accepted_tokens > 0
        plain.answer(not given)
        ours.assert_same(plain)


@pytest.mark.some_cases(1)
def test_speculation_goes_on_from_a_plain_turn(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours, plain = (Conversation(target, DynamicCache(config=target.config), 2) for _ in range(2))
    for speculates in (False, True, False):
        ours.answer(False, **({"assistant_model": draft, "tree": IRREGULAR} if speculates else {}))
        plain.answer(False)
        ours.assert_same(plain)


@pytest.mark.some_cases(1)
def test_a_cache_without_a_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """`DynamicCache()` keeps everything, also for layers with a window."""
    ours, plain = (Conversation(target, DynamicCache(), 1) for _ in range(2))
    for _ in range(2):
        ours.answer(False, assistant_model=draft, tree=IRREGULAR)
        plain.answer(False)
        ours.assert_same(plain)


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
@pytest.mark.some_cases(1)
def test_turns_of_layers_that_share_keys_and_values(given: bool) -> None:
    """In newer versions the cache has dummies for layers without K/V of their own."""
    model = tiny_model("gemma4_text", attention_sharpness=3.0, **KV_SHARING)
    draft = noisy_copy(model)
    ours, plain = (Conversation(model, DynamicCache(config=model.config) if given else None, 2) for _ in range(2))
    for speculates in (True, True, False, True):
        ours.answer(not given, **({"assistant_model": draft, "tree": IRREGULAR} if speculates else {}))
        plain.answer(not given)
        assert ours.text.tolist() == plain.text.tolist()
        for mine, theirs in zip(ours.cache.layers, plain.cache.layers, strict=True):
            assert type(mine) is type(theirs)
            assert (mine.keys is None) == (theirs.keys is None)


@pytest.mark.some_cases(1)
def test_turns_with_chunked_prefill(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours, plain = (Conversation(target, DynamicCache(config=target.config), 2) for _ in range(2))
    for _ in range(2):
        ours.answer(False, assistant_model=draft, tree=IRREGULAR, prefill_chunk_size=3)
        plain.answer(False)
        ours.assert_same(plain)


def test_rows_that_end_early(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Plain `generate` forwards the padding of finished rows, too: the cache holds its K/V."""
    inputs = prompts(3, PROMPT, padding=True)
    text = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    ends = [int(text[0, PROMPT + 3]), int(text[1, PROMPT + 8])]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": ends, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=draft, tree=IRREGULAR)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert (plain.sequences[:, PROMPT:] == 0).any(), "no row ended early"
    slots = plain.past_key_values.get_seq_length()
    assert slots == ours.sequences.shape[1] - 1
    visible = torch.nn.functional.pad(inputs["attention_mask"], (0, slots - PROMPT), value=1).bool()
    assert_same_cache(ours.past_key_values, plain.past_key_values, visible, **EXACT)


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
def test_a_row_that_ends_early_beside_one_up_to_the_last_position(given: bool) -> None:
    """GPT-2 has a table of positions: padding after a complete row would be an index error."""
    target = tiny_model("gpt2", max_position_embeddings=32, attention_sharpness=3.0)
    inputs, options = prompts(2, PROMPT), {"max_length": 32, "do_sample": False}
    text = target.generate(**inputs, **options)
    end = next(int(token) for token in text[0, PROMPT + 3 :] if token not in text[1, PROMPT:])
    shapes: list[torch.Size] = []
    head = target.lm_head.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape))

    def call(**ours: Any) -> Any:
        cache = DynamicCache(config=target.config) if given else None
        output = target.generate(
            **inputs, **options, **ours, eos_token_id=end, past_key_values=cache, return_dict_in_generate=True
        )
        assert output.past_key_values.get_seq_length() == 31
        return output

    plain = call()
    shapes.clear()
    ours = call(assistant_model=noisy_copy(target), tree=IRREGULAR)
    head.remove()
    assert ours.sequences.tolist() == plain.sequences.tolist() and plain.sequences.shape[1] == 32
    assert (plain.sequences[0, -8:] == 0).all(), "no row ended early"
    assert shapes[-1][1] == 1, "the padding's logits are of no use"
    visible = torch.ones(2, 31, dtype=torch.bool)
    assert_same_cache(ours.past_key_values, plain.past_key_values, visible, **EXACT)


@pytest.mark.slow
def test_a_text_longer_than_the_first_capacity() -> None:
    target = tiny_model("llama", seed=5, attention_sharpness=3.0, max_position_embeddings=2048)
    inputs = prompts(2, PROMPT, padding=True)
    options = {"max_new_tokens": 280, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=noisy_copy(target), tree=IRREGULAR)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 100
    visible = torch.nn.functional.pad(inputs["attention_mask"], (0, 279), value=1).bool()
    assert_same_cache(ours.past_key_values, plain.past_key_values, visible, **EXACT)


@pytest.mark.some_cases(1)
def test_a_cache_is_untouched_when_a_call_fails(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    conversation = Conversation(target, DynamicCache(config=target.config), 2)
    conversation.answer(False, assistant_model=draft, tree=IRREGULAR)
    before = copy.deepcopy(conversation.cache)

    calls = []

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(input_ids)
        if len(calls) > 6:
            raise RuntimeError("by design")
        return scores

    with pytest.raises(RuntimeError, match="by design"):
        conversation.answer(False, assistant_model=draft, tree=IRREGULAR, logits_processor=[fail])
    assert_same_cache(conversation.cache, before)
    # and it is still good for the turn that failed
    plain = Conversation(target, DynamicCache(config=target.config), 2)
    plain.answer(False)
    assert conversation.turn == 2
    plain.answer(False)
    conversation.text = conversation.text[:, :-4]
    conversation.turn = 1
    conversation.answer(False, assistant_model=draft, tree=IRREGULAR)
    conversation.assert_same(plain)


@pytest.mark.parametrize("speculates", [(True, True, True), (True, False, True), (False, True, False)], ids=str)
@pytest.mark.some_cases(2)
def test_a_cache_that_records_its_past(
    target: PreTrainedModel, draft: PreTrainedModel, speculates: tuple[bool, ...]
) -> None:
    """`crop` takes tokens back, of a sliding window, too: the next turn goes on as if they had never been there."""
    if not all(speculates) and version.parse(transformers.__version__) < version.parse("5.23.0"):
        pytest.skip("plain `generate` needs a crop after every forward before transformers 5.23")
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    text = prompts(1, 20)["input_ids"]
    for turn, speculative in enumerate(speculates):
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        fresh = target.generate(**inputs, **options)
        if speculative:
            options |= {"assistant_model": draft, "tree": IRREGULAR}
        answer = target.generate(**inputs, **options, past_key_values=cache)
        assert answer.tolist() == fresh.tolist()
        cache.crop(-6)
        text = torch.cat([answer[:, : cache.get_seq_length()], prompts(1, 4, seed=turn)["input_ids"]], dim=1)


class ForeignLayer(CacheLayerMixin):
    """A layer of somebody else's, e.g. a quantised one."""

    is_compileable = False

    def lazy_initialization(self, *args: Any) -> None: ...

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def test_foreign_layers_are_refused() -> None:
    """Static, quantised and offloaded caches are in test_refusals.py; anything else unknown is refused likewise."""
    target = tiny_model("llama")
    cache = Cache(layers=[ForeignLayer(), ForeignLayer()])
    with pytest.raises(ValueError, match=f"`{CACHE}` of type Cache has a ForeignLayer at layer 0"):
        target.generate(
            **prompts(1, PROMPT), max_new_tokens=4, past_key_values=cache, assistant_model=target, tree="[(0,)]"
        )
