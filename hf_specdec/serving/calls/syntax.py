"""How a model calls functions: what its chat template writes of calls, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from ...grammar import special_tokens
from ...grammar.depths import check_grammar
from ..schema_limits import check_schema
from .forms import EXAMPLE, FORMS, Form, JsonForm, TagForm
from .lark import Lark
from .python_form import PythonForm
from .reading import Demanded
from .schemas import arguments_of, name_of
from .templates import bare_json, known_templates, python_calls


Render = Callable[..., str]
"""The chat template, for messages, with `tools` and `add_generation_prompt`."""

_ASKS = "zquser"
_TOOL: dict[str, Any] = {"name": EXAMPLE, "description": "a", "parameters": {"type": "object", "properties": {}}}


class SyntaxUnknown(Exception):
    """Raised for a chat template whose calls nothing that is known here reads."""


@dataclass(frozen=True)
class CallSyntax:
    """
    Args:
        template (`dict`): the response template that reads calls.
        form (`Form`): how calls are written.
        separator (`str`, *optional*): what is between two calls; None if the model makes one at a time.
        tokenizer (`PreTrainedTokenizerBase`): the model's.
    """

    template: dict[str, Any]
    form: Form
    separator: str | None
    tokenizer: Any

    @classmethod
    def of(cls, render: Render, tokenizer: Any, model: Any) -> CallSyntax | None:
        """
        The syntax of a model; None if its chat template writes no calls, or in a way that is not known.

        Args:
            render (`Callable`): the chat template.
            tokenizer (`PreTrainedTokenizerBase`): the model's.
            model: has its config and generation config.
        """
        asks = [{"role": "user", "content": _ASKS}]
        try:
            tools = [{"type": "function", "function": _TOOL}]
            prompt = render(asks, tools=tools, add_generation_prompt=True)
            before = prompt.removeprefix(render(asks, tools=tools, add_generation_prompt=False))
            written = _Written(render, asks, tools)
            written({"zqkey": "zqvalue"})
        except Exception:  # whatever a template makes of what it does not expect
            return None
        before, ends = "" if before == prompt else before, _ends(tokenizer, model)

        def in_python(form: PythonForm | None) -> CallSyntax | None:
            if form is None or not (before or own):
                return None
            return cls(python_calls(form, own, before, ends), form, form.separator, tokenizer)

        own = get_response_template(tokenizer, model)
        if own is not None and load_response_template(own).start_anchor_re.search(prompt) is None:
            own = None  # of another chat template
        bare = [bare_json(before, ends, arguments) for arguments in ("parameters", "arguments") if before]
        return (
            in_python(PythonForm.of(written, ends))
            or cls._read_by(known_templates(tokenizer, model), written, ends, tokenizer)
            or in_python(PythonForm.asked_for(prompt, render(asks, add_generation_prompt=True)))
            or cls._read_by(bare, written, ends, tokenizer)
        )

    @classmethod
    def _read_by(
        cls, templates: Iterable[dict[str, Any]], written: _Written, ends: list[str], tokenizer: Any
    ) -> CallSyntax | None:
        """The syntax of calls that one of these response templates reads."""
        for template in templates:
            spec = load_response_template(template)
            field = spec.fields.get("tool_calls")
            if field is None or field.open_re is None:
                continue
            reads = _Reading(spec, written, ends)
            try:
                for form in FORMS:
                    if (found := form.of(reads.call, reads.body, field.content_args)) is not None:
                        return cls(template, found, reads.separator(), tokenizer)
            except Exception:  # of a template that does not read it
                continue
        return None

    def grammar(self, tools: Sequence[Mapping[str, Any]], is_one: bool, may_begin_lines: bool = False) -> str:
        """
        The grammar of calls.

        Args:
            tools (`list`): those that may be called.
            is_one (`bool`): whether there is a single call, and not one or more.
            may_begin_lines (`bool`): whether line breaks may be before the first, as after reasoning.

        Raises:
            ValueError: for a schema that cannot be followed.
        """
        lark = Lark(special_tokens(self.tokenizer))
        call = self.form.call(lark, tools)
        more = "" if is_one or self.separator is None else f" ({lark.literal(self.separator)} {call})*"
        lines = r"/\n{0,2}/ " if may_begin_lines else ""
        opening, closing = map(lark.literal, self._around)
        return lark.grammar(f"{lines}{opening} {call}{more} {closing}")

    @property
    def _around(self) -> tuple[str, str]:
        """What is around all calls."""
        return (self.form.opening, self.form.closing) if isinstance(self.form, PythonForm) else ("", "")

    def demanded(self, tools: Sequence[Mapping[str, Any]], is_named: bool, in_pieces: bool) -> Demanded:
        """How calls of these tools are read that a grammar demands."""
        if not isinstance(self.form, JsonForm):
            form = self.form if isinstance(self.form, TagForm) else None
            json_keys = {} if form is None else {name_of(tool): form.json_keys(tool) for tool in tools}
            return Demanded(None, "", is_named, in_pieces, json_keys)
        return Demanded((self.form.name, self.form.arguments), self.form.closing, is_named, in_pieces)

    def check(self, tool: Mapping[str, Any]) -> str | None:
        """What is wrong with a tool's parameters, of which no grammar can be made; None if nothing is."""
        from llguidance import LLMatcher

        try:
            check_schema(arguments_of(tool))
            grammars = [LLMatcher.grammar_from_json_schema(arguments_of(tool)), self.grammar([tool], is_one=True)]
            check_grammar(grammars[1])
        except ValueError as error:
            return str(error)
        except RecursionError:  # in forms that write a rule for each part of a schema
            return "its parts are too deep within each other. Use fewer definitions that refer to further ones"
        found = map(LLMatcher.validate_grammar_with_warnings, grammars)
        return next((messages[0] for is_error, messages in found if is_error), None)


class _Written:
    """What the chat template writes of an assistant's calls."""

    def __init__(self, render: Render, asks: list[dict[str, Any]], tools: list[dict[str, Any]]):
        self._render, self._asks, self._tools = render, asks, tools

    def __call__(self, *arguments: dict[str, Any]) -> str:
        calls = [{"type": "function", "function": {"name": EXAMPLE, "arguments": one}} for one in arguments]
        return self._of({"role": "assistant", "content": "", "tool_calls": calls})

    def said(self, content: str) -> str:
        """What it writes of an answer without calls."""
        return self._of({"role": "assistant", "content": content})

    def _of(self, message: dict[str, Any]) -> str:
        text = self._render([*self._asks, message], tools=self._tools, add_generation_prompt=False)
        return text.rpartition(_ASKS)[2] if _ASKS in text else text


class _Reading:
    """
    How a response template reads what is written. Raises if it does not read it.

    Args:
        spec (`ResponseTemplate`), written (`_Written`): the template, and what writes.
        ends (`list[str]`): what ends an answer: it is no part of a call, although the template may read up to it.
    """

    def __init__(self, spec: ResponseTemplate, written: _Written, ends: list[str]):
        self._spec, self._written, self._ends = spec, written, ends
        self._field = spec.fields["tool_calls"]

    def call(self, arguments: dict[str, Any]) -> str:
        """A call from its opening mark to its closing one."""
        text, ((start, end),) = self._places(arguments)
        return text[start:end]

    def body(self, call: str) -> str | None:
        """What is between the marks."""
        opened = self._field.open_re.search(call)
        closed = None if self._field.close_re is None else self._field.close_re.search(call, opened.end())
        return call[opened.end() : closed.start() if closed else None]

    def separator(self) -> str | None:
        """What is between two calls; None if the chat template does not write two, or not so that they are read."""
        try:
            text, ((_, end), (start, _)) = self._places({"zqkey": "zqvalue"}, {"zqkey": "zqother"})
        except Exception:
            return None
        return text[end:start]

    def _places(self, *arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """What is written, and where each call begins and ends."""
        text = self._spec.truncate_past_last_anchor(self._written(*arguments))
        parser = ResponseParser(self._spec, prefix="")
        parser.feed(text)
        functions = [one["function"] for one in parser.finalize()[0]["tool_calls"]]
        if functions != [{"name": EXAMPLE, "arguments": one} for one in arguments]:
            raise SyntaxUnknown
        places, at = [], 0
        for _ in arguments:
            opened = self._field.open_re.search(text, at)
            closed = self._field.close_re.search(text, opened.end())
            start = opened.start() + len(opened.group()) - len(opened.group().lstrip())
            at = closed.start() if closed.group().strip() in self._ends else closed.end()
            places.append((start, at))
        return text, places


def _ends(tokenizer: Any, model: Any) -> list[str]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = [ends] if isinstance(ends, int) else list(ends or ())
    tokens += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer.decode([token]) for token in dict.fromkeys(tokens)]
