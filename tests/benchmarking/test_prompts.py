"""Prompts: the built-in sets and files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.chat import chat_tokenizer
from support.goldens import trained_tokenizer

from hf_specdec.benchmarking.prompts import TASKS, Prompt, built_in, encode, encode_turns, first_of_each, read


def test_every_built_in_set_has_a_handful_of_prompts() -> None:
    counts = Counter(prompt.task for prompt in built_in())
    assert tuple(counts) == TASKS and min(counts.values()) >= 4
    texts = [prompt.text for prompt in built_in()]
    assert len(set(texts)) == len(texts)
    lengths = {task: [len(p.text.split()) for p in built_in([task])] for task in TASKS}
    assert min(lengths["summarise"]) > 120 and min(lengths["rag"]) > 100  # those that quote have something to quote


def test_sets_can_be_chosen_and_cut() -> None:
    found = built_in(["maths", "chat"], 2)
    assert [prompt.task for prompt in found] == ["chat", "chat", "maths", "maths"]
    with pytest.raises(ValueError, match="'poetry' is no built-in set of prompts. There are chat, code"):
        built_in(["poetry"])


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_text("one\n\n  two \n")
    assert read(lines) == [Prompt("mine", "one"), Prompt("mine", "two")]
    objects = tmp_path / "ours.jsonl"
    objects.write_text('{"prompt": "a\\nb"}\n{"task": "code", "prompt": "c"}\n')
    assert read(objects) == [Prompt("ours", "a\nb"), Prompt("code", "c")]
    assert first_of_each(read(lines) + read(objects), 1) == [
        Prompt("mine", "one"),
        Prompt("ours", "a\nb"),
        Prompt("code", "c"),
    ]


@pytest.mark.parametrize(
    "content, message",
    [
        ("\n", "holds no prompts"),
        ("{", "line 1, is not valid JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2: write"),
        ('{"prompt": " "}', "line 1: write"),
        ('{"prompt": "a", "task": 3}', "line 1: write"),
    ],
)
def test_files_without_prompts(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize("chats", [False, True])
def test_several_turns_are_padded_on_the_left_and_have_no_types(chats: bool) -> None:
    """Whatever the tokenizer does by itself: a Llama refuses `token_type_ids`."""
    tokenizer = chat_tokenizer() if chats else trained_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["w1", "w1 w2 w3"] if chats else ["t5", "t5 t6 t7"]
    found = encode_turns(tokenizer, texts)
    assert set(found) == {"input_ids", "attention_mask"}
    assert found["attention_mask"][0].tolist() == sorted(found["attention_mask"][0].tolist())
    for row, text in enumerate(texts):
        alone = encode_turns(tokenizer, [text])
        assert set(alone) == {"input_ids", "attention_mask"}
        assert found["input_ids"][row][found["attention_mask"][row].bool()].tolist() == alone["input_ids"][0].tolist()


def test_encoding_keeps_the_task_and_goes_through_a_chat_template() -> None:
    tokenizer = trained_tokenizer()
    (plain,) = encode(tokenizer, [Prompt("chat", "t5 t6")], "cpu")
    assert plain.task == "chat" and plain.length == plain.inputs["input_ids"].shape[1] > 0
    assert tokenizer.chat_template is None
    tokenizer.chat_template = "{% for message in messages %}t7 {{ message['content'] }}{% endfor %}"
    try:
        (chat,) = encode(tokenizer, [Prompt("chat", "t5 t6")], "cpu")
    finally:
        tokenizer.chat_template = None
    assert chat.length == plain.length + 1
