"""Reading records, and which tokens are learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.goldens import trained_tokenizer

from hf_specdec.training.data import encode_chat, encode_record, messages_of, read_records


TURNS = [
    {"role": "user", "content": " w1 w2 "},
    {"role": "assistant", "content": " w3 "},
    {"role": "user", "content": " w4 "},
    {"role": "assistant", "content": " w5 w6 "},
]


def masked_words(tokenizer: Any, ids: list[int], spans: list[tuple[int, int]]) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(ids[start:end]) for start, end in spans]


def test_answers_with_their_end_tokens_are_learned() -> None:
    tokenizer = chat_tokenizer()
    ids, spans = encode_chat(TURNS, tokenizer)
    assert masked_words(tokenizer, ids, spans) == [["w3", "<end>"], ["w5", "w6", "<end>"]]
    assert ids == tokenizer(tokenizer.apply_chat_template(TURNS, tokenize=False))["input_ids"]


def test_what_a_template_writes_behind_the_end_is_not_learned() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<end>{% endfor", "<end> w9 {% endfor")
    ids, spans = encode_chat(TURNS, tokenizer)
    assert masked_words(tokenizer, ids, spans) == [["w3", "<end>"], ["w5", "w6", "<end>"]]


def test_templates_that_write_earlier_turns_otherwise() -> None:
    """Drops answers but the last, as reasoning templates do with thoughts: the last one is found by its words."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<start><{{ m.role }}>{{ m.content }}<end>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<start><assistant>{% endif %}"
    )
    ids, spans = encode_chat(TURNS, tokenizer)
    assert masked_words(tokenizer, ids, spans)[-1][:2] == ["w5", "w6"]
    assert len(spans) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": " w1 "}, {"from": "gpt", "value": " w2 "}]},
        {"conversations": [{"from": "system", "value": " w0 "}, *TURNS]},
    ],
)
def test_shapes_of_conversations(record: dict[str, Any]) -> None:
    messages = messages_of(record, "here")
    assert {message["role"] for message in messages} <= {"system", "user", "assistant"}
    text = encode_record(record, "here", chat_tokenizer())
    assert text.spans and text.spans[-1][1] == len(text.input_ids)


def test_plain_texts_are_learned_whole() -> None:
    text = encode_record({"text": "t5 t6 t7"}, "here", trained_tokenizer())
    assert text.spans == [(0, len(text.input_ids))]
    assert text.input_ids[-3:] == [5, 6, 7]


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "x"}, "line 3.*messages.*conversations.*text"),
        ({"messages": [{"role": "user"}]}, "line 3.*a role and a text"),
        (["x"], "line 3"),
    ],
)
def test_other_shapes_are_refused_by_their_place(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_record(record, "f.jsonl, line 3", chat_tokenizer())


def test_conversations_need_a_chat_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode_record({"messages": TURNS}, "here", trained_tokenizer())


def test_files(tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "a.txt").write_text("a b")
    assert [record for _, record in read_records(tmp_path / "a.jsonl")] == records
    assert [record for _, record in read_records(tmp_path / "a.json", limit=2)] == records[:2]
    assert [record for _, record in read_records(tmp_path / "a.txt")] == [{"text": "a b"}]
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 2 is not JSON"):
        list(read_records(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="list of records"):
        list(read_records(tmp_path / "bad.json"))
    for option in ("data", "prompts"):
        with pytest.raises(FileNotFoundError, match=f"`{option}`=.*no such file"):
            list(read_records(tmp_path / "none.jsonl", option=option))


def test_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [record["text"] for _, record in read_records(str(folder), limit=1)] == ["a"]


def test_without_datasets_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(read_records("some/set"))
