"""Prompts of `generate` that are read by graphs, with a stand-in for CUDA's. `test_cuda.py` runs real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device_steps import install
from support.goldens import trained_prompts, trained_target
from support.heads import tiny_head, trained_head
from support.models import FAMILIES, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from sweep.building import tiny_model as model_of
from sweep.registry import all_pairs
from transformers import DynamicCache

import hf_specdec
from hf_specdec.attention import supports_switching
from hf_specdec.compat import CACHE, NO_TREES
from hf_specdec.forwards import tree_forward
from hf_specdec.generation import prefill
from hf_specdec.generation import target as of_target
from hf_specdec.generation.static_batch import StaticBatch


WIDTHS = (4, 16)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow graphs, for prompts of tests."""
    pytest.importorskip("triton", reason="the kernels need triton")
    monkeypatch.setattr(prefill, "WIDTHS", WIDTHS)
    # Calls whose steps the host runs: the others read prompts as requests do (tests/batching/test_prompts.py).
    monkeypatch.setattr(StaticBatch, "obstacle", lambda call: "not here")
    install(monkeypatch, with_kernel=True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of prompts that are read in pieces."""
    found: list[int] = []
    original = of_target.prefill_in_chunks

    def noting(target: Any) -> Any:
        found.append(target.sequences.prompt_length)
        return original(target)

    monkeypatch.setattr(of_target, "prefill_in_chunks", noting)
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(3)
def test_families(family: str, batch_size: int, read: list[int]) -> None:
    target = tiny_model(family, dtype=torch.float32)
    draft = noisy_copy(target, 0.05)
    lengths = [1, 4, 16, 40] if batch_size == 1 else [3, 7, 20, 31]
    for length in lengths:
        inputs = prompts(batch_size, length)
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)
        ours = target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=draft, tree=IRREGULAR)
        assert ours.tolist() == plain.tolist()
    if supports_switching(target) and target.config._attn_implementation == "sdpa":
        assert read == lengths


@pytest.mark.slow
def test_a_head_sees_all_features(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts as much as behind a prompt that was read at once."""
    target, head = trained_target(), trained_head()
    found: list[Any] = []
    for in_pieces in (False, True):
        if not in_pieces:
            monkeypatch.setattr(of_target, "can_prefill_in_chunks", lambda target: False)
        for prompt in trained_prompts()["prompts"][:4]:
            ids = torch.tensor([prompt])
            text = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=20,
                assistant_model=head,
                tree=IRREGULAR,
            )
            found.append((text.tolist(), hf_specdec.last_metrics().accepted_per_step))
        monkeypatch.setattr(of_target, "can_prefill_in_chunks", prefill.can_prefill_in_chunks)
    half = len(found) // 2
    assert found[:half] == found[half:] and len(read) == half


def test_scores_and_cache(read: list[int]) -> None:
    """What else a call returns is as without pieces."""
    target = tiny_model(dtype=torch.float32)
    inputs, options = prompts(1, 21), {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options, output_scores=True)
    ours = target.generate(
        **inputs, **options, output_scores=True, assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR
    )
    assert read == [21] and ours.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores))
    for mine, theirs in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.slow
def test_which_prompts_are_read_at_once(read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded ones, those behind a cache, in chunks, of other inputs or positions, or as long as to busy the device."""
    target = tiny_model(dtype=torch.float32)
    inputs = prompts(1, 21)
    options = {"do_sample": False, "max_new_tokens": 9}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (prompts(2, 21, padding=True), {}),
        (inputs, {"prefill_chunk_size": 8}),
        ({"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach()}, {}),
        (inputs, {"output_hidden_states": True, "return_dict_in_generate": True}),
    ]
    for call, more in cases:
        plain = target.generate(**call, **options, **more)
        ours = target.generate(**call, **options, **more, assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR)
        if more.get("return_dict_in_generate"):
            plain, ours = plain.sequences, ours.sequences
        assert ours.tolist() == plain.tolist()
    draft, texts = {"assistant_model": noisy_copy(target, 0.05), "tree": IRREGULAR}, []
    for more in ({}, draft):
        cache = DynamicCache(config=target.config)
        first = target.generate(**inputs, **options, past_key_values=cache)
        texts.append(target.generate(first, **options, past_key_values=cache, **more).tolist())
        positions = torch.arange(21)[None] + 5
        texts.append(target.generate(**inputs, position_ids=positions, **options, **more).tolist())
    assert texts[:2] == texts[2:]
    monkeypatch.setattr(prefill, "busy_at", lambda num_parameters: 21)
    ours = target.generate(**inputs, **options, assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR)
    assert ours.tolist() == target.generate(**inputs, **options).tolist()
    assert read == []


@pytest.mark.parametrize("length", [17, 18, 30, 41])
def test_rotary_embeddings_that_change_with_the_length(length: int, read: list[int]) -> None:
    """Behind its boundary a prompt must be one forward: a piece before it would be embedded otherwise."""
    rope = {
        "rope_type": "longrope",
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 8.0, 16.0, 32.0],
        "rope_theta": 10000.0,
    }
    target = tiny_model("llama", dtype=torch.float32, rope_parameters=rope)
    inputs, options = prompts(1, length), {"do_sample": False, "max_new_tokens": 8}
    ours = target.generate(**inputs, **options, assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR)
    assert ours.tolist() == target.generate(**inputs, **options).tolist() and read == []


@pytest.mark.parametrize("model_type, changes", [("bert", {"is_decoder": False}), ("moshi", {"sliding_window": 16})])
@pytest.mark.some_cases(1)
def test_prompts_that_models_read_their_own_way(model_type: str, changes: dict[str, Any], read: list[int]) -> None:
    """In both directions, or without the window that forwards behind a cache have."""
    if model_type in NO_TREES:
        pytest.skip("refused")
    pair = next(pair for pair in all_pairs() if pair.model_type == model_type)
    target = model_of(pair, sharpness=8.0, dtype=torch.float32, **changes)
    for length in (5, 17, 30):
        inputs, options = prompts(1, length), {"do_sample": False, "max_new_tokens": 8}
        ours = target.generate(
            **inputs, **options, assistant_model=model_of(pair, dtype=torch.float32), tree=IRREGULAR
        )
        assert ours.tolist() == target.generate(**inputs, **options).tolist()
    assert read == ([5] if model_type == "moshi" else [])


def test_a_target_that_passes_its_cache_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 reads a prompt behind the boundary of its rotary embedding without any."""
    monkeypatch.setattr(prefill, "busy_at", lambda num_parameters: 1)
    target = tiny_model("llama", dtype=torch.float32)
    prepare = target.prepare_inputs_for_generation

    def without_cache(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return prepare(*args, **kwargs) | {CACHE: None}

    target.prepare_inputs_for_generation = without_cache
    with pytest.raises(
        ValueError, match="`assistant_model`: the target LlamaForCausalLM has read the prompt past the"
    ):
        target.generate(**prompts(1, 21), max_new_tokens=4, assistant_model=noisy_copy(target), tree=IRREGULAR)


def test_a_wrong_piece_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend to those behind them change texts."""

    def all_see_all(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1, length, length, dtype=torch.bool), torch.arange(length)[None]

    monkeypatch.setattr("hf_specdec.forwards.target.causal_chain", all_see_all)
    target = tiny_model(dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": 20}
    found = []
    for length in (19, 20, 21, 22):
        inputs = prompts(1, length, seed=length)
        ours = target.generate(**inputs, **options, assistant_model=noisy_copy(target, 0.05), tree=IRREGULAR)
        found.append(ours.tolist() == target.generate(**inputs, **options).tolist())
    assert not all(found)


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_drafts_start_without_asking_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no prompt is padded: else they would wait there until the target has read it."""
    target = tiny_model()
    draft = noisy_copy(target) if kind == "draft" else tiny_head(target)
    asked, shift_of_all = [], tree_forward._shift_of_all

    def noted(shift: torch.Tensor) -> int | None:
        asked.append(shift)
        return shift_of_all(shift)

    monkeypatch.setattr(tree_forward, "_shift_of_all", noted)
    for is_padded in (False, True):
        asked.clear()
        target.generate(**prompts(2, 9, padding=is_padded), assistant_model=draft, tree=IRREGULAR, max_new_tokens=8)
        assert (len(asked) > 1) == is_padded  # the target asks before there is anything to wait for
