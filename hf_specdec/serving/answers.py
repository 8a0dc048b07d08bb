"""The parts of an answer (content, reasoning, tool calls): the same as tokens come, and of all of them at once."""

from __future__ import annotations

import json
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.utils.chat_parsing import ResponseParser

from .calls import CallReader, Demanded
from .decoding import beside
from .reasoning import FIELDS
from .text_pieces import TextPieces
from .total_parser import TotalParser


_KINDS: dict[str | None, type[str]] = {"content": str, **dict.fromkeys(FIELDS, ReasoningText)}
"""What the text of a field is for clients. Other fields of a response template are none of theirs."""
MOST_FED = 256
"""Characters of a whole text that it is given at once: after each delimiter it searches all of them for others."""


def is_cut(gen_config: GenerationConfig) -> bool:
    """Whether the request with these options is over, and its text as long as it may be; see `OneRequest`."""
    return gen_config.max_new_tokens == 0


def may_have_parts(gen_config: GenerationConfig) -> bool:
    """Whether the answer may have parts that a response template finds: not where all of it is of a grammar."""
    return not _is_of_a_grammar(gen_config) or beside(gen_config).grammar_after is not None


def _is_of_a_grammar(gen_config: GenerationConfig) -> bool:
    """Whether all of the answer but reasoning is of a grammar, and is not read by the response template."""
    demanded = beside(gen_config).demanded
    return getattr(gen_config, "grammar", None) is not None and (demanded is None or demanded.keys is not None)


def left_out(tokenizer: PreTrainedTokenizerBase, gen_config: GenerationConfig) -> frozenset[int]:
    """Tokens that end the text and are no part of it. (Special ones are left out where there are no parts.)"""
    own, special = beside(gen_config), frozenset(tokenizer.all_special_ids)
    if _is_of_a_grammar(gen_config) and own.grammar_after is not None:
        return own.left_out | special - {*own.grammar_after.end, own.grammar_after.start}
    if own.demanded is not None:  # the end token ends the last call, whatever the template knows of it
        ends = gen_config.eos_token_id
        given = ends if isinstance(ends, list) else [ends]
        return own.left_out | {token for token in (*given, tokenizer.eos_token_id) if token is not None}
    return own.left_out - special if own.left_out else own.left_out


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, gen_config: GenerationConfig, parser: ResponseParser | None
) -> AnswerPieces:
    """
    What makes the parts of the answer to a request with these options.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        gen_config (`GenerationConfig`): the options.
        parser (`ResponseParser`, *optional*): of the model's response template; has read the prompt.
    """
    own, only_reasons = beside(gen_config), _is_of_a_grammar(gen_config)
    if parser is None or not may_have_parts(gen_config):
        total = None
    else:
        total = TotalParser.over(parser, only_reasons, own.tools)
    return AnswerPieces(tokenizer, total, left_out(tokenizer, gen_config), own.demanded, own.is_one_call)


class AnswerPieces:
    """
    Makes the parts of an answer from its tokens: text of the content (`str`) and of the reasoning (`ReasoningText`),
    and calls (`ToolCall`). Joined, the pieces of each kind are what an unstreamed answer has.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        parser (`TotalParser`, *optional*): reads the parts by the model's response template; has read the prompt,
            and no token yet. By default all text is content.
        left_out (`frozenset[int]`): tokens that are no part of the text.
        demanded (`Demanded`, *optional*): that the content is calls.
        is_one_call (`bool`): whether calls after the first one are left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: TotalParser | None = None,
        left_out: frozenset[int] = frozenset(),
        demanded: Demanded | None = None,
        is_one_call: bool = False,
    ):
        self._left_out, self._demanded, self._is_one_call = left_out, demanded, is_one_call
        keys = None if demanded is None else demanded.keys
        self._reader = None if keys is None or demanded is None else CallReader(keys, demanded)
        self._tokenizer, self._parser, self._num_calls = tokenizer, parser, 0
        self._texts = TextPieces(tokenizer, skip_special_tokens=parser is None)
        self._last: int | None = None
        self._kind: type[str] | None = None
        """What the text of the present region is; None if it is not told."""
        self._told: set[type[str]] = set()
        self._is_new = self._is_told = self._follows_raw = False
        """Whether the region has told nothing yet, has told its text, and follows raw text."""
        self._space = ""
        """White space that is told if text of the same region, or raw text, follows."""

    def begin(self) -> list[Any]:
        """The parts that the prompt begins."""
        return [] if self._parser is None else self._parts_of(self._parser.initial_events)

    def add(self, token: int) -> list[Any]:
        """The parts that are newly known with the next token."""
        if token in self._left_out:
            return []
        self._last = token
        return self._parts_in(self._texts.add(token))

    def add_all(self, tokens: list[int]) -> list[Any]:
        """The parts of a whole answer."""
        tokens = [token for token in tokens if token not in self._left_out] if self._left_out else tokens
        self._last = tokens[-1] if tokens else None
        return self._parts_in(self._tokenizer.decode(tokens, skip_special_tokens=self._parser is None))

    @property
    def num_waiting(self) -> int:
        """Number of tokens whose text is known only at the end."""
        return self._texts.num_waiting

    def end(self, is_cut: bool) -> list[Any]:
        """
        The last parts.

        Args:
            is_cut (`bool`): whether the text is as long as it may be. Otherwise its last token may be an end token,
                which raw text leaves out.
        """
        parts = self._parts_in(self._texts.rest())
        if self._parser is None:
            return parts + self._end_of_calls(is_cut)
        events = self._parser.end()
        if not is_cut and self._last is not None and self._last in self._tokenizer.all_special_ids:
            end = self._tokenizer.decode([self._last])
            for event in events:
                if event["type"] == "raw":
                    event["text"] = event["text"].removesuffix(end)
        return parts + self._parts_of(events) + self._end_of_calls(is_cut)

    def _end_of_calls(self, is_cut: bool) -> list[Any]:
        last = [] if self._reader is None else self._reader.end()
        return last + ([] if self._demanded is None else self._demanded.end(is_cut))

    def _parts_in(self, text: str) -> list[Any]:
        if not text:
            return []
        if self._parser is None:
            return [text] if self._reader is None else self._reader.feed(text)
        parts: list[Any] = []
        for at in range(0, len(text), MOST_FED):
            parts += self._parts_of(self._parser.feed(text[at : at + MOST_FED]))
        return parts

    def _parts_of(self, events: list[dict[str, Any]]) -> list[Any]:
        parts: list[Any] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self._kind, self._is_new, self._is_told = _KINDS.get(field), True, False
            elif kind == "region_chunk" and not event.get("dirty"):
                parts += self._text(field, event["text"])
            elif kind == "region_close":
                parts += self._closed(field, event["value"])
            elif kind == "raw" and not self._is_told:
                parts.append(self._space + event["text"])
                self._told.add(str)
                self._space, self._follows_raw = "", True
        return parts

    def _text(self, field: str, text: str) -> list[Any]:
        """Text of the present region, without the white space around it."""
        if self._kind is None or self._parser is None:
            return []
        self._is_told = True
        if not self._parser.strips(field):
            self._space = ""
            return self._said(text)
        text = self._space + text
        if self._is_new and not self._follows_raw and text.strip():
            text = ("\n" if self._kind in self._told else "") + text.lstrip()
        told = text.rstrip()
        self._space = text[len(told) :]
        return self._said(told)

    def _said(self, text: str) -> list[Any]:
        if not text or self._kind is None:
            return []
        self._told.add(self._kind)
        self._is_new = self._follows_raw = False
        return self._reader.feed(text) if self._reader is not None and self._kind is str else [self._kind(text)]

    def _closed(self, field: str, value: Any) -> list[Any]:
        if field == "tool_calls":
            self._space, self._follows_raw = "", False
            return [part for one in value if isinstance(one, ToolCall) for part in self._called(one)]
        if self._kind is None:
            return []
        parts: list[Any] = []
        if not self._is_told:  # structured, and known only now
            parts = self._text(field, value if isinstance(value, str) else json.dumps(value))
        if self._kind is ReasoningText:
            self._space = ""
        return parts

    def _called(self, call: ToolCall) -> list[Any]:
        """The parts of a call that is complete. (What is no `ToolCall` is a call in the prompt.)"""
        self._num_calls += 1
        if self._is_one_call and self._num_calls > 1:
            return []
        return [call] if self._demanded is None else self._demanded.told(call, self._num_calls - 1)
