"""Files of JSON lines: where their records are, and which are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


pytest.importorskip("fastapi")
pytest.importorskip("openai")

from hf_specdec.bulk import Records  # noqa: E402


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}\nno object\n\xff\n{"prompt": "c"}')
    records = Records(path)
    assert list(records.lines) == [1, 4, 5, 6, 7]
    assert [records.read(index) for index in (4, 0, 3)] == [b'{"prompt": "c"}', b'{"prompt": "a"}', b"\xff"]
    assert [records.index_of(line) for line in records.lines] == [0, 1, 2, 3, 4]


def test_pipes_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, .* Write it to a file first"):
        Records(tmp_path / "pipe")


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "It has no lines"),
        (b"\n\n", "It has no lines"),
        (b"\nOnce upon\na time\n", "Line 2: Expecting value"),
        (b'[{"prompt": "a"}]\n', "Line 1: a list"),
        (b'[\n {\n  "prompt": "a"\n }\n]\n', "Line 1: Expecting value"),
        (b"PK\x03\x04\xff\xfe", "Line 1: no UTF-8 at byte 4"),
        (b"[" * 100_000, "Line 1: "),
    ],
)
def test_files_that_are_no_json_lines(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no file of JSON lines") as error:
        Records(path)
    assert reason in str(error.value) and str(path) in str(error.value)
