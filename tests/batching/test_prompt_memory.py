"""Memory for images: an estimate, left free by the K/V blocks; prompts that need more are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import vision
from support.batches import assert_nothing_left, limits, ragged_prompts, text_alone
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from support.peaks import LiveBytes
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from hf_specdec import NgramDraft
from hf_specdec.batching import Limits
from hf_specdec.batching import limits as limits_module
from hf_specdec.cache.sizes import bytes_per_token
from hf_specdec.engine import prompt_memory
from hf_specdec.engine.prompt_memory import PromptMemory, lacks_memory
from hf_specdec.models.prompt_memory import bytes_of_largest, bytes_of_prompt, has_towers
from hf_specdec.serving.defaults import MOST_IMAGE_PIXELS


IMAGE = 99
TEXT = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llava(attention: str) -> tuple[PreTrainedModel, dict[str, Any], int]:
    """Four images of one size, whose features are those of an inner layer."""
    vision = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=112, patch_size=14, projection_dim=16),
        text_config=LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-2,
    )
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation=attention)
    return model, {"pixel_values": torch.randn(4, 3, 112, 112)}, 4 * 64


def qwen3_vl(attention: str) -> tuple[PreTrainedModel, dict[str, Any], int]:
    """One image of a size of its own; features of several layers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {"depth": 4, "hidden_size": 128, "intermediate_size": 480, "num_heads": 4, "out_hidden_size": 128}
    vision |= {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 576}
    config = Qwen3VLConfig(
        vision_config=vision | {"deepstack_visual_indexes": [0, 1, 2]},
        text_config=TEXT | {"head_dim": 32, "rope_parameters": rope},
        image_token_id=IMAGE,
        video_token_id=96,
        vision_start_token_id=98,
        vision_end_token_id=97,
    )
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=attention)
    pixels = torch.randn(24 * 20, 3 * 2 * 16 * 16)
    return model, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 24, 20]])}, 120


def qwen2_audio(attention: str) -> tuple[PreTrainedModel, dict[str, Any], int]:
    audio = {"d_model": 128, "encoder_ffn_dim": 512, "encoder_layers": 3, "encoder_attention_heads": 4}
    config = Qwen2AudioConfig(
        audio_config=audio | {"num_mel_bins": 128, "max_source_positions": 200},
        text_config=Qwen2Config(**TEXT),
        audio_token_id=IMAGE,
    )
    model = Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation=attention)
    sound = {"input_features": torch.randn(1, 128, 400), "feature_attention_mask": torch.ones(1, 400).long()}
    return model, sound, 100


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llava, qwen3_vl, qwen2_audio])
def test_estimates_are_above_what_is_taken(make: Any, attention: str) -> None:
    """By little more than as much again: memory that is left for nothing holds no K/V."""
    torch.manual_seed(0)
    model, values, num_image_tokens = make(attention)
    tokens = torch.tensor([[5, 98] + [IMAGE] * num_image_tokens + [97, 6]])
    if make is qwen3_vl:
        values["mm_token_type_ids"] = (tokens == IMAGE).int()
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **values}
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    with torch.no_grad(), LiveBytes(known) as count:
        model.eval()(**inputs, logits_to_keep=1)
    taken = count.peak + sum(value.nbytes for value in values.values())
    per_token = sum(bytes_per_token(model).values())
    estimate = bytes_of_prompt(model, tokens.shape[1], values, per_token) - (1 << 20)
    assert taken <= estimate <= 2.2 * taken


def test_largest_images() -> None:
    """Of models that read images of any size these are as large as is asked, of others as large as they are."""
    of_any, values, num_image_tokens = qwen3_vl("sdpa")
    pixels = values["pixel_values"].numel() // 6  # of three colours, in two equal frames
    of_image = bytes_of_largest(of_any, pixels, 0)
    assert of_image == bytes_of_prompt(of_any, num_image_tokens, {"pixel_values": values["pixel_values"]}, 0)
    assert of_image < bytes_of_largest(of_any, 2 * pixels, 0)
    of_one, _, _ = llava("sdpa")
    assert bytes_of_largest(of_one, 1, 0) == bytes_of_largest(of_one, 1 << 30, 0) > 1 << 20
    assert bytes_of_largest(of_one, 0, 0) == 0
    assert not has_towers(tiny_model()) and bytes_of_largest(tiny_model(), 1 << 30, 0) == 0
    assert Limits().image_pixels == MOST_IMAGE_PIXELS


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """What is free: little more than a prompt with an image needs."""
    free = 6 << 20
    monkeypatch.setattr(limits_module, "free_memory", lambda device: free)
    return free


def test_blocks_leave_memory_for_the_prompts(memory: int) -> None:
    """Those of `generate_batch`; all of it to blocks, if no prompt has an image."""
    model = vision.llava()
    image, text = vision.ragged_image_prompts("llava", ((5, 2),))[0], [5, 6, 7]
    given = Limits(block_size=4, memory_share=0.5, max_requests=2)
    options = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": given}
    taken = []
    for prompts in ([text], [text, image]):
        outputs = model.generate_batch(prompts, max_new_tokens=3, persistent_manager=True, **options)
        assert [output.error for output in outputs.values()] == [None] * len(prompts)
        manager = model.init_continuous_batching(**options)  # the kept one
        taken.append(manager.engine.pool.num_blocks * 4 * sum(bytes_per_token(model).values()))
        model.destroy_cached_continuous_batching_manager()
    needed = PromptMemory(model).needed(image["input_ids"].shape[1], {"pixel_values": image["pixel_values"]})
    assert needed > 1 << 20
    assert taken[0] - taken[1] == pytest.approx(needed / 2, rel=0.02)


def test_blocks_leave_memory_for_the_largest_image(memory: int) -> None:
    """At most half of what is free."""
    model = vision.qwen3_vl()
    per_token, blocks = sum(bytes_per_token(model).values()), []
    for pixels in (0, 64, 1 << 24):
        given = Limits(block_size=4, memory_share=1.0, max_requests=2, image_pixels=pixels)
        manager = model.init_continuous_batching(assistant_model=NgramDraft(), continuous_batching_config=given)
        blocks.append(manager.engine.pool.num_blocks)
    assert blocks[0] * 4 * per_token == pytest.approx(memory, rel=0.02)
    of_image = bytes_of_largest(model, 64, per_token)
    assert (blocks[0] - blocks[1]) * 4 * per_token == pytest.approx(of_image, rel=0.02)
    assert blocks[2] == pytest.approx(blocks[0] / 2, rel=0.02)
    with pytest.raises(ValueError, match="`image_pixels` must be an integer of 0 or more, but is -1"):
        Limits(image_pixels=-1)


def test_a_kept_manager_without_room_is_made_anew(memory: int) -> None:
    model, prompts = vision.llava(), vision.ragged_image_prompts("llava", ((5, 2),))
    given = Limits(block_size=4, memory_share=1.0, max_requests=2)
    options = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": given}
    options |= {"max_new_tokens": 4, "do_sample": False, "persistent_manager": True}
    model.generate_batch([[5, 6, 7]], **options)
    output = next(iter(model.generate_batch(prompts, **options).values()))
    assert output.generated_tokens == model.generate(**prompts[0], max_new_tokens=4)[0, -4:].tolist()
    model.destroy_cached_continuous_batching_manager()


def test_images_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any forward, and no other request with them."""
    model = vision.llava()
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 2 << 20)
    large, small = vision.ragged_image_prompts("llava", ((5, 2), (5, 2)))
    large = large | {"pixel_values": large["pixel_values"].repeat(500, 1, 1, 1)}
    options = {"assistant_model": NgramDraft(), "tree": IRREGULAR, "continuous_batching_config": limits()}
    words = r"`pixel_values`: to read this prompt the model needs about .* GiB, but .* Send smaller or fewer images"
    with pytest.raises(ValueError, match=words):
        model.generate_batch([small, large], max_new_tokens=4, **options)
    with model.continuous_batching_context_manager(**options) as manager:
        with pytest.raises(ValueError, match=words):
            manager.add_request(large, max_new_tokens=4)
        assert manager.get_result(manager.add_request(small, max_new_tokens=4)).error is None
        assert_nothing_left(manager)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, error",
    [
        ("draft", torch.OutOfMemoryError("no room")),
        ("ngram", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        ("head", torch.OutOfMemoryError("no room")),
    ],
)
def test_a_tower_without_memory(kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three requests fails, by name, and that is not its fault; the others go on, and nothing leaks."""
    model = vision.gemma3()
    first, bad, second = vision.ragged_image_prompts("gemma3", ((5, 2), (4, 3), (3, 6)))
    texts = [model.generate(**one, do_sample=False, max_new_tokens=12)[0, -12:].tolist() for one in (first, second)]
    assistant = {"draft": lambda: noisy_copy(model), "ngram": NgramDraft, "head": lambda: tiny_head(model)}[kind]()
    tower, failures = model.model.vision_tower, [error]
    read = type(tower).forward

    def lacking(self: Any, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if failures and pixel_values.double().equal(bad["pixel_values"].double()):
            raise failures.pop()
        return read(self, pixel_values, *args, **kwargs)

    monkeypatch.setattr(type(tower), "forward", lacking)
    with model.continuous_batching_context_manager(
        assistant_model=assistant, tree=IRREGULAR, continuous_batching_config=limits()
    ) as manager:
        names = manager.add_requests([first, bad, second, [5, 6, 7]], max_new_tokens=12, do_sample=False)
        found = [manager.get_result(name) for name in names]
        later = manager.get_result(manager.add_request(bad, max_new_tokens=12, do_sample=False))
    failed = found.pop(1)
    assert failed.error.startswith(f"{type(error).__name__}: memory ran out while this prompt was read, which takes")
    assert "Send smaller or fewer images" in failed.error and str(error) in failed.error
    assert failed.generated_tokens == [] and not failed.fails_by_its_options
    assert [one.generated_tokens for one in found[:2]] == texts
    assert found[2].generated_tokens == text_alone(model, [5, 6, 7], max_new_tokens=12)
    assert later.error is None and len(later.generated_tokens) == 12
    assert_nothing_left(manager)


def test_errors_of_memory() -> None:
    assert all(
        map(lacks_memory, (MemoryError(), torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")))
    )
    assert not lacks_memory(RuntimeError("shape mismatch")) and not lacks_memory(ValueError("DefaultCPUAllocator: "))


def test_estimates_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the most that a prompt of the model has taken; later ones that take less change nothing."""
    model, values = vision.llava(), {"pixel_values": torch.zeros(1, 3, 8, 8)}
    monkeypatch.setattr(prompt_memory, "execution_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(prompt_memory, "_make_workspaces", lambda device, dtype: None)
    before = PromptMemory(model).needed(9, values)
    for most, factor in ((1000 + 3 * before, 3), (1000 + 2 * before, 3)):
        peaks = iter([1000, most])
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peaks=peaks: next(peaks))
        with PromptMemory(model).measuring(9, values):
            pass
        assert PromptMemory(model).needed(9, values) == pytest.approx(factor * before, rel=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llava, qwen3_vl, qwen2_audio])
def test_estimates_on_a_gpu(make: Any, attention: str) -> None:
    """What the allocator has seen, in a manager that reads the prompt: not above the estimate by more than a half."""
    torch.manual_seed(0)
    model, values, num_image_tokens = make(attention)
    model = model.cuda().eval()
    tokens = [5, 98, *[IMAGE] * num_image_tokens, 97, 6]
    if make is qwen3_vl:
        values["mm_token_type_ids"] = (torch.tensor([tokens]) == IMAGE).int()
    text = ragged_prompts((9,))[0]
    with model.continuous_batching_context_manager(
        assistant_model=NgramDraft(), tree=IRREGULAR, continuous_batching_config=limits(block_size=32)
    ) as manager:
        manager.get_result(manager.add_request(text, max_new_tokens=4))
        torch.cuda.reset_peak_memory_stats()
        result = manager.get_result(manager.add_request(tokens, model_inputs=values, max_new_tokens=4))
        assert result.error is None
    factor = prompt_memory._measured[model]
    print(f"{make.__name__} {attention}: {factor:.2f} bytes for each estimated byte")
    assert factor <= 1.5
