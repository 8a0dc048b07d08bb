"""The cache of a speculative call, and the caches of its callers: reused over turns, returned, or left alone."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging import version
from support.models import KV_SHARING, noisy_copy, prompts, tiny_config, tiny_model
from support.parity import IRREGULAR
from torch._inductor.utils import run_and_get_code
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

import hf_specdec
from hf_specdec.cache import DeviceCache, TreeCache


HEADS, DIM, LAYERS = 2, 3, 2
CPU = torch.device("cpu")


# ----------------------------------------------------------------------------------------------------- TreeCache alone


class States:
    """K/V that are all different, so that a misplaced one shows: states of node `j` of forward `i` of row `b`."""

    def __init__(self, batch_size: int):
        self.batch_size, self.generator = batch_size, torch.Generator().manual_seed(0)

    def draw(self, num_nodes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[batch, heads, nodes, dim]` of every layer."""
        shape = (self.batch_size, HEADS, num_nodes, DIM)
        return [
            (torch.randn(shape, generator=self.generator), torch.randn(shape, generator=self.generator))
            for _ in range(LAYERS)
        ]


class NaiveCache:
    """What `TreeCache` should hold: for every layer and row, the committed K/V as lists of slots."""

    def __init__(self, batch_size: int):
        self.slots: list[list[list[Any]]] = [[[] for _ in range(batch_size)] for _ in range(LAYERS)]

    def commit(self, states: list[tuple[torch.Tensor, torch.Tensor]], nodes: list[list[int]]) -> None:
        for layer, (keys, values) in zip(self.slots, states, strict=True):
            for row, kept in enumerate(nodes):
                layer[row] += [(keys[row, :, node], values[row, :, node]) for node in kept]

    def assert_equals(self, cache: TreeCache) -> None:
        for layer, slots in zip(cache.layers, self.slots, strict=True):
            assert cache.lengths == list(map(len, slots)) == cache.lengths_tensor.tolist()
            for row, held in enumerate(slots):
                for slot, (key, value) in enumerate(held):
                    assert torch.equal(layer.keys[row, :, slot], key)
                    assert torch.equal(layer.values[row, :, slot], value)


def write(
    cache: TreeCache, states: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward: every layer writes its states, and gets to see what `update` returns."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(states)]


@st.composite
def steps_of_a_call(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[list[int], list[list[int] | None]]]]:
    """
    Batch size, lengths of the prefill's chunks, and steps: into how many forwards a step splits its nodes, and the
    path that each row accepts (increasing nodes, not necessarily the first ones).
    """
    batch_size = draw(st.integers(1, 3))
    chunks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        forwards = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        nodes = range(1, sum(forwards))
        paths = [
            draw(st.none() | st.lists(st.sampled_from(nodes), unique=True, max_size=4).map(sorted)) if nodes else []
            for _ in range(batch_size)
        ]
        steps.append((forwards, paths))
    return batch_size, chunks, steps


@settings(max_examples=150, deadline=None)
@given(call=steps_of_a_call(), capacity=st.integers(1, 40))
def test_tree_cache_against_a_naive_one(call: Any, capacity: int) -> None:
    batch_size, chunks, steps = call
    states, naive = States(batch_size), NaiveCache(batch_size)
    cache = TreeCache(LAYERS, batch_size, CPU, capacity)
    for chunk in chunks:
        assert cache.layers[0].get_mask_sizes(chunk) == (cache.get_seq_length() + chunk, 0)
        drawn = states.draw(chunk)
        seen = write(cache, drawn)
        naive.commit(drawn, [list(range(chunk))] * batch_size)
        assert seen[0][0].shape == (batch_size, HEADS, cache.get_seq_length(), DIM)
    cache.adopt_prefill()
    naive.assert_equals(cache)
    for forwards, paths in steps:
        drawn_nodes = []
        for offset, num_nodes in zip([sum(forwards[:i]) for i in range(len(forwards))], forwards, strict=True):
            cache.write_nodes(offset, num_nodes)
            drawn = states.draw(num_nodes)
            drawn_nodes.append(drawn)
            for (keys, values), (all_keys, all_values) in zip(drawn, write(cache, drawn), strict=True):
                assert all_keys.shape[2] == all_values.shape[2] == max(cache.lengths) + offset + num_nodes
                for row, length in enumerate(cache.lengths):
                    slots = slice(length + offset, length + offset + num_nodes)
                    assert torch.equal(all_keys[row, :, slots], keys[row])
                    assert torch.equal(all_values[row, :, slots], values[row])
            naive.assert_equals(cache)  # what is committed stays untouched
        cache.keep(paths)
        joined = [
            tuple(torch.cat([part[layer][which] for part in drawn_nodes], dim=2) for which in (0, 1))
            for layer in range(LAYERS)
        ]
        naive.commit(joined, [[] if path is None else [0, *path] for path in paths])
        naive.assert_equals(cache)


def test_capacity_doubles() -> None:
    cache, states = TreeCache(LAYERS, 1, CPU, capacity=4), States(1)
    sizes = []
    for num_nodes in (3, 1, 1, 4, 1, 30):
        write(cache, states.draw(num_nodes))
        sizes.append(cache.layers[0].keys.shape[2])
        assert cache.layers[1].values.shape[2] == sizes[-1]
    assert sizes == [4, 4, 8, 16, 16, 40]


def test_keeping_the_first_nodes_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, states = TreeCache(LAYERS, 2, CPU, capacity=16), States(2)
    write(cache, states.draw(3))
    cache.adopt_prefill()
    monkeypatch.setattr(cache, "_move", None)
    cache.write_nodes(0, 4)
    write(cache, states.draw(4))
    cache.keep([[1, 2], []])
    assert cache.lengths == [6, 4]


# --------------------------------------------------------------------------------------- from and to transformers' own


def filled(config: Any, states: list[tuple[torch.Tensor, torch.Tensor]], chunk: int) -> DynamicCache:
    """transformers' cache, after forwards of `chunk` tokens."""
    cache = DynamicCache(config=config)
    for start in range(0, states[0][0].shape[2], chunk):
        for layer, (keys, values) in enumerate(states):
            cache.update(keys[:, :, start : start + chunk], values[:, :, start : start + chunk], layer)
    return cache


def assert_same_cache(ours: Cache, plain: Cache, visible: torch.Tensor | None = None, **tolerance: float) -> None:
    """Equal lengths and K/V in every layer; where `visible` (`[batch, slots]`) is given, only there."""
    assert ours.get_seq_length() == plain.get_seq_length()
    assert len(ours.layers) == len(plain.layers)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        for name in ("keys", "values"):
            states = [getattr(layer, name).transpose(1, 2) for layer in (mine, theirs)]
            assert states[0].shape == states[1].shape
            if visible is not None:
                states = [held[visible[:, visible.shape[1] - held.shape[1] :]] for held in states]
            torch.testing.assert_close(*states, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize("length", [1, 5, 11, 12, 13, 30])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_load_and_store(family: str, length: int) -> None:
    """Through a `TreeCache` and back, and going on from there, sliding windows (12) included."""
    config = tiny_config(family, num_hidden_layers=LAYERS)
    states = States(2)
    drawn = states.draw(length)
    cache = filled(config, drawn, chunk=4)
    tree_cache = TreeCache(LAYERS, 2, CPU, capacity=1)
    tree_cache.load(cache)
    assert tree_cache.lengths == [length, length]
    for layer, (keys, _), held in zip(tree_cache.layers, drawn, cache.layers, strict=True):
        known = held.keys.shape[2]  # a sliding window has dropped the others
        assert torch.equal(layer.keys[:, :, length - known : length], keys[:, :, length - known :])
    stored = DynamicCache(config=config)
    tree_cache.store(stored, length)
    assert_same_cache(stored, cache)
    more = states.draw(5)
    for (mine, _), (theirs, _) in zip(write(stored, more), write(cache, more), strict=True):
        assert torch.equal(mine, theirs)
    assert_same_cache(stored, cache)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_store_drops_what_was_not_asked_for(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=LAYERS)
    drawn = States(2).draw(20)
    tree_cache = TreeCache(LAYERS, 2, CPU, capacity=32)
    write(tree_cache, drawn)
    stored = DynamicCache(config=config)
    tree_cache.store(stored, 17)
    assert_same_cache(
        stored, filled(config, [(keys[:, :, :17], values[:, :, :17]) for keys, values in drawn], chunk=4)
    )
    drawn[0][0].zero_()
    tree_cache.layers[0].keys.zero_()
    assert stored.layers[0].keys.abs().sum() > 0, "a copy: the tree cache is as large as its capacity"


def test_store_into_a_cache_without_a_config() -> None:
    """`DynamicCache()` makes its layers as they come."""
    drawn = States(1).draw(6)
    tree_cache = TreeCache(LAYERS, 1, CPU, capacity=8)
    write(tree_cache, drawn)
    stored = DynamicCache()
    tree_cache.store(stored, 6)
    plain = DynamicCache()
    write(plain, drawn)
    assert_same_cache(stored, plain)


# ---------------------------------------------------------------------------------------- caches of generate's callers

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


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_turns(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, given: bool) -> None:
    """Speculating turns on one cache; then plain `generate` goes on with it, and speculation after that."""
    ours, plain = (
        Conversation(target, DynamicCache(config=target.config) if given else None, batch_size) for _ in range(2)
    )
    for speculates in (True, True, True, False, True):
        ours.answer(not given, **({"assistant_model": draft, "tree": IRREGULAR} if speculates else {}))
        if speculates:
            assert hf_specdec.last_metrics().num_accepted_tokens > 0
        plain.answer(not given)
        ours.assert_same(plain)


def test_speculation_goes_on_from_a_plain_turn(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours, plain = (Conversation(target, DynamicCache(config=target.config), 2) for _ in range(2))
    for speculates in (False, True, False):
        ours.answer(False, **({"assistant_model": draft, "tree": IRREGULAR} if speculates else {}))
        plain.answer(False)
        ours.assert_same(plain)


def test_a_cache_without_a_config(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """`DynamicCache()` keeps everything, also for layers with a window."""
    ours, plain = (Conversation(target, DynamicCache(), 1) for _ in range(2))
    for _ in range(2):
        ours.answer(False, assistant_model=draft, tree=IRREGULAR)
        plain.answer(False)
        ours.assert_same(plain)


@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
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


def test_turns_with_chunked_prefill(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours, plain = (Conversation(target, DynamicCache(config=target.config), 2) for _ in range(2))
    for _ in range(3):
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


def test_a_text_longer_than_the_first_capacity() -> None:
    target = tiny_model("llama", seed=5, attention_sharpness=3.0, max_position_embeddings=2048)
    inputs = prompts(2, PROMPT, padding=True)
    options = {"max_new_tokens": 400, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_model=noisy_copy(target), tree=IRREGULAR)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 100
    visible = torch.nn.functional.pad(inputs["attention_mask"], (0, 399), value=1).bool()
    assert_same_cache(ours.past_key_values, plain.past_key_values, visible, **EXACT)


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


def test_store_into_a_cropped_cache_that_records_its_past() -> None:
    """The slots that a crop had dropped are not made up."""
    drawn, caches = States(1).draw(40), []
    config = tiny_config("mistral", num_hidden_layers=LAYERS)
    for _ in range(2):
        caches.append(DynamicCache(config=config))
        caches[-1].activate_past_recording()
        write(caches[-1], [(keys[:, :, :30], values[:, :, :30]) for keys, values in drawn])
        caches[-1].crop(-2)
    more = [(keys[:, :, 28:], values[:, :, 28:]) for keys, values in drawn]
    tree_cache = TreeCache(LAYERS, 1, CPU, capacity=40)
    tree_cache.load(caches[0])
    write(tree_cache, more)
    tree_cache.store(caches[0], 40)
    write(caches[1], more)
    assert caches[0].layers[0].keys.shape[2] == 11 + 12
    assert_same_cache(*caches)


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
    with pytest.raises(ValueError, match="`past_key_values` of type Cache has a ForeignLayer at layer 0"):
        target.generate(
            **prompts(1, PROMPT), max_new_tokens=4, past_key_values=cache, assistant_model=target, tree="[(0,)]"
        )


@pytest.mark.any_version
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_writes_are_in_place() -> None:
    """What the compiler makes of a write touches the nodes' slots alone: no buffer is as large as the cache."""
    cache = TreeCache(1, 2, torch.device("cpu"), capacity=64)
    states = torch.randn(2, 4, 7, 16)
    cache.layers[0].update(states, states)
    cache.adopt_prefill()
    behind = DeviceCache(cache)
    behind.at(torch.tensor([7, 3]))
    behind.write_nodes(0, 5)
    new, expected = torch.randn(2, 4, 5, 16), cache.layers[0].keys.clone()
    expected[0, :, 7:12], expected[1, :, 3:8] = 2 * new[0], 2 * new[1]

    def write(new: torch.Tensor) -> torch.Tensor:
        keys, _ = behind.layers[0].update(2 * new, new)
        return keys[:, :, :3].sum()

    _, sources = run_and_get_code(torch.compile(write, fullgraph=True, dynamic=False), new)
    assert "(2, 4, 64, 16)" in sources[0] and "empty_strided_cpu((2, 4, 64, 16)" not in sources[0]
    assert torch.equal(cache.layers[0].keys, expected)
