"""Answers with tool calls and reasoning: whatever a model writes is answered, streamed as unstreamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402
from support.asking import calls_in  # noqa: E402
from support.call_templates import SHAPES, TEMPLATES  # noqa: E402
from support.scripts import BEGINS, END, Script, config_of, tokenizer  # noqa: E402
from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template  # noqa: E402
from transformers.utils.chat_parsing import ResponseParser, parse_response  # noqa: E402

from hf_specdec.serving.answer_streams import ParsedAnswers  # noqa: E402
from hf_specdec.serving.answers import AnswerPieces  # noqa: E402
from hf_specdec.serving.app import build_app  # noqa: E402
from hf_specdec.serving.total_parser import TotalParser  # noqa: E402


PATHS = {"chat/completions": {"messages": [{"role": "user", "content": "a"}]}, "responses": {"input": "a"}}


def asked(script: Script, path: str, stream: bool, **options: Any) -> Any:
    """The answer; of a stream, its events, each of which is one line of JSON."""
    app = build_app(script, tokenizer(), "some/model")  # type: ignore[arg-type]  # it has what is needed
    client = TestClient(app, raise_server_exceptions=False)
    body = PATHS.get(path, {"prompt": "a"}) | {"stream": stream, "temperature": 0} | options
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()
    lines = response.text.split("\n")
    assert all(line.startswith("data: ") for line in lines[::2] if line) and not any(lines[1::2])
    data = [line.removeprefix("data: ") for line in lines[::2] if line]
    assert path == "responses" or data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def parts_of(script: Script, path: str, stream: bool) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls, and why the text ends."""
    answer = asked(script, path, stream)
    if path == "responses":
        answer = answer[-1]["response"] if stream else answer
        items, texts = answer["output"], {"message": "", "reasoning": ""}
        texts |= {item["type"]: item["content"][0]["text"] for item in items if item["type"] != "function_call"}
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        reason = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
        return texts["message"], texts["reasoning"], calls, reason
    choices = [one["choices"][0] for one in (answer if stream else [answer])]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    content, reasoning = ("".join(part.get(name) or "" for part in parts) for name in ("content", "reasoning_content"))
    return content, reasoning, calls_in(parts), choices[-1]["finish_reason"]


GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CALL = ("f", '{"x": 1}')
NO_NAME = '<tool_call>\n{"arguments": {}}\n</tool_call>'
NO_VALUE = "<|tool_call>call:f{x:}<tool_call|>"
NO_JSON = '<tool_call>\n{"name": "f", "arguments": {x: "\\n"}}\n</tool_call>'


XML = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
NO_END = XML.replace("</function>", "")
FLAT = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "text, kind, is_cut, expected",
    [
        # What can be parsed.
        (f"<think>\nWell. \n</think>\n\nHello. \n{END}", "qwen3", False, ("Hello.", "Well.", [], "stop")),
        (f"Hello.\n{GOOD}\n{GOOD}{END}", "qwen3", False, ("Hello.", "", [CALL, CALL], "tool_calls")),
        # What cannot: the raw text, and all that can.
        (GOOD[:30], "qwen3", True, (GOOD[:30], "", [], "length")),
        (f"<think>So.</think>Hello. \n{GOOD[:30]}", "qwen3", True, (f"Hello. \n{GOOD[:30]}", "So.", [], "length")),
        (f"{GOOD[:30]}{END}", "qwen3", False, (GOOD[:30], "", [], "stop")),
        (f"{NO_JSON}{END}", "qwen3", False, (NO_JSON, "", [], "stop")),
        (f"Hello.\n{NO_NAME}\n bye {END}", "qwen3", False, (f"Hello.\n{NO_NAME}\n bye", "", [], "stop")),
        (f"{NO_NAME}{GOOD}{NO_JSON}", "qwen3", False, (f"{NO_NAME}{NO_JSON}", "", [CALL], "tool_calls")),
        ("a<think>b\n", "qwen3", True, ("a", "b", [], "length")),
        (NO_VALUE, "gemma4", False, (NO_VALUE, "", [], "stop")),
        ("<|tool_call>call:f{x:1}<tool_call|>", "gemma4", False, ("", "", [CALL], "tool_calls")),
        (f"{GOOD}\n{GOOD}{END}", "qwen2", False, ("", "", [CALL, CALL], "tool_calls")),
        (f"So.\n{XML}\n{XML}{END}", "qwen3_5", False, ("So.", "", [("f", '{"x": "1"}')] * 2, "tool_calls")),
        (
            f"{XML[:40]}</function></tool_call>",
            "qwen3_5",
            False,
            (f"{XML[:40]}</function></tool_call>", "", [], "stop"),
        ),
        (f"{NO_END}{END}", "qwen3_5", False, (NO_END, "", [], "stop")),
        (XML[:40], "qwen3_5_moe", True, (XML[:40], "", [], "length")),
        (FLAT, "llama", False, (FLAT, "", [], "stop")),  # transformers has no response template for the family
        (f"größ{END}", "llama", False, ("größ", "", [], "stop")),
    ],
)
def test_what_a_model_writes_is_answered(
    text: str, kind: str, is_cut: bool, expected: Any, path: str, stream: bool
) -> None:
    if path == "responses" and expected[3] == "length":
        expected = (*expected[:3], "length")
    assert parts_of(Script(text, kind, is_cut), path, stream) == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "kind, written_as, text, expected",
    [
        ("llama", "llama", f"{FLAT}{END}", ("", [CALL])),
        ("llama", "llama", f"Well. {FLAT}{END}", (f"Well. {FLAT}", [])),
        ("llama", "llama", f"{FLAT[:-1]}{END}", (FLAT[:-1], [])),
        ("llama", "llama", '{"name": "g", "parameters": {}}', ('{"name": "g", "parameters": {}}', [])),  # no tool
        ("qwen3_moe", "qwen3_5", f"So.\n{XML}{END}", ("So.", [("f", '{"x": 1}')])),
        ("nobody", "qwen3", f"{GOOD}{END}", ("", [CALL])),
    ],
)
def test_calls_are_read_as_the_chat_template_writes_them(
    kind: str, written_as: str, text: str, expected: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model's type is; bare JSON is a call if it is one of the tools."""
    monkeypatch.setattr(tokenizer(), "response_template", None, raising=False)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    script = Script(text, kind, template=TEMPLATES[written_as])
    answer = asked(script, "chat/completions", stream, tools=[{"type": "function", "function": function}])
    choices = [one["choices"][0] for one in (answer if stream else [answer])]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    found = "".join(part.get("content") or "" for part in parts), calls_in(parts)
    assert found == expected


TEXT = '{"name": "f", "arguments": {"x": "1"}}'
MARKED = f"<tool_call>\n{TEXT}\n</tool_call>"
OF_SHAPES = {
    "Qwen2.5": f"{MARKED}\n{MARKED}",
    "Qwen3": f"{MARKED}\n{MARKED}",
    "Qwen3-Coder": f"{XML}\n{XML}",
    "Qwen3.5": f"</think>\n\n{XML}\n{XML}",
    "Llama 3.2": TEXT.replace("arguments", "parameters"),
    "Llama 3.1, marked": f"<|python_tag|>{TEXT.replace('arguments', 'parameters')}",
    "Llama 4": f"<|python_start|><|python_end|>{TEXT.replace('arguments', 'parameters')}",
    "Gemma 4": '<|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|>' * 2,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_published_templates(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Strict ones with `tool_choice="auto"`: as many as the template writes, streamed as whole; cut within the first, or
    of what is no call, content.
    """
    kind, template = SHAPES[shape]
    text, number = OF_SHAPES[shape], 1 if "Llama" in shape else 2
    begins, no_call = text[: len(text) // number - 5], text.replace('"', "").replace("=", " ").replace("{", "(")
    cases = [(text, False, number), (begins, True, 0), (no_call, False, 0)]
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for written, is_cut, count in cases:
        for stream in (False, True):
            monkeypatch.setattr(tokenizer(), "response_template", None, raising=False)
            end = "" if is_cut or kind == "gemma4" else END
            script = Script(written + end, kind, is_cut, template=template)
            answer = asked(script, "chat/completions", stream, tools=[tool], tool_choice="auto")
            choices = [one["choices"][0] for one in (answer if stream else [answer])]
            parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            assert [(name, json.loads(one)) for name, one in calls_in(parts)] == [("f", {"x": "1"})] * count
            content = "".join(part.get("content") or "" for part in parts)
            assert content.strip() == ("" if count else written.removeprefix("</think>").strip())
            assert choices[-1]["finish_reason"] == ("length" if is_cut else "tool_calls" if count else "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_call_if_that_is_asked_for(stream: bool) -> None:
    text = f"{GOOD}\n{GOOD}{END}"
    for parallel, count in ((True, 2), (None, 2), (False, 1)):
        answer = asked(Script(text), "chat/completions", stream, parallel_tool_calls=parallel)
        choices = [one["choices"][0] for one in (answer if stream else [answer])]
        assert calls_in([choice.get("delta") or choice.get("message") or {} for choice in choices]) == [CALL] * count
        assert choices[-1]["finish_reason"] == "tool_calls"


def test_characters_that_are_cut() -> None:
    """Their last bytes are a replacement character, in a stream, too."""
    script = Script("größ", "llama", is_cut=True)
    script._tokens.pop()
    assert asked(script, "completions", False)["choices"][0]["text"] == "grö�"
    assert "".join(one["choices"][0]["text"] for one in asked(script, "completions", True)) == "grö�"


@pytest.mark.parametrize("path", [*PATHS, "completions"])
def test_errors_of_a_stream_are_json(path: str) -> None:
    """With line breaks and quotes, and after text that is told."""
    reason = "KeyError: \"a\nb\"\r\n'c' \\ {x}"
    *events, last = asked(Script("Hello.", "llama", error=reason), path, True)
    assert reason == (last.get("error") or last["response"]["error"])["message"]
    assert len(events) >= 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_faults_of_the_server_are_no_faults_of_the_request(
    stream: bool, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are called."""

    def fails(*_: Any) -> None:
        raise error('a "secret"\n')

    monkeypatch.setattr(AnswerPieces, "end", fails)
    if stream:
        told = asked(Script("Hello."), "chat/completions", True)[-1]["error"]["message"]
    else:
        app: Any = build_app(Script("Hello."), tokenizer(), "some/model")  # type: ignore[arg-type]
        response = TestClient(app, raise_server_exceptions=False).post(
            "/v1/chat/completions", json=PATHS["chat/completions"]
        )
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        told = response.json()["error"]["message"]
    assert f"unexpected {error.__name__}" in told and "secret" not in told


# -------------------------------------------------------------------------------------------- without the HTTP server


PIECES = [GOOD, NO_NAME, NO_JSON, "<tool_call>", "</tool_call>", "<think>", "</think>", END, "a", " \n", "é", '{"']


def streamed(text: str, template: Any, prefix: str, is_cut: bool) -> tuple[str, str, list[ToolCall]]:
    pieces = AnswerPieces(tokenizer(), TotalParser.over(ResponseParser(template, prefix=prefix)))
    parts = pieces.begin()
    for token in tokenizer()(text)["input_ids"]:
        parts += pieces.add(token)
    parts += pieces.end(is_cut)
    content, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
    return content, reasoning, [part for part in parts if isinstance(part, ToolCall)]


class OfKind:
    """What the choice of a template needs of a model."""

    def __init__(self, kind: str):
        self.config = config_of(kind)


@settings(max_examples=40)
@given(drawn=st.lists(st.sampled_from(PIECES), max_size=12), thinks=st.booleans(), is_cut=st.booleans())
def test_any_text_is_answered(drawn: list[str], thinks: bool, is_cut: bool) -> None:
    """Streamed as unstreamed; nothing is lost but marks and white space."""
    text, template = "".join(drawn), get_response_template(tokenizer(), OfKind("qwen3"))
    prefix = BEGINS["qwen3"] + "<think>\n" * thinks
    content, reasoning, calls = streamed(text, template, prefix, is_cut)
    config = GenerationConfig()
    config.max_new_tokens = 0 if is_cut else None  # see `is_cut`
    whole = ParsedAnswers(tokenizer(), config).parse_response(tokenizer()(text)["input_ids"], template, prefix=prefix)
    assert (content, reasoning) == (whole["content"], whole["thinking"] or "")
    assert [call.name for call in calls] == [call["function"]["name"] for call in whole["tool_calls"]]
    for letter in "aé":
        assert (content + reasoning).count(letter) + GOOD.count(letter) * len(calls) == text.count(letter)


@settings(max_examples=40)
@given(
    thought=st.none() | st.text("ab \n", max_size=5),
    said=st.text("ab \n", max_size=8),
    num_calls=st.integers(0, 2),
    ends=st.booleans(),
)
def test_answers_are_those_of_transformers(thought: str | None, said: str, num_calls: int, ends: bool) -> None:
    """Of what its parser can read."""
    text = ("" if thought is None else f"<think>{thought}</think>") + said + GOOD * num_calls + END * ends
    template, prefix = get_response_template(tokenizer(), OfKind("qwen3")), BEGINS["qwen3"]
    theirs, (content, reasoning, calls) = (
        parse_response(text, template, prefix=prefix),
        streamed(text, template, prefix, is_cut=not ends),
    )
    assert content == theirs.get("content", "")
    assert reasoning == (theirs.get("reasoning_content") or theirs.get("thinking") or "")
    assert len(calls) == len(theirs.get("tool_calls") or ())


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("text", [f"a b{END}", f"{GOOD}{END}"], ids=["text", "call"])
def test_fields_that_may_be_null_are_there(path: str, text: str) -> None:
    """Clients look them up: why a text ends, in each chunk, and the content beside calls."""
    script, is_chat = Script(text), path != "completions"
    for number in (1, 2):
        for chunk in asked(script, path, True, n=number):
            assert all("finish_reason" in choice for choice in chunk["choices"])
            assert is_chat or all("logprobs" in choice for choice in chunk["choices"])
        choices = asked(script, path, False, n=number)["choices"]
        assert len(choices) == number and all(choice["logprobs"] is None for choice in choices)
        assert not is_chat or all({"content", "refusal"} <= choice["message"].keys() for choice in choices)
