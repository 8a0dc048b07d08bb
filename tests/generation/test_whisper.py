"""Whisper, whose decoder reads what its encoder has made of the sound."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, fit
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from support.sampling import accept_first_children
from support.whisper import drafts_of, processor_parts, sound, tiny_whisper
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
    pipeline,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.models.whisper import generation_whisper

import hf_specdec
from hf_specdec.models import encoders


TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
KINDS = ["ngram", "own encoder", "shared encoder", "decoder"]
GREEDY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
ONE_BEAM = GREEDY | {"num_beams": 1}
"""Pipelines of speech ask for five beams by themselves."""


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    return tiny_whisper()


@pytest.fixture(scope="module")
def drafts(whisper: WhisperForConditionalGeneration) -> dict[str, Any]:
    return drafts_of(whisper) | {"ngram": hf_specdec.NgramDraft()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(2)
def test_greedy_texts(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str) -> None:
    for rows in (1, 3):
        expected = whisper.generate(sound(rows), **GREEDY)
        assert torch.equal(whisper.generate(sound(rows), **GREEDY, assistant_model=drafts[kind], tree=TREE), expected)
        metrics = hf_specdec.last_metrics()
        assert metrics.num_accepted_tokens > 0
        assert kind == "ngram" or metrics.mean_acceptance_length > 2  # drafts that hear nothing get 1.3


@pytest.mark.parametrize("frames", [20, 50], ids=["short", "long"])
@pytest.mark.parametrize("kind", ["ngram", "own encoder", "decoder"])
@pytest.mark.some_cases(2)
def test_timestamps(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str, frames: int) -> None:
    """Their processor reads the whole text. Sound of over 20 frames is decoded by segments."""
    options = {"return_timestamps": True, "generation_config": timestamped(whisper), "max_new_tokens": 30}
    options |= {"input_features": sound(2, frames, seed=2), "attention_mask": torch.ones(2, frames, dtype=torch.long)}
    expected = whisper.generate(**options)
    assert torch.equal(whisper.generate(**options, assistant_model=drafts[kind], tree=TREE), expected)


def timestamped(whisper: WhisperForConditionalGeneration) -> GenerationConfig:
    config = copy.deepcopy(whisper.generation_config)
    config.no_timestamps_token_id, config.is_multilingual, config.eos_token_id = 39, False, 2
    return config


@pytest.mark.parametrize("kind", ["ngram", "own encoder"])
def test_segments_after_the_text_before(
    whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str
) -> None:
    """Prompts of segments differ in length, and begin with padding."""
    config = timestamped(whisper)
    config.prev_sot_token_id = 4
    options = {"return_timestamps": True, "generation_config": config, "max_new_tokens": 12}
    options |= {"input_features": sound(2, 70, seed=2), "attention_mask": torch.ones(2, 70, dtype=torch.long)}
    options["attention_mask"][1, 45:] = 0
    options |= {"condition_on_prev_tokens": True, "temperature": 0.0}
    expected = whisper.generate(**options)
    assert torch.equal(whisper.generate(**options, assistant_model=drafts[kind], tree=TREE), expected)


def test_the_cache_that_is_returned(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any]) -> None:
    def tensors(**options: Any) -> list[torch.Tensor]:
        options |= {"force_unique_generate_call": True, "return_dict_in_generate": True}
        output = whisper.generate(sound(3), **GREEDY, **options)
        cache = output.past_key_values
        assert isinstance(cache, EncoderDecoderCache)
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    for found, expected in zip(tensors(assistant_model=drafts["decoder"], tree=TREE), tensors(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_returned_texts_of_one_sound(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any]) -> None:
    """Its encoder runs for each sound; three rows of every one follow it."""
    inputs = {"input_features": sound(2), "decoder_input_ids": torch.tensor([[3], [3]])}
    expected = GenerationMixin.generate(whisper, **inputs, **GREEDY)
    options = {"do_sample": True, "top_k": 1, "max_new_tokens": 30, "num_return_sequences": 3}
    found = GenerationMixin.generate(whisper, **inputs, **options, assistant_model=drafts["own encoder"], tree=TREE)
    assert torch.equal(found, expected.repeat_interleave(3, dim=0))


@pytest.mark.parametrize("kind", ["ngram", "own encoder"])
def test_tokens_that_texts_may_not_begin_with(
    whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str
) -> None:
    """Whisper's own `generate` drops them if it sees an assistant."""
    config = timestamped(whisper)
    free = whisper.generate(sound(2), generation_config=config, max_new_tokens=4)
    config.begin_suppress_tokens = free[:, 0].tolist()
    expected = whisper.generate(sound(2), generation_config=config, max_new_tokens=4)
    assert not torch.equal(expected, free)
    options = {"assistant_model": drafts[kind], "tree": TREE, "max_new_tokens": 4}
    assert torch.equal(whisper.generate(sound(2), generation_config=config, **options), expected)


@pytest.mark.parametrize("kind", ["ngram", "own encoder"])
@pytest.mark.some_cases(1)
def test_temperature_fallback(
    whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that thresholds refuse are decoded anew: greedily as without a draft, and hotter ones to the end."""
    temperatures: list[float] = []
    judge = type(whisper)._need_fallback

    def noted(self: Any, *args: Any) -> Any:
        temperatures.append(args[-1])
        return judge(self, *args)

    monkeypatch.setattr(type(whisper), "_need_fallback", noted)
    options = {"input_features": sound(2, 20, seed=2), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    options |= {"return_timestamps": True, "generation_config": timestamped(whisper), "max_new_tokens": 12}
    options |= {"logprob_threshold": 0.0, "compression_ratio_threshold": 1.2}  # which refuse every text

    def decoded(*given: float, **more: Any) -> Any:
        temperatures.clear()
        found = whisper.generate(**options, temperature=given, **more)
        assert temperatures == [one for one in given for _ in range(2)]
        return found

    for given in ((0.0, 0.0), (0.0, 0.6, 0.0)):
        found = decoded(*given, assistant_model=drafts[kind], tree=TREE)
        assert torch.equal(found, decoded(*given))
    assert decoded(0.0, 0.2, 1.0, assistant_model=drafts[kind], tree=TREE).shape[0] == 2


# ------------------------------------------------------------------------------------------------- timestamps of words


def aligned(whisper: WhisperForConditionalGeneration) -> GenerationConfig:
    config = timestamped(whisper)
    config.alignment_heads, config.median_filter_width = [[0, 1], [1, 2]], 3
    return config


@pytest.fixture
def eager(whisper: WhisperForConditionalGeneration) -> Iterator[None]:
    """Whisper's `generate` sets the attention to eager where it reads timestamps off it."""
    before = whisper.config._attn_implementation
    yield
    whisper.config._attn_implementation = before


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("frames", [20, 50], ids=["short", "long"])
@pytest.mark.parametrize("kind", ["ngram", "own encoder", "decoder"])
@pytest.mark.some_cases(2)
def test_timestamps_of_tokens(
    whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str, frames: int
) -> None:
    """They are read off all columns of a batch: rows that end early have the attention of padding."""
    config = aligned(whisper)
    config.eos_token_id = 31
    options = {"return_timestamps": True, "return_token_timestamps": True, "max_new_tokens": 12}
    options |= {"generation_config": config, "return_segments": True}
    options |= {"input_features": sound(3, frames, seed=2), "attention_mask": torch.ones(3, frames, dtype=torch.long)}
    expected = whisper.generate(**options)
    found = whisper.generate(**options, assistant_model=drafts[kind], tree=TREE)
    assert torch.equal(found["sequences"], expected["sequences"])
    assert (expected["sequences"] == 0).any()
    stamps = [
        [segment["token_timestamps"] for row in output["segments"] for segment in row] for output in (found, expected)
    ]
    assert max(float(one.max()) for one in stamps[1]) > 0.1
    assert all(torch.equal(*pair) for pair in zip(*stamps, strict=True))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rows", [1, 3])
def test_recorded_outputs(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], rows: int) -> None:
    whisper.config._attn_implementation = "eager"
    options = {"force_unique_generate_call": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    options |= {"output_attentions": True, "output_hidden_states": True, "output_scores": True}
    expected = whisper.generate(sound(rows), **options)
    found = whisper.generate(sound(rows), **options, assistant_model=drafts["own encoder"], tree=TREE)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert {*found} == {*expected}
    for name in {*expected} - {"past_key_values", "cache"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(2)
def test_the_pipeline(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str) -> None:
    """Of sound in one piece, and in chunks that overlap, with timestamps of segments and of words."""
    raw = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy()
    parts: dict[str, Any] = {"model": whisper} | processor_parts()
    plain, drafting = (
        pipeline("automatic-speech-recognition", **parts, **more) for more in ({}, {"assistant_model": drafts[kind]})
    )
    chunks: dict[str, Any] = {"chunk_length_s": 1.0, "batch_size": 3}
    for audio, more in ((raw[:16_000], {}), (raw, chunks), (raw, chunks | {"return_timestamps": "word"})):
        asked = (
            {"generation_config": aligned(whisper), "max_new_tokens": 12, "num_beams": 1}
            if len(more) > 2
            else ONE_BEAM
        )
        expected = plain(audio.copy(), generate_kwargs=asked, **more)
        assert len(expected["text"]) > 5
        assert drafting(audio.copy(), generate_kwargs=asked | {"tree": TREE}, **more) == expected
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
    with pytest.raises(ValueError, match="`num_beams=5`.* pipeline"):
        drafting(raw[:16_000], generate_kwargs=GREEDY | {"tree": TREE})


@pytest.mark.parametrize("kind, seconds", [*((kind, 1.0) for kind in KINDS), ("own encoder", 1.4)])
@pytest.mark.some_cases(2)
def test_pipelines_with_timestamps(
    whisper: WhisperForConditionalGeneration, drafts: dict[str, Any], kind: str, seconds: float
) -> None:
    """Of segments, one sound at a time and three in a batch."""
    sounds = torch.randn(3, int(16_000 * seconds), generator=torch.Generator().manual_seed(1)).numpy()
    parts: dict[str, Any] = {"model": whisper} | processor_parts()
    asked = {"generation_config": timestamped(whisper), "max_new_tokens": 8, "num_beams": 1}
    plain = pipeline("automatic-speech-recognition", **parts)
    drafting = pipeline("automatic-speech-recognition", **parts, assistant_model=drafts[kind])
    for batch_size in (1, 3):
        found, expected = (
            pipe(
                [one.copy() for one in sounds],
                generate_kwargs=asked | more,
                batch_size=batch_size,
                return_timestamps=True,
            )
            for pipe, more in ((drafting, {"tree": TREE}), (plain, {}))
        )
        assert found == expected
        assert any(chunk["timestamp"][0] is not None for one in expected for chunk in one["chunks"])


# -------------------------------------------------------------------------------------------- attempts that are judged


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """Of every attempt at a segment: temperature, whether another follows, whether it is silence, and by what."""
    mixin: Any = generation_whisper.WhisperGenerationMixin
    judge, found = mixin._need_fallback, []

    def noted(self: Any, text: Any, outputs: Any, row: int, processors: Any, *others: Any) -> Any:
        verdict, heat = judge(self, text, outputs, row, processors, *others), others[-1]
        silence = next(one for one in processors if isinstance(one, WhisperNoSpeechDetection)).no_speech_prob[row]
        likely = self._retrieve_avg_logprobs(outputs[row]["scores"], text, heat)
        found.append((heat, *verdict, float(silence), float(likely) if heat == 0 else 0.0))
        return verdict

    monkeypatch.setattr(mixin, "_need_fallback", noted)
    return found


@pytest.mark.parametrize("kind", ["ngram", "decoder"])
@pytest.mark.parametrize("prompt", ["one token", "several tokens"])
@pytest.mark.some_cases(2)
def test_attempts(
    whisper: WhisperForConditionalGeneration,
    drafts: dict[str, Any],
    verdicts: list[tuple[float, ...]],
    prompt: str,
    kind: str,
) -> None:
    """One row is silent, the others are decoded again at a temperature, and then without one."""
    config, sounds = timestamped(whisper), sound(3, seed=2).roll(1, dims=0)
    if prompt == "several tokens":
        config.is_multilingual, config.lang_to_id, config.task_to_id = True, {"<|en|>": 5}, {"transcribe": 6}
        config.language, config.task = "en", "transcribe"
    options = {"return_timestamps": True, "generation_config": config, "max_new_tokens": 10}
    options |= {"temperature": (0.0, 0.4, 0.0), "logprob_threshold": 0.0, "no_speech_threshold": 0.1}
    expected = whisper.generate(sounds, **options)
    plain = list(verdicts)
    verdicts.clear()
    torch.manual_seed(0)
    found = whisper.generate(sounds, **options, assistant_model=drafts[kind], tree=TREE)
    assert torch.equal(found, expected)
    assert [one[:3] for one in verdicts] == [one[:3] for one in plain]
    assert torch.tensor(verdicts).allclose(torch.tensor(plain), atol=1e-3)
    assert [one[0] for one in plain] == [0.0, 0.0, 0.0, 0.4, 0.4, 0.0, 0.0] and sum(one[2] for one in plain) == 1


# ------------------------------------------------------------------------------------------------------------ sampling

VOCAB, LENGTH, ROWS = 8, 3, 1_500


def enumerated(model: WhisperForConditionalGeneration, prompt: tuple[int, ...] = (3,)) -> torch.Tensor:
    """The distribution of three tokens, `[8, 8, 8]`, by a forward for each prefix."""
    prefixes, joint = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    with torch.no_grad():
        states = model.get_encoder()(sound(1)).last_hidden_state
        for _ in range(LENGTH):
            rows = len(prefixes)
            logits = model(encoder_outputs=(states.expand(rows, -1, -1),), decoder_input_ids=prefixes).logits[:, -1]
            joint = (joint[:, None] * (logits.double() / 3).softmax(dim=-1)).flatten()
            tokens = torch.arange(VOCAB).repeat(rows)[:, None]
            prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, dim=0), tokens], dim=1)
    return joint.view(VOCAB, VOCAB, VOCAB)


@pytest.fixture(scope="module")
def small() -> WhisperForConditionalGeneration:
    return tiny_whisper(vocab_size=VOCAB, decoder_layers=1)


def drawn(model: WhisperForConditionalGeneration, assistant: Any) -> torch.Tensor:
    torch.manual_seed(0)
    inputs = {"input_features": sound(1).expand(ROWS, -1, -1), "decoder_input_ids": torch.full((ROWS, 1), 3)}
    options = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": LENGTH + 2}
    ids = GenerationMixin.generate(model, **inputs, **options, assistant_model=assistant, tree="[(0,),(1,),(0,0)]")
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    return ids[:, 1 : 1 + LENGTH]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(2)
def test_sampled_texts(small: WhisperForConditionalGeneration, kind: str) -> None:
    draft = hf_specdec.NgramDraft(min_ngram=1) if kind == "ngram" else drafts_of(small, noise=1.0)[kind]
    found = fit(drawn(small, draft), enumerated(small))
    assert found.p_value > SIGNIFICANCE, found
    assert found.detectable < 0.2


def test_an_attempt_at_a_temperature(small: WhisperForConditionalGeneration) -> None:
    """The last attempt is kept, though it is as unlikely as those before it."""
    config = copy.deepcopy(small.generation_config)
    config.no_timestamps_token_id, config.is_multilingual, config.eos_token_id = 7, False, None
    torch.manual_seed(0)
    options = {"generation_config": config, "temperature": (0.0, 3.0), "logprob_threshold": 0.0, "top_k": 0}
    options |= {"assistant_model": drafts_of(small, noise=1.0)["decoder"], "tree": "[(0,),(1,),(0,0)]"}
    ids = small.generate(sound(1).expand(ROWS // 3, -1, -1), max_new_tokens=LENGTH + 2, **options)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert fit(ids[:, :LENGTH], enumerated(small, (3, 7))).p_value > SIGNIFICANCE


@pytest.mark.parametrize("kind", ["ngram", "decoder"])
def test_a_wrong_verifier_is_found(
    small: WhisperForConditionalGeneration, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_first_children(monkeypatch)
    draft = hf_specdec.NgramDraft(min_ngram=1) if kind == "ngram" else drafts_of(small, noise=1.0)[kind]
    assert fit(drawn(small, draft), enumerated(small)).p_value < 1e-6


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused(whisper: WhisperForConditionalGeneration, drafts: dict[str, Any]) -> None:
    def refusal(match: str, **options: Any) -> Any:
        given = {"input_features": sound(1), "tree": TREE} | GREEDY | options
        with pytest.raises(ValueError, match=match):
            whisper.generate(**given)

    refusal("`num_mel_bins`=6", assistant_model=tiny_whisper(num_mel_bins=6))
    narrow = WhisperForCausalLM(tiny_whisper(d_model=16).config)
    refusal("`d_model`=16", assistant_model=narrow)
    with pytest.raises(ValueError, match="is an encoder-decoder model"):
        whisper.generate_batch([[3]], assistant_model=drafts["decoder"], tree=TREE)
    states = whisper.get_encoder()(sound(1))
    for kind in ("shared encoder", "decoder"):
        GenerationMixin.generate(whisper, encoder_outputs=states, **GREEDY, assistant_model=drafts[kind], tree=TREE)
    with pytest.raises(ValueError, match="`encoder_outputs` or .* with `assistant_model`"):
        options = {"assistant_model": drafts["own encoder"], "tree": TREE}
        GenerationMixin.generate(whisper, encoder_outputs=states, **GREEDY, **options)


def test_drafts_by_name(whisper: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    """A checkpoint of another size is loaded with its encoder; of one of the same size the decoder is enough."""
    expected = whisper.generate(sound(1), **GREEDY)
    tiny_whisper(d_model=16).save_pretrained(tmp_path / "smaller")
    noisy_copy(whisper, 0.1).save_pretrained(tmp_path / "distilled")
    for name in ("ngram", tmp_path / "smaller", tmp_path / "distilled"):
        assert torch.equal(whisper.generate(sound(1), **GREEDY, assistant_model=name, tree=TREE), expected)
    assert hf_specdec.last_metrics().mean_acceptance_length > 2


def test_heads_are_refused(whisper: WhisperForConditionalGeneration) -> None:
    with pytest.raises(ValueError, match="for which EagleDrafter cannot draft"):
        whisper.generate(sound(1), **GREEDY, assistant_model=tiny_head(tiny_model("llama", vocab_size=60)), tree=TREE)


def test_a_draft_that_reads_no_encoder(whisper: WhisperForConditionalGeneration) -> None:
    draft = tiny_model("llama", vocab_size=60)
    expected = whisper.generate(sound(2), **GREEDY)
    assert torch.equal(whisper.generate(sound(2), **GREEDY, assistant_model=draft, tree=TREE), expected)
    assert encoders.encoder_arguments(draft, None) == {}
