"""Calls in Python, which a chat template writes or asks for: read as literals, streamed as whole, and never run."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest


for package in ("fastapi", "openai", "prometheus_client", "llguidance"):
    pytest.importorskip(package)

from fastapi.testclient import TestClient  # noqa: E402
from llguidance import LLMatcher  # noqa: E402
from llguidance.hf import from_tokenizer  # noqa: E402
from support.asking import calls_in  # noqa: E402
from support.call_templates import PYTHON_SHAPES, SHAPES  # noqa: E402
from support.scripts import END, Script, config_of, tokenizer  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from hf_specdec.serving.app import build_app  # noqa: E402
from hf_specdec.serving.calls import CallSyntax  # noqa: E402
from hf_specdec.serving.calls.python_reading import calls_in_python  # noqa: E402
from hf_specdec.serving.engine.messages import Served  # noqa: E402


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}},
]
PARIS = ("get_weather", {"city": "Paris"})
ONE = ("f", {"x": 1})


@pytest.fixture(autouse=True)
def no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have left theirs."""
    monkeypatch.setattr(tokenizer(), "response_template", None, raising=False)


def syntax_of(template: str) -> CallSyntax | None:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(own.apply_chat_template(messages, tokenize=False, **options))

    model = Served(config_of("nobody"), GenerationConfig(eos_token_id=own.eos_token_id), 2**20, None)
    return CallSyntax.of(render, own, model)


def answered(script: Script, stream: bool, path: str = "chat/completions", **options: Any) -> tuple[Any, str, str]:
    """Calls, content and why the text ends."""
    client = TestClient(build_app(script, tokenizer(), "some/model"))  # type: ignore[arg-type]
    asks = {"messages": [{"role": "user", "content": "a"}]}
    body = asks | {"tools": TOOLS, "stream": stream} | options
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [one["choices"][0] for one in (found if stream else [response.json()])]
    parts = [choice.get("message") or choice["delta"] for choice in choices]
    calls = [(name, json.loads(arguments)) for name, arguments in calls_in(parts)]
    return calls, "".join(part.get("content") or "" for part in parts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("shape", PYTHON_SHAPES)
def test_forms(shape: str) -> None:
    template, opening, closing, separator, quote = PYTHON_SHAPES[shape]
    syntax = syntax_of(template)
    assert syntax is not None
    form: Any = syntax.form
    assert (form.opening, form.closing, form.separator, form.quote) == (opening, closing, separator, quote)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", PYTHON_SHAPES)
def test_calls(shape: str, stream: bool) -> None:
    """Parallel ones; what is cut, or no call, is content, as is what is beside bare calls."""
    template, opening, closing, separator, _ = PYTHON_SHAPES[shape]
    is_bare = opening == "["
    text = f'{opening}get_weather(city="Paris"){separator}f(x=1){closing}'
    no_tool, run = (f"{opening}{call}{closing}" for call in ("g(x=1)", 'f(x=__import__("os"))'))
    cases: list[tuple[str, bool, Any]] = [
        (text, False, ([PARIS, ONE], "", "tool_calls")),
        (text.replace('"', "'"), False, ([PARIS, ONE], "", "tool_calls")),
        (text[: len(opening) + 30], True, ([], text[: len(opening) + 30], "length")),
        (run, False, ([], run, "stop")),
        (no_tool, False, ([], no_tool, "stop") if is_bare else ([("g", {"x": 1})], "", "tool_calls")),
        (f"Well. {text}", False, ([], f"Well. {text}", "stop") if is_bare else ([PARIS, ONE], "Well.", "tool_calls")),
        ("[see](the page) and f(x=1)", False, ([], "[see](the page) and f(x=1)", "stop")),
    ]
    for written, is_cut, expected in cases:
        tokenizer().response_template = None
        script = Script(written + "" if is_cut else written + END, "nobody", is_cut, template=template)
        assert answered(script, stream) == expected, written


def test_one_call_if_that_is_asked_for() -> None:
    for stream in (False, True):
        tokenizer().response_template = None
        script = Script(f"[f(x=1), f(x=1)]{END}", template=PYTHON_SHAPES["Llama 3.2"][0])
        assert answered(script, stream, parallel_tool_calls=False) == ([ONE], "", "tool_calls")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<|python_start|>[f(x=1)]<|python_end|>", [ONE]),
        ('[get_weather(city="Paris", days="2")]', [("get_weather", {"city": "Paris", "days": 2})]),  # by its schema
        ('{"name": "f", "parameters": {"x": 1}}', [ONE]),  # JSON, which a model may fall back on
        ('[f(x=[1, -2.5, {"a": None, "b": true}])]', [("f", {"x": [1, -2.5, {"a": None, "b": True}]})]),
        ('\n [f(x="a]b), g(\\n\\"é\\"")]', [("f", {"x": 'a]b), g(\n"é"'})]),
    ],
)
def test_values(text: str, expected: Any) -> None:
    script = Script(text + END, template=PYTHON_SHAPES["Llama 3.2"][0])
    for stream in (False, True):
        tokenizer().response_template = None
        assert answered(script, stream)[0] == expected


@pytest.mark.parametrize("shape", ["Llama 3.2", "asked for"])
def test_reasoning_of_the_own_template_stays(shape: str) -> None:
    """Bare calls follow it."""
    thoughts = {"open": "<think>", "close": "</think>", "content": "text"}
    content = {"close_pattern": r"\s*<\|im_end\|>", "content": "text"}
    fields = {"reasoning_content": thoughts, "content": content}
    own = {"start_anchor": "<|end_header_id|>\n\n", "fields": fields}
    for stream in (False, True):
        tokenizer().response_template = own
        script = Script(f"<think>So.</think>\n\n[f(x=1)]{END}", template=PYTHON_SHAPES[shape][0])
        assert answered(script, stream) == ([ONE], "", "tool_calls")


@pytest.mark.parametrize("shape", SHAPES)
def test_other_forms_are_none_of_these(shape: str) -> None:
    syntax = syntax_of(SHAPES[shape][1])
    assert syntax is not None and type(syntax.form).__name__ != "PythonForm"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[f()]", [("f", {})]),
        ("f(x=1)\ng.h(y='a')", [("f", {"x": 1}), ("g.h", {"y": "a"})]),
        ("[f(from='a', to=\"== in =\")]", [("f", {"from": "a", "to": "== in ="})]),  # reserved names, not in strings
        (r'[f(x="a\/b \d \n", y=r"\d")]', [("f", {"x": "a/b \\d \n", "y": "\\d"})]),
        ("[f(x=(1, 2), y=+1)]", [("f", {"x": [1, 2], "y": 1})]),
    ],
)
def test_what_is_read(text: str, expected: Any) -> None:
    found = [one["function"] for one in calls_in_python(text)]
    assert [(one["name"], one["arguments"]) for one in found] == expected


@pytest.mark.parametrize(
    "call",
    [
        *("f(1)", "f(x=1, x=2)", "f(*a)", "f(**{'x': 1})", "f()()", "f(x=y)", "f(x=g())", "f(x=1+1)", "f(x=b'a')"),
        *("f(x={1: 2})", "f(x={1})", "f(x=f'{1}')", "f(x=[a for a in b])", "f(x=lambda: 1)", "f", "1", "f(x=\0)"),
        *("f(x='a\n')", f"f(x={'-' * 10**5}1)", f"f(x={'1+' * 10**5}1)", f"f(x={'[' * 300}", f"f(x={'9' * 10**4})"),
    ],
)
def test_what_is_not_read(call: str) -> None:
    for text in (call, f"[{call}]", f"[f(), {call}]"):
        with pytest.raises((ValueError, SyntaxError, MemoryError, RecursionError)):
            calls_in_python(text)


@pytest.mark.parametrize("text", ["", "[]", "x = f()", "import os", "[f()]\nf()", "f() if g() else h()"])
def test_what_is_no_list_of_calls(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calls_in_python(text)


# ---------------------------------------------------------------------------------------------------- grammars of them


ANY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "b": {"type": ["integer", "null"]},
        "c": {"anyOf": [{"const": "it's"}, {"type": "string", "maxLength": 2}]},
        "d": {"type": "object", "properties": {"e": {"type": "array", "items": {"type": "number"}}}},
        "from": {"type": "string", "pattern": "^[a-c]+$"},
        "g": {"type": "object"},
    },
    "required": ["b"],
}


@pytest.mark.parametrize(
    "arguments, is_right",
    [
        ('b=None, c="it\'s", d={"e": [1, 2.5]}', True),
        ("a=True, b=12", True),
        (r'b=1, c="\n\""', True),
        ('b=1, from="abc", g={"x": [true, "y"]}', True),
        ("a=true, b=12", False),
        ("a=True", False),
        ("b=1,c='a'", False),
        ('b=1, c="abc"', False),
        ('b=1, from="abd"', False),
        ('b=1, c="\n"', False),
        ('b=1, z="a"', False),
    ],
)
def test_grammars_of_arguments(arguments: str, is_right: bool) -> None:
    syntax = syntax_of(PYTHON_SHAPES["Llama 3.2"][0])
    assert syntax is not None
    grammar = syntax.grammar([{"function": {"name": "f", "parameters": ANY}}], is_one=False)
    for text, fits in ((f"[f({arguments})]", is_right), (f"[f({arguments}), f(b=1)]", is_right), ("[f(b=1)", False)):
        matcher = LLMatcher(from_tokenizer(tokenizer(), eos_token=tokenizer().eos_token_id), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer()(text)["input_ids"]
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text
        if fits:
            assert [one["function"]["name"] for one in calls_in_python(text)] == ["f"] * text.count("f(")


@pytest.mark.parametrize(
    "tool, says",
    [
        ({"name": "get-weather"}, "no function is called 'get-weather'"),
        ({"name": "import"}, "no function is called 'import'"),
        ({"name": "f", "parameters": {"properties": {"a-b": {}}}}, "no argument is called 'a-b'"),
    ],
)
def test_names_that_python_has_not(tool: Any, says: str) -> None:
    syntax = syntax_of(PYTHON_SHAPES["LFM2"][0])
    assert syntax is not None and says in (syntax.check(tool) or "")
