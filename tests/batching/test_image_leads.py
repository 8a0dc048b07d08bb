"""Text before a prompt's first image is read in chunks, and shared, as other texts; the image with what follows it."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support import vision
from support.batches import assert_nothing_left, manager_of, run_together, text_alone
from support.vision import DRAFTS, Inputs
from transformers import PreTrainedModel

from hf_specdec.batching import Limits, preparing_inputs
from hf_specdec.compat import cache_name_of
from hf_specdec.engine import prefixes
from hf_specdec.engine import target as target_module
from hf_specdec.engine.prompt_inputs import Content, PromptInputs
from hf_specdec.engine.request import Request
from hf_specdec.engine.target import InFlightTarget
from hf_specdec.forwards import whole_prompt


LEAD, CHUNK, NEW, SIZE = 40, 16, 6, 4
FIRST = LEAD // SIZE * SIZE
"""Tokens before the images in full blocks."""


def plain_texts(model: PreTrainedModel, prompts: list[Inputs]) -> list[list[int]]:
    """What plain `generate` writes after each prompt."""
    texts = [model.generate(**inputs, do_sample=False, max_new_tokens=NEW) for inputs in prompts]
    return [text[0, one["input_ids"].shape[1] :].tolist() for text, one in zip(texts, prompts, strict=True)]


@cache
def family(name: str) -> tuple[PreTrainedModel, list[Inputs], list[list[int]]]:
    """A model, prompts that begin with one text, with an image, another, and two, and what plain `generate` writes."""
    model = vision.VISION_MODELS[name][0]()
    one, two = vision.ragged_image_prompts(name, ((LEAD, 21), (LEAD, 3, 5)))
    two["input_ids"][:, :LEAD] = one["input_ids"][:, :LEAD]
    prompts = [one, one | {"pixel_values": -3 * one["pixel_values"].flip(-1)}, two]
    texts = plain_texts(model, prompts)
    assert texts[0] != texts[1], "else the image would not matter"
    return model, prompts, texts


def lead_of(name: str) -> int:
    """Tokens before the first one that tells of an image: LLaVA's config names none around it."""
    return LEAD + (name == "llava")


def end_of_images(inputs: Inputs) -> int:
    """Tokens up to the last one that tells of an image."""
    return int((inputs["input_ids"][0] >= vision.IMAGE_END).nonzero().max()) + 1


def manager_for(name: str, kind: str = "ngram", **options: Any) -> Any:
    model = family(name)[0]
    own = Limits(**{"num_blocks": 200, "block_size": SIZE, "chunk_size": CHUNK} | options)
    return manager_of(model, DRAFTS[kind](model), continuous_batching_config=own)


def write(manager: Any, *prompts: Inputs | list[int]) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False}
    return run_together(manager, [manager._admission.request(str(n), one, options) for n, one in enumerate(prompts)])


def noting_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """For every prefill forward from now on: whether it reads images, its first slot, and its number of tokens."""
    found: list[tuple[bool, int, int]] = []
    read = InFlightTarget.read

    def noting(self: InFlightTarget, chunk: Any) -> torch.Tensor:
        first = self.cache.length_of(chunk.requests[0].table)
        found.append((chunk.is_whole, first, max(chunk.counts)))
        return read(self, chunk)

    monkeypatch.setattr(InFlightTarget, "read", noting)
    return found


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(1)
def test_new_images(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a text that others have read, in one forward with what follows."""
    _, prompts, texts = family(name)
    manager, reads = manager_for(name, kind), noting_reads(monkeypatch)
    assert [text for inputs in prompts for text in write(manager, inputs)] == texts
    if manager._admission.leads.work:  # else all three are read whole: as Gemma 3 by older releases
        lengths = [inputs["input_ids"].shape[1] for inputs in prompts]
        of_images = [(first, count) for is_whole, first, count in reads if is_whole]
        first = lead_of(name)
        assert of_images == [(0, lengths[0]), (first, lengths[1] - first), (first, lengths[2] - first)]
        assert manager.state.num_prefix_hits >= 2 * (FIRST - SIZE)
    assert manager._admission.leads.work or name == "gemma3"
    assert_nothing_left(manager)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@pytest.mark.some_cases(1)
def test_long_texts_before_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, once for all."""
    _, prompts, texts = family(name)
    manager = manager_for(name, "model")
    assert write(manager, prompts[0]) == texts[:1]
    manager.reset_prefix_cache()
    reads = noting_reads(monkeypatch)
    assert write(manager, *prompts, *prompts) == texts * 2
    assert {first for is_whole, first, _ in reads if is_whole} == {lead_of(name)}
    assert max(count for is_whole, _, count in reads if not is_whole) <= CHUNK
    assert_nothing_left(manager)


@pytest.mark.parametrize("wrong", ["positions", "text", "image"])
def test_wrong_cuts_would_be_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images at positions from zero, behind a text of zeros, and cut in two: by the trial, and by the tests above."""
    model, prompts, texts = family("llava")
    if wrong == "positions":
        prefill = type(model)._prefill

        def at_zero(self: Any, tokens: torch.Tensor, config: Any, inputs: dict[str, Any]) -> Any:
            held = inputs[cache_name_of(model)].get_seq_length()
            positions = inputs.get("position_ids", torch.arange(tokens.shape[1])[None])
            return prefill(self, tokens, config, inputs | {"position_ids": positions - held})

        monkeypatch.setattr(type(model), "_prefill", at_zero)
    elif wrong == "text":

        def zeros(source: Any, length: int, target: Any) -> None:
            copy_start(source, length, target)
            for layer in target.layers:
                layer.keys.zero_()

        copy_start = whole_prompt.copy_start
        for module in ("forwards.whole_prompt", "engine.target"):
            monkeypatch.setattr(f"hf_specdec.{module}.copy_start", zeros)
    else:
        monkeypatch.setattr(Request, "num_lead", LEAD + 3)
    manager = manager_for("llava")
    if wrong != "image":
        assert write(manager, *prompts) == texts
        assert manager._admission.leads.work is False
        manager._admission.leads.work = True
        manager.reset_prefix_cache()
    with pytest.raises(AssertionError):
        assert write(manager, *prompts) == texts


def test_images_that_change_the_text_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The text is not read by itself where it is read otherwise with images, as by an adapter that these switch on; nor
    do texts without images get what was read with them.
    """
    model, prompts, others = family("llava")
    prefill, embeddings = type(model)._prefill, model.get_input_embeddings()

    def with_other_embeddings(self: Any, tokens: Any, config: Any, inputs: dict[str, Any], **options: Any) -> Any:
        if inputs.get("pixel_values") is None and not inputs.get("mm_encoder_outputs"):  # as releases have them
            return prefill(self, tokens, config, inputs, **options)
        with embeddings.register_forward_hook(lambda module, args, output: output.roll(1, dims=2)):
            return prefill(self, tokens, config, inputs, **options)

    monkeypatch.setattr(type(model), "_prefill", with_other_embeddings)
    texts = []
    for inputs in prompts:
        text = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
        texts.append(text[0, inputs["input_ids"].shape[1] :].tolist())
    assert texts != others
    manager = manager_for("llava")
    assert [text for inputs in prompts for text in write(manager, inputs)] == texts
    assert manager._admission.leads.work is False
    short = vision.ragged_image_prompts("llava", ((9, 6),))[0]
    assert write(manager, short) == plain_texts(model, [short])
    for inputs, end in ((prompts[0], LEAD), (short, 9)):
        text = [*inputs["input_ids"][0, :end].tolist(), 5, 6, 7]
        assert write(manager, text) == [text_alone(model, text, max_new_tokens=NEW)]
    manager._admission.leads.work = True
    manager.reset_prefix_cache()
    assert [text for inputs in prompts for text in write(manager, inputs)] != texts


@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(1)
def test_trials_in_bfloat16(name: str) -> None:
    """A trial tells rounding from a wrong mask in bfloat16, too."""
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model, prompt = copy.deepcopy(family(name)[0]).to(dtype), family(name)[1][0]
        manager = manager_of(model, "ngram", continuous_batching_config=Limits(num_blocks=200, block_size=SIZE))
        write(manager, prompt | {"pixel_values": prompt["pixel_values"].to(dtype)})
        found.append(manager._admission.leads.work)
    assert found[0] is found[1] is not None


# -------------------------------------------------------------------------------------------------- text behind images


TAIL = 50


@cache
def long_tails(name: str) -> tuple[list[Inputs], list[list[int]]]:
    """Prompts with long texts behind their images, the second one behind two, and what plain `generate` writes."""
    prompts = vision.ragged_image_prompts(name, ((5, TAIL), (LEAD, 3, TAIL)))
    return prompts, plain_texts(family(name)[0], prompts)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(1)
def test_long_texts_behind_images(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, but for what a step may read with the images."""
    prompts, texts = long_tails(name)
    manager = manager_for(name, kind)
    assert [text for inputs in prompts for text in write(manager, inputs)] == texts
    assert manager._admission.leads.end
    manager.reset_prefix_cache()
    reads = noting_reads(monkeypatch)
    assert write(manager, *prompts, *prompts) == texts * 2
    whole = {first + count for is_whole, first, count in reads if is_whole}
    one, two = map(end_of_images, prompts)
    first = lead_of(name) if manager._admission.leads.work else 0
    assert whole == {max(one, CHUNK), max(two, first + CHUNK)}
    assert max(count for is_whole, _, count in reads if not is_whole) <= CHUNK
    assert_nothing_left(manager)


@pytest.mark.parametrize("wrong", ["inside", "positions", "tokens"])
@pytest.mark.some_cases(1)
def test_wrong_ends_would_be_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut inside the image, at positions from zero behind it, and with all tokens' types."""
    prompts, texts = long_tails("qwen3_vl")
    manager = manager_for("qwen3_vl")
    assert [text for inputs in prompts for text in write(manager, inputs)] == texts
    manager.reset_prefix_cache()
    if wrong == "inside":
        monkeypatch.setattr(Request, "num_read_whole", property(lambda self: 9))
        monkeypatch.setattr(PromptInputs, "end_of_whole", lambda *_: 9)
    elif wrong == "positions":
        shift = target_module.shift_after
        monkeypatch.setattr(target_module, "shift_after", lambda *args: torch.zeros_like(shift(*args)))
    else:
        monkeypatch.setattr(preparing_inputs, "is_by_token", lambda *_: False)
    try:
        assert write(manager, *prompts) == texts
    except Exception:  # noqa: BLE001
        return
    pytest.fail("nothing was seen")


# ------------------------------------------------------------------------------------------------------ further images


@cache
def album(name: str) -> tuple[list[Inputs], list[list[int]]]:
    """
    Prompts with one image, the same with text behind, with a second image, and with another second image and a third;
    and what plain `generate` writes.
    """
    one, two, three = vision.ragged_image_prompts(name, ((20, 9), (20, 21, 5), (20, 21, 3, 4)))
    per_image = 24 if "image_grid_thw" in one else 1
    for inputs in (two, three):
        start = one["input_ids"].shape[1] - 9
        inputs["input_ids"][:, :start] = one["input_ids"][:, :start]
        inputs["pixel_values"][:per_image] = one["pixel_values"]
    three["input_ids"][:, start : start + 21] = two["input_ids"][:, start : start + 21]
    longer = {
        key: value[:per_image]
        if key == "pixel_values"
        else value[:1]
        if key == "image_grid_thw"
        else value[:, : start + 17]
        for key, value in two.items()
    }
    prompts = [one, two, longer, three]
    return prompts, plain_texts(family(name)[0], prompts)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", vision.VISION_MODELS)
@pytest.mark.some_cases(1)
def test_further_images(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind images that others have read; text behind the first is at its positions, whoever read it."""
    prompts, texts = album(name)
    manager, reads = manager_for(name, kind), noting_reads(monkeypatch)
    assert [text for inputs in prompts for text in write(manager, inputs)] == texts
    assert manager._admission.leads.more or name == "gemma3"  # whose masks in older releases know of no text before
    if not manager._admission.leads.more:
        return
    of_images = [(first, first + count) for is_whole, first, count in reads if is_whole]
    second = int((prompts[1]["input_ids"][0] == vision.IMAGE).nonzero()[:, 0].max())
    assert len(of_images) == 3, of_images  # the longer text has no new image
    assert second - 12 - SIZE <= of_images[2][0] <= second
    assert_nothing_left(manager)


@pytest.mark.parametrize("wrong", ["positions", "digest", "half"])
@pytest.mark.some_cases(1)
def test_wrong_further_images_would_be_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text behind the first at the positions of texts; keys that tell nothing of a second; a cut inside the first."""
    prompts, texts = album("qwen3_vl")
    manager = manager_for("qwen3_vl")
    if wrong == "positions":
        monkeypatch.setattr(prefixes, "_shift_of", lambda *_: None)
    elif wrong == "digest":
        monkeypatch.setattr(Content, "digest_at", lambda self, *_: (self.parts or (self,))[0].digest)
        prompts = [*prompts, prompts[1] | {"pixel_values": -3 * prompts[1]["pixel_values"]}]
        prompts[4]["pixel_values"][:24] = prompts[1]["pixel_values"][:24]
        plain = family("qwen3_vl")[0].generate(**prompts[4], do_sample=False, max_new_tokens=NEW)
        texts = [*texts, plain[0, prompts[4]["input_ids"].shape[1] :].tolist()]
        assert texts[4] != texts[1], "else the image would not matter"
    else:
        usable = PromptInputs.num_usable
        monkeypatch.setattr(PromptInputs, "num_usable", lambda self, *args: min(usable(self, *args), 24))
        monkeypatch.setattr(Content, "num_held", lambda self, length: sum(one.first < length for one in self.parts))
    try:
        found = [text for inputs in prompts for text in write(manager, inputs)]
    except Exception:  # noqa: BLE001
        return
    assert found != texts
