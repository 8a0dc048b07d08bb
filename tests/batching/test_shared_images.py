"""Prompts with images share what is equal in tokens and images: nothing but the time is different."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support import vision
from support.batches import assert_nothing_left, manager_of, run_together, text_alone
from support.graphs import install_stand_in
from support.vision import DRAFTS, Inputs
from transformers import PreTrainedModel

from hf_specdec.batching import Limits
from hf_specdec.batching.content import content_of
from hf_specdec.engine import prefix_keys, prefixes, prompt_inputs, target


SIZE, CHUNK = 4, 16


@cache
def the_target(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return vision.VISION_MODELS[name][0]().to(dtype)


def manager_for(name: str, kind: str = "ngram", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = the_target(name, dtype)
    own = Limits(**{"num_blocks": 200, "block_size": SIZE, "chunk_size": CHUNK, **options})
    return manager_of(model, DRAFTS[kind](model), continuous_batching_config=own)


def with_more(inputs: Inputs, tokens: list[int]) -> Inputs:
    """Inputs of a prompt that goes on with these tokens."""
    new = torch.tensor([tokens])
    more = {"input_ids": new, "attention_mask": torch.ones_like(new)}
    types = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.zeros_like(new))
    added = {name: value for name, value in (more | types).items() if name in inputs}
    return inputs | {name: torch.cat([inputs[name], value], dim=1) for name, value in added.items()}


def other_image(inputs: Inputs) -> Inputs:
    return inputs | {"pixel_values": -3 * inputs["pixel_values"].flip(-1)}


def plain(name: str, inputs: Inputs, count: int = 9) -> list[int]:
    text = the_target(name).generate(**inputs, do_sample=False, max_new_tokens=count)
    return text[0, inputs["input_ids"].shape[1] :].tolist()


def write(manager: Any, *prompts: Any, count: int = 9, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": count, "do_sample": False} | options
    dtype = manager.model.dtype
    own = [one if isinstance(one, list) else one | {"pixel_values": one["pixel_values"].to(dtype)} for one in prompts]
    return run_together(manager, [manager._admission.request(str(n), one, options) for n, one in enumerate(own)])


def of_encoder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that are read with their images from now on."""
    found: list[int] = []
    read = target.read_whole

    def noting(model: Any, cache: Any, tokens: torch.Tensor, *args: Any) -> Any:
        found.append(tokens.shape[1])
        return read(model, cache, tokens, *args)

    monkeypatch.setattr(target, "read_whole", noting)
    return found


@cache
def dialogue(name: str) -> tuple[list[Inputs], list[list[int]]]:
    """
    Turns about one image, each with all before, then the last with another image, and one with a second image behind;
    and what plain `generate` writes after each.
    """
    first, behind = vision.ragged_image_prompts(name, ((9, 6), (9, 6, 4)))
    turns, texts = [first], [plain(name, first)]
    for turn in range(2):
        turns.append(with_more(turns[-1], texts[-1] + [20 + turn, 31, 7]))
        texts.append(plain(name, turns[-1]))
    for inputs in (other_image(turns[-1]), behind):
        turns.append(inputs)
        texts.append(plain(name, inputs))
    assert texts[2] != texts[3], "else the image would not matter"
    return turns, texts


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(2)
def test_turns(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of all turns is encoded once; another one, or a second, is not taken for it."""
    encoded, (turns, texts) = of_encoder(monkeypatch), dialogue(name)
    manager = manager_for(name, kind)
    assert [text for turn in turns for text in write(manager, turn)] == texts
    lengths = [turn["input_ids"].shape[1] for turn in turns]
    end = int((turns[3]["input_ids"][0] >= vision.IMAGE_END).nonzero().max()) + 1
    assert encoded == [lengths[0], max(end, CHUNK), lengths[4]], "text far behind the image is read later"
    assert sum(lengths[1:3]) - 12 * SIZE < manager.state.num_prefix_hits < sum(lengths[1:3])
    assert_nothing_left(manager)


@pytest.mark.parametrize("wrong", ["_content_of", "_shift_of"])
def test_what_the_image_says_would_be_missed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys without the image, and texts behind it at other positions."""
    module, value = {"_content_of": (prefix_keys, b""), "_shift_of": (prefixes, None)}[wrong]
    monkeypatch.setattr(module, wrong, lambda *_: value)
    with pytest.raises(AssertionError):
        test_turns("qwen2_vl", "ngram", monkeypatch)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_equal_prompts_are_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come together wait for the first of them, and read what is not a full block."""
    encoded, (turns, texts) = of_encoder(monkeypatch), dialogue(name)
    manager, (prompt, *_) = manager_for(name, "head"), turns
    length, behind = prompt["input_ids"].shape[1], turns[4]
    assert write(manager, prompt, prompt, behind, prompt) == [texts[0], texts[0], texts[4], texts[0]]
    assert encoded == [length, behind["input_ids"].shape[1]]
    assert manager.state.num_prefix_hits == 2 * (length - 1) // SIZE // 2 * SIZE * 2


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.some_cases(1)
def test_few_blocks(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside prompts with the same text and no image, where requests lose their blocks and find them again."""
    monkeypatch.setattr(prompt_inputs, "LEAST_LEAD", 1)
    dtype = torch.float32 if captured else torch.float64
    if captured:
        install_stand_in(monkeypatch, with_kernel=True)
    encoded, (turns, texts) = of_encoder(monkeypatch), dialogue("qwen3_vl")
    prompts: list[Any] = [*turns[:4], turns[0]["input_ids"][0, :9].tolist() + [5, 6, 7], turns[4]] * 2
    alone = [*texts[:4], text_alone(the_target("qwen3_vl"), prompts[4], max_new_tokens=9), texts[4]] * 2
    manager = manager_for("qwen3_vl", "model", dtype, num_blocks=17, max_requests=4)
    assert write(manager, *prompts) == alone
    assert manager.state.num_preemptions > 0 and manager.state.num_prefix_hits > 100
    assert len(encoded) < 10
    assert_nothing_left(manager)


@pytest.mark.parametrize("of", ["more", "end"])
def test_images_that_depend_on_what_follows(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a further image, or the text behind, changes the K/V of a first one, others do not share it."""
    kind = type(the_target("llava"))
    prefill = kind._prefill

    def looking_ahead(self: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        is_other = (tokens == vision.IMAGE).sum() > 4 if of == "more" else tokens[0, -1] % 2 == 1

        def change(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
            changes = is_other and made.shape[1] == tokens.shape[1]
            return torch.cat([made[:, :15].roll(1, dims=2), made[:, 15:]], dim=1) if changes else made

        with self.get_input_embeddings().register_forward_hook(change):
            return prefill(self, tokens, *args, **options)

    two, one = vision.ragged_image_prompts("llava", ((9, 21, 4), (9, 21)))
    one["input_ids"] = two["input_ids"][:, : one["input_ids"].shape[1]].clone()
    one["pixel_values"] = two["pixel_values"][:1]
    prompts = [two, one] if of == "more" else [with_more(one, [7]), with_more(one, [7, 20, 8])]
    before = [plain("llava", inputs) for inputs in prompts]
    monkeypatch.setattr(kind, "_prefill", looking_ahead)
    texts = [plain("llava", inputs) for inputs in prompts]
    assert texts[0] != before[0] and texts[1] == before[1]
    manager = manager_for("llava")
    assert [text for inputs in prompts * 2 for text in write(manager, inputs)] == texts * 2
    leads = manager._admission.leads
    assert getattr(leads, of) is False
    assert of == "end" or manager.state.num_prefix_hits > 0  # of equal prompts
    setattr(leads, of, True)
    manager.reset_prefix_cache()
    assert [text for inputs in prompts for text in write(manager, inputs)] != texts


def test_images_at_the_end_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells there whether text behind an image changes its K/V: prompts with such text do not share it."""
    kind = type(the_target("llava"))
    prefill = kind._prefill

    def looking_ahead(self: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        def change(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
            changes = tokens[0, -1] == 7 and made.shape[1] == tokens.shape[1]
            return torch.cat([made[:, :15].roll(1, dims=2), made[:, 15:]], dim=1) if changes else made

        with self.get_input_embeddings().register_forward_hook(change):
            return prefill(self, tokens, *args, **options)

    (prompt,) = vision.ragged_image_prompts("llava", ((9, 21),))
    end = int((prompt["input_ids"][0] == vision.IMAGE).nonzero()[-1]) + 1
    for name in ("input_ids", "attention_mask"):
        prompt[name] = prompt[name][:, end % SIZE : end]
    prompts = [prompt, with_more(prompt, [20, 7])]
    monkeypatch.setattr(kind, "_prefill", looking_ahead)
    texts = [plain("llava", inputs) for inputs in prompts]
    manager = manager_for("llava")
    assert [text for inputs in prompts * 2 for text in write(manager, inputs)] == texts * 2
    assert manager._admission.leads.end is False


@pytest.mark.parametrize(
    ("name", "tail", "dtype"),
    [("llava", 41, torch.float64), ("gemma3", 21, torch.float64), ("qwen3_vl", 41, torch.float32)],
)
@pytest.mark.some_cases(1)
def test_adjacent_images(name: str, tail: int, dtype: torch.dtype) -> None:
    """Images without text between them are shared together or not at all, though a marker stands in the text."""
    one, apart = vision.ragged_image_prompts(name, ((9, 0, tail), (9, 21, 3)))
    tokens = one["input_ids"][0]
    if name != "qwen3_vl":  # without markers between them, too
        end = int((tokens == vision.IMAGE_END).nonzero()[0, 0])
        assert tokens[end + 1] == vision.IMAGE_START
        is_token = {key for key, value in one.items() if value.shape[-1] == len(tokens)}
        cut = {key: torch.cat([one[key][:, :end], one[key][:, end + 2 :]], dim=1) for key in is_token}
        one, tokens = one | cut, cut["input_ids"][0]
    tokens[-9] = vision.IMAGE_START
    half = len(one["pixel_values"]) // 2
    changed = [one["pixel_values"].clone() for _ in range(2)]
    for values, part in zip(changed, (slice(half, None), slice(half)), strict=True):
        values[part] = -9 * values[part].flip(-1)
    prompts = [one, *(one | {"pixel_values": values} for values in changed)]
    texts = [plain(name, inputs) for inputs in prompts]
    assert len({tuple(text) for text in texts}) == 3, "else the images would not matter"
    manager = manager_for(name, "ngram", dtype)
    assert write(manager, apart) == [plain(name, apart)], "which tells that images may be read one by one"
    for inputs, text in zip(prompts * 2, texts * 2, strict=True):
        assert write(manager, inputs) == [text]
    assert manager.state.num_prefix_hits > 3 * 20, "in the second round"
    assert_nothing_left(manager)


def test_what_is_told_of_inputs() -> None:
    """All that the model reads beside the tokens up to the last image; nothing, where its place is not known."""
    model, inputs = the_target("qwen2_vl"), vision.ragged_image_prompts("qwen2_vl", ((9, 6, 4),))[0]
    tokens = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    one = content_of(model, tokens, inputs)
    assert one is not None and (one.first, one.end) == (9, 9 + 8 + 6 + 8)
    longer = inputs | {"mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], torch.zeros(1, 3).long()], dim=1)}
    assert content_of(model, [*tokens, 5, 6, 7], longer) == one
    for name, value in inputs.items():
        other = value.clone()
        other.view(-1)[4] += 1
        assert content_of(model, tokens, inputs | {name: other}) != one, name
    assert content_of(model, tokens, inputs | {"pixel_values": inputs["pixel_values"].view(12, -1)}) != one
    assert content_of(model, [5] * 9, {"pixel_values": inputs["pixel_values"]}) is None
