"""Reading records, and which tokens are learned."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.goldens import trained_target, trained_tokenizer

from hf_specdec.training import TrainOptions
from hf_specdec.training.corpus import Corpus
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


BAD = {
    '{"text"': "is not JSON",
    "\xff": "is not UTF-8",
    "[" * 100_000: "is not JSON",
    '{"conversations": []}': "the conversation has no turns",
    '{"messages": null}': "the conversation has no turns",
    '{"messages": [{"role": "user", "content": null}]}': "a turn needs a role and a text",
    '{"messages": [{"role": "tool", "content": "x"}]}': "the chat template refuses the conversation: no such role",
    '{"prompt": "x"}': "a record must look like",
    "7": "a record must look like",
    '{"text": ""}': "the text is empty",
    '{"text": "a \\ud800 b"}': "half of a character",
    '{"input_ids": [5, "6"]}': "`input_ids` must be a list of tokens",
    '{"input_ids": [5, 512]}': "token 512 is beyond the target's vocabulary of 512 tokens",
    '{"input_ids": [5, 6], "spans": [[1, 3]]}': "`spans` must be pairs (first, end) within 2 tokens",
    '{"input_ids": [5, 6], "spans": [3]}': "`spans` must be pairs (first, end) within 2 tokens",
}


def corpus_of(folder: Path, lines: list[str], option: str = "data", **options: Any) -> Corpus:
    """The corpus of a .jsonl file, for a target whose chat template knows users and assistants only."""
    path = folder / "texts.jsonl"
    path.write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in lines))
    tokenizer = copy.deepcopy(trained_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}t5 t6 "
        "{{ m.content }}{% endfor %}"
    )
    settings = TrainOptions(output=str(folder), max_length=64, progress=False, **{option: str(path)}, **options)
    return Corpus(settings, folder / "data", trained_target(), tokenizer)


GOOD = [json.dumps({"text": f"t5 t{6 + number} t7 t8 t9"}) for number in range(3)]


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_bad_records_are_skipped(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning that names file, line and reason, and their number at the end."""
    texts = corpus_of(tmp_path, [GOOD[0], line, *GOOD[1:]]).texts()
    assert texts is not None and len(texts) == 3
    place, reason = f"{tmp_path / 'texts.jsonl'}, line 2", BAD[line]
    assert len(caplog.messages) == 2
    assert place in caplog.messages[0] and reason in caplog.messages[0] and len(caplog.messages[0]) < 600
    assert caplog.messages[1].startswith(f"{tmp_path / 'texts.jsonl'}: 1 record was skipped")


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_strict_data_stops_at_a_bad_record(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"texts.jsonl, line 2.*{re.escape(BAD[line])}"):
        corpus_of(tmp_path, [GOOD[0], line], strict_data=True).texts()
    assert not (tmp_path / "data" / "encoded.jsonl").exists()


def test_many_bad_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus_of(tmp_path, [*GOOD, *['{"text": ""}'] * 25]).texts()
    assert len(caplog.messages) == 11
    assert "counted" in caplog.messages[9] and "25 records were skipped" in caplog.messages[10]


def test_a_target_that_does_not_chat_is_no_bad_record(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [*GOOD, json.dumps({"messages": TURNS})])
    corpus.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        corpus.texts()


@pytest.mark.parametrize(
    "line", [*list(BAD)[:11], '{"messages": [{"role": "assistant", "content": "a"}]}'], ids=lambda line: line[:40]
)
def test_bad_prompts(line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are looked for before the target writes anything."""
    good = json.dumps({"messages": [{"role": "user", "content": "t7"}]})
    _, number = corpus_of(tmp_path, [good, line, good], "prompts")._jobs()
    assert number == 2 and "texts.jsonl, line 2" in caplog.messages[0] and "1 record was skipped" in caplog.text
    with pytest.raises(ValueError, match="texts.jsonl, line 2"):
        corpus_of(tmp_path, [good, line, good], "prompts", strict_data=True)._jobs()


def test_files_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    for name, content, reason in (
        ("a.json", b"[1,", "JSON"),
        ("b.json", b"\xff", "UTF-8"),
        ("c.txt", b"\xff", "UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not {reason}"):
            list(read_records(tmp_path / name))


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
