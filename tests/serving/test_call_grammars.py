"""Grammars of calls, by the form that a chat template has: what they let through, and what they do not."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from support.call_templates import SHAPES, TEMPLATES
from support.grammar import chain  # noqa: E402
from support.scripts import config_of, tokenizer
from transformers import GenerationConfig


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from hf_specdec.serving.calls import CallSyntax  # noqa: E402
from hf_specdec.serving.engine.messages import Served  # noqa: E402


@cache
def syntax_of(kind: str, template: str) -> CallSyntax | None:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(own.apply_chat_template(messages, tokenize=False, **options))

    model = Served(config_of(kind), GenerationConfig(eos_token_id=own.eos_token_id), 2**20, None)
    return CallSyntax.of(render, own, model)


@cache
def table() -> Any:
    return from_tokenizer(tokenizer(), eos_token=tokenizer().eos_token_id)


def lets_through(grammar: str, text: str) -> bool:
    """Whether a text is one of the grammar's."""
    matcher, tokens = LLMatcher(table(), grammar, log_level=0), tokenizer()(text)["input_ids"]
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


TREE = {
    "type": "object",
    "properties": {"label": {"type": "string", "pattern": "^[a-c]+$"}, "left": {"$ref": "#"}},
    "required": ["label"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"]}, "c": {"anyOf": [{"const": "x"}]}},
    "required": ["b"],
    "additionalProperties": False,
}
WRITTEN = {
    "qwen3": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama": '{{"name": "f", "parameters": {}}}',
    "gemma4": "<|tool_call>call:f{}<tool_call|>",
}
Q = '<|"|>'


@pytest.mark.parametrize(
    "kind, schema, right, wrong",
    [
        ("qwen3", TREE, '{"label": "ab", "left": {"label": "c"}}', '{"label": "ab", "left": {"label": "d"}}'),
        ("llama", OPTIONAL, '{"b": null, "c": "x"}', '{"a": true, "c": "x"}'),
        ("gemma4", TREE, f"{{label:{Q}ab{Q},left:{{label:{Q}c{Q}}}}}", f"{{label:{Q}ab{Q},left:{{label:{Q}d{Q}}}}}"),
        ("gemma4", OPTIONAL, f"{{b:12,c:{Q}x{Q}}}", f"{{a:true,c:{Q}x{Q}}}"),
        ("gemma4", OPTIONAL, "{a:false,b:null}", "{a:falseb:null}"),
    ],
)
def test_arguments(kind: str, schema: Any, right: str, wrong: str) -> None:
    syntax = syntax_of(kind, TEMPLATES[kind])
    assert syntax is not None
    grammar = syntax.grammar([{"function": {"name": "f", "parameters": schema}}], is_one=True)
    assert lets_through(grammar, WRITTEN[kind].format(right)) and not lets_through(
        grammar, WRITTEN[kind].format(wrong)
    )


@pytest.mark.parametrize("kind, most", [("qwen3", 240), ("qwen3_5", 240), ("gemma4", 50), ("python", 50)])
def test_deep_arguments(kind: str, most: int) -> None:
    """Forms that write rules for each part of a schema take less deep ones than JSON does."""
    syntax = syntax_of(kind, TEMPLATES[kind])
    assert syntax is not None
    for length in (50, 100, 240):
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain(length)["$defs"]}
        reason = syntax.check({"function": {"name": "f", "parameters": parameters}})
        assert reason is None if length <= most else reason is not None and "within each other" in reason


@pytest.mark.parametrize(
    "value, is_right",
    [("ab", True), ("a</p>\n<x", True), ("a</parameter>", False), ("</function>", False), ("abcdefghi", False)],
)
def test_text_in_tags(value: str, is_right: bool) -> None:
    syntax = syntax_of("qwen3_5", TEMPLATES["qwen3_5"])
    assert syntax is not None
    parameters = {"properties": {"x": {"type": "string", "maxLength": 8}}, "required": ["x"]}
    grammar = syntax.grammar([{"name": "f", "parameters": parameters}], is_one=True)
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert lets_through(grammar, text) == is_right
    assert not lets_through(grammar, text.replace("=f>", "=g>")) and not lets_through(grammar, f"{text}\n{text}")


def test_several_calls() -> None:
    """With what the chat template writes between two; none of a template that refuses two."""
    call = WRITTEN["qwen3"].format("{}")
    for kind, number in (("qwen3", 2), ("llama", 1)):
        syntax = syntax_of(kind, TEMPLATES[kind])
        assert syntax is not None and (syntax.separator is None) == (number == 1)
        grammar = syntax.grammar([{"name": "f"}], is_one=False)
        assert lets_through(grammar, "\n".join([WRITTEN[kind].format("{}")] * number))
        assert not lets_through(grammar, WRITTEN[kind].format("{}") * 2) and not lets_through(grammar, "")
    lines = syntax_of("qwen3", TEMPLATES["qwen3"])
    assert lines is not None
    grammar = lines.grammar([{"name": "f"}], is_one=True, may_begin_lines=True)
    assert lets_through(grammar, call) and lets_through(grammar, f"\n\n{call}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ raise_exception('no tools') }}",
        TEMPLATES["qwen3"].replace("tool_call>", "call>"),  # which nothing reads
    ],
)
def test_unknown_forms(template: str) -> None:
    assert syntax_of("qwen3", template) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_published_templates(shape: str) -> None:
    """A grammar lets through what the template writes of calls, up to what ends the answer, and no other arguments."""
    kind, template = SHAPES[shape]
    syntax, own = syntax_of(kind, template), copy.deepcopy(tokenizer())
    assert syntax is not None and (syntax.separator is None) == ("Llama" in shape)
    own.chat_template = template
    schema = {"type": "object", "properties": {"x": {"enum": ["ab", "c"]}}, "required": ["x"]}
    grammar = syntax.grammar([{"type": "function", "function": {"name": "f", "parameters": schema}}], is_one=True)

    def written(value: str) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": value}}}
        said = [{"role": "user", "content": "zq"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = str(own.apply_chat_template(said, tokenize=False)).rpartition("zq")[2]
        answer = text.partition("assistant")[2] or text.partition("model")[2]
        for end in ("</think>\n\n", "<|end_header_id|>\n\n", "<|header_end|>\n\n"):
            answer = answer.rpartition(end)[2]
        return answer.replace("<|im_end|>", "").replace("<turn|>", "").strip("\n")

    assert lets_through(grammar, written("ab")) and lets_through(grammar, written("c"))
    assert not lets_through(grammar, written("d"))
