"""The target writes: what it writes is what `generate` writes, whatever happens in the other rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.chat import chat_tokenizer
from support.goldens import trained_prompts, trained_target
from support.graphs import install_stand_in
from support.hybrids import hybrid
from support.models import tiny_model

from hf_specdec.training.data import Text
from hf_specdec.training.scripts import ScriptPart, Template
from hf_specdec.training.self_generate import Sampling, Writer
from hf_specdec.training.written_texts import read_written, write_texts, written_jobs


GREEDY = Sampling(greedy_share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_greedy_texts_are_those_of_generate(batch_size: int) -> None:
    """Rows begin anew in place and the cache is cut: neither may show in any text."""
    target, prompts = trained_target(), trained_prompts()["prompts"][:10]
    jobs = [(index, [ScriptPart(tuple(prompt), "text", frozenset({2}))]) for index, prompt in enumerate(prompts)]
    texts = {text.job: text for text in Writer(target, 60, batch_size, sampling=GREEDY).write(jobs)}
    assert sorted(texts) == list(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = target.generate(ids, max_length=60, do_sample=False, eos_token_id=2)[0].tolist()
        assert texts[index].input_ids == expected
        assert texts[index].spans == [(len(prompt), len(expected))]


@pytest.mark.slow
@pytest.mark.parametrize("with_kernel", [True, False], ids=["kernel", "masks"])
def test_forwards_are_captured(with_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = install_stand_in(monkeypatch, with_kernel)
    target, prompts = trained_target(), trained_prompts()["prompts"][:5]
    jobs = [(index, [ScriptPart(tuple(prompt), "text", frozenset({2}))]) for index, prompt in enumerate(prompts)]
    for text in Writer(target, 80, 3, sampling=GREEDY).write(jobs):
        ids = torch.tensor([prompts[text.job]])
        assert text.input_ids == target.generate(ids, max_length=80, do_sample=False, eos_token_id=2)[0].tolist()
    assert captured.captures == 1 and captured.replays > 50
    assert bool(captured.attended) == with_kernel


def test_the_target_attends_as_before_afterwards() -> None:
    target = tiny_model(dtype=torch.float32)
    job = [(0, [ScriptPart((3, 4, 5), "text")])]
    for texts in (list, next):  # to the end, and abandoned
        texts(Writer(target, 8, 2, sampling=GREEDY).write(iter(job)))
        assert target.config._attn_implementation == "sdpa"


def test_targets_that_cannot_write_are_refused() -> None:
    with pytest.raises(ValueError, match="recurrent or convolutional layers.*generate_batch.*`data`"):
        Writer(hybrid("lfm2"), 8, 2)
    with pytest.raises(ValueError, match="BloomForCausalLM cannot write texts here: .*`data`"):
        Writer(tiny_model("bloom"), 8, 2)


def test_sliding_windows() -> None:
    target = tiny_model("gemma2", dtype=torch.float32)
    prompts = [tuple(range(3, 3 + length)) for length in (4, 9, 17, 5, 12)]
    jobs = [(index, [ScriptPart(prompt, "text")]) for index, prompt in enumerate(prompts)]
    for text in Writer(target, 30, 2, sampling=GREEDY).write(jobs):
        ids = torch.tensor([prompts[text.job]])
        assert text.input_ids == target.generate(ids, max_length=30, do_sample=False)[0].tolist()


@pytest.mark.slow
def test_temperatures_are_of_rows_and_drawn_tokens_follow_the_target() -> None:
    """The first token after one prompt, 3,000 times at temperature 1: total variation below 0.06 (chance: 0.03)."""
    target, prompt = trained_target(), trained_prompts()["prompts"][0][:9]
    sampling = Sampling(greedy_share=0.0, cool_share=0.0, low=1.0, high=1.0, min_p=1e-9)
    writer = Writer(target, len(prompt) + 1, 500, sampling=sampling)
    jobs = ((index, [ScriptPart(tuple(prompt), "text")]) for index in range(3000))
    tokens = torch.tensor([text.input_ids[-1] for text in writer.write(jobs)])
    with torch.no_grad():
        expected = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counted = torch.bincount(tokens, minlength=512) / 3000
    assert (counted - expected).abs().sum() / 2 < 0.06


def test_min_p_leaves_out_unlikely_tokens() -> None:
    target, prompt = trained_target(), trained_prompts()["prompts"][0][:9]
    sampling = Sampling(greedy_share=0.0, cool_share=0.0, low=1.0, high=1.0, min_p=0.5)
    jobs = ((index, [ScriptPart(tuple(prompt), "text")]) for index in range(200))
    drawn = {text.input_ids[-1] for text in Writer(target, len(prompt) + 1, 100, sampling=sampling).write(jobs)}
    with torch.no_grad():
        p = trained_target()(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert drawn <= set((p >= 0.5 * p.max()).nonzero().flatten().tolist())


@pytest.mark.slow
def test_a_chat_of_which_the_target_writes_both_sides() -> None:
    tokenizer = chat_tokenizer()
    target = tiny_model(vocab_size=len(tokenizer), sharpness=1.0)  # random: ends turns one time in sixty
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    template = Template(tokenizer, target)
    texts = list(Writer(target, 96, 4, max_question=12).write((job, template.both_sides(2)) for job in range(12)))
    assert sorted(text.job for text in texts) == list(range(12))
    assert sum(len(text.spans) == 2 for text in texts) > 3
    for text in texts:
        words = tokenizer.convert_ids_to_tokens(text.input_ids)
        assert words[:2] == ["<start>", "<user>"]
        for start, end in text.spans:
            assert words[start - 3 : start] == ["<end>", "<start>", "<assistant>"]
            assert end == len(words) or words[end - 1 : end + 2] == ["<end>", "<start>", "<user>"]
        # Every end token but those of questions is under the mask.
        masked = {index for start, end in text.spans for index in range(start, end)}
        questions = sum(words[index : index + 3] == ["<end>", "<start>", "<assistant>"] for index in range(len(words)))
        assert sum(words[i] == "<end>" and i not in masked for i in range(len(words))) == questions


def test_prompts_that_leave_no_room_come_back_empty() -> None:
    jobs = [(0, [ScriptPart(tuple(range(4, 40)), "text")]), (1, [ScriptPart((1, 5), "text")])]
    texts = {text.job: text for text in Writer(trained_target(), 20, 2).write(jobs)}
    assert texts[0] == Text([], [], 0)
    assert len(texts[1].input_ids) == 20


def test_the_file_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "data" / "written.jsonl"
    texts = [Text([1, 2, 3], [(1, 3)], 0), Text([4, 5], [(0, 1), (1, 2)], 7)]
    assert write_texts(path, texts, 2, progress=False) == 2
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"input_ids":[1,')
    assert read_written(path) == texts and written_jobs(path) == {text.job for text in texts}
    assert path.read_bytes() == whole


def test_a_stop_loses_only_what_is_in_flight() -> None:
    asked = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > 4

    jobs = ((index, [ScriptPart((1,), "text")]) for index in range(1000))
    texts = list(Writer(trained_target(), 20, 4).write(jobs, should_stop))
    assert 0 < len(texts) <= 20


def test_templates_without_turns(recwarn: pytest.WarningsRecorder) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}nothing{% endfor %}"
    with pytest.raises(ValueError, match="chat template"):
        Template(tokenizer, tiny_model(vocab_size=len(tokenizer)))
