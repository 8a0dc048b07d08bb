"""Conversations and plain texts, read from files or `datasets`, as token ids with a loss mask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .bad_records import BadRecord, BadRecords


_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant"}
_SHAPES = '{"messages": [{"role", "content"}, …]}, {"conversations": [{"from", "value"}, …]} or {"text": …}'


@dataclass(frozen=True)
class Text:
    """
    One text as tokens.

    Args:
        input_ids (sequence of `int`): all tokens of the text.
        spans (`list[tuple[int, int]]`): half-open ranges of tokens under the loss mask, those that the target would
            write.
        job (`int`, *optional*): number of the conversation, for a text that the target wrote.
    """

    input_ids: Sequence[int]
    spans: list[tuple[int, int]]
    job: int | None = None

    def to_json(self) -> str:
        """The text as one line of a .jsonl file of tokens, without the newline."""
        fields = {"input_ids": list(self.input_ids), "spans": self.spans} | (
            {} if self.job is None else {"job": self.job}
        )
        return json.dumps(fields, separators=(",", ":"))


def read_records(
    source: str | Path,
    split: str = "train",
    limit: int | None = None,
    option: str = "data",
    bad: BadRecords | None = None,
) -> Iterator[tuple[str, Any]]:
    """
    Reads the records of a file (.jsonl, .json with a list, .txt as one text) or of a `datasets` data set.

    Args:
        source (`str`): a path, or a name for `datasets.load_dataset`.
        split (`str`, *optional*, defaults to `"train"`): split of a `datasets` data set.
        limit (`int`, *optional*): largest number of records to read.
        option (`str`, *optional*, defaults to `"data"`): name of the option that gave the source, for error messages.
        bad (`BadRecords`, *optional*): skips lines that are not JSON; without it they raise.

    Yields:
        Pairs of the record's location, for error messages, and the record.

    Raises:
        FileNotFoundError: if the source looks like a file that does not exist.
        BadRecord: for a .jsonl line that is not JSON, unless `bad` skips it.
        ValueError: for a .json file that is not JSON or has no list, and a .txt file that is not UTF-8.
        ImportError: if `datasets` is needed and not installed.
    """
    path = Path(source)
    if path.is_file():
        records = _read_file(path, bad or BadRecords(strict=True))
    elif path.suffix in (".jsonl", ".json", ".txt"):
        raise FileNotFoundError(f"`{option}`={str(source)!r}: there is no such file.")
    else:
        records = _read_dataset(str(source), split, option)
    for number, (place, record) in enumerate(records):
        if limit is not None and number >= limit:
            return
        yield place, record


def _read_file(path: Path, bad: BadRecords) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".txt":
        yield str(path), {"text": _of_file(path, str)}
        return
    if path.suffix == ".json":
        records = _of_file(path, json.loads)
        if not isinstance(records, list):
            raise ValueError(f"{path}: a .json file must hold a list of records. Use .jsonl for one record per line.")
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, 1))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                reason = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
                problem = BadRecord(f"{path}, line {number} is not {reason}: {error}.")
                problem.__cause__ = error
                bad.skip(problem)
                continue
            yield f"{path}, line {number}", record


def _of_file(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise ValueError(f"{path} is not {reason}: {error}. Write it again.") from error


def _read_dataset(name: str, split: str, option: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"`{option}`={name!r} is no file here, and to load it as a data set `datasets` is missing: `pip install "
            "datasets`, or `pip install 'hf-specdec[train]'`."
        ) from error
    data = datasets.load_dataset(name, split=split)
    yield from ((f"{name}, {split}, record {number}", record) for number, record in enumerate(data))


def messages_of(record: Any, place: str) -> list[dict[str, str]] | None:
    """
    The messages of a record, each `{"role", "content"}`; None if the record is a plain text.

    Raises:
        BadRecord: if the record is neither a conversation nor a plain text, or is empty, naming `place`.
    """
    if isinstance(record, dict):
        turns = record.get("messages") or record.get("conversations")
        has_text = isinstance(record.get("text"), str)
        if not turns and not has_text and ("messages" in record or "conversations" in record):
            raise BadRecord(f"{place}: the conversation has no turns: {_short(record)}.")
        if turns and isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            messages = []
            for turn in turns:
                role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
                if not isinstance(role, str) or not isinstance(content, str):
                    raise BadRecord(f"{place}: a turn needs a role and a text, but is {_short(turn)}.")
                _check_characters(content, place)
                messages.append({"role": _ROLES.get(role.lower(), role.lower()), "content": content})
            return messages
        if has_text and not record["text"]:
            raise BadRecord(f"{place}: the text is empty.")
        if has_text:
            _check_characters(record["text"], place)
            return None
    raise BadRecord(f"{place}: a record must look like {_SHAPES}, but is {_short(record)}.")


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"{place}: the text holds half of a character, {text[error.start]!r}.") from error


def encode_record(record: Any, place: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> Text:
    """
    Tokenizes a record. The loss mask covers the assistant's turns with their end tokens, or all of a plain text.

    Args:
        record: a record of `read_records`, or a dictionary of tokens as `Text.to_json` writes it.
        place (`str`): location of the record, for error messages.
        tokenizer (`PreTrainedTokenizerBase`): tokenizer; it needs a chat template if the record is a conversation.
        vocab_size (`int`, *optional*): tokens that the target knows.

    Raises:
        BadRecord: for records of other shapes, those that tokenizer or chat template refuse, and tokens that the
            target does not know.
        ValueError: for conversations without a chat template or with a slow tokenizer.
    """
    if isinstance(record, dict) and "input_ids" in record:
        ids, spans = _given_tokens(record, place)
    elif (messages := messages_of(record, place)) is None:
        ids = _tokenize(tokenizer, record["text"], place)["input_ids"]
        spans = [(0, len(ids))]
    else:
        ids, spans = encode_chat(messages, tokenizer, place)
    if vocab_size is not None and max(ids, default=0) >= vocab_size:
        raise BadRecord(f"{place}: token {max(ids)} is beyond the target's vocabulary of {vocab_size} tokens.")
    return Text(ids, spans)


def _given_tokens(record: dict[str, Any], place: str) -> tuple[list[int], list[tuple[int, int]]]:
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRecord(f"{place}: `input_ids` must be a list of tokens, but is {_short(ids)}.")
    spans = record.get("spans", [(0, len(ids))])
    try:
        found = [(start, end) for start, end in spans]
    except (TypeError, ValueError):
        found = [(1, 0)]
    if not all(type(start) is int and type(end) is int and 0 <= start <= end <= len(ids) for start, end in found):
        raise BadRecord(
            f"{place}: `spans` must be pairs (first, end) within {len(ids)} tokens, but is {_short(spans)}."
        )
    return ids, found


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, place: str, **options: Any) -> Any:
    try:
        return tokenizer(text, **options)
    except (TypeError, ValueError) as error:  # such as a lone surrogate, which is no text
        raise BadRecord(f"{place}: the tokenizer refuses the text: {_first_line(error)}") from error


def encode_chat(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, place: str = "a conversation"
) -> tuple[list[int], list[tuple[int, int]]]:
    """
    Token ids of a conversation as the chat template renders it, and the half-open ranges of the assistant's tokens.

    The template is rendered up to the start and up to the end of every assistant turn; where both are prefixes of the
    whole rendering, the turn lies between them. In other templates (such as templates that drop the thoughts of
    earlier turns) the content of the turn is searched for in the whole rendering.

    Raises:
        BadRecord: if chat template or tokenizer refuse the conversation.
        ValueError: if the tokenizer has no chat template, or is a slow one without character offsets.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{place} is a conversation, but the target's tokenizer has no chat template. Use records with a "
            '"text", or a target that chats.'
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"`target`: {type(tokenizer).__name__} is a slow tokenizer, which knows no offsets. Use text."
        )
    whole = rendered(tokenizer, messages, place)
    ranges, position = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True)
        through = _render(tokenizer, messages[: index + 1])
        if before is not None and through is not None and whole.startswith(before) and whole.startswith(through):
            ranges.append((len(before), len(through)))
            position = len(through)
            continue
        words = message["content"].strip()
        start = whole.find(words, position)
        if start >= 0 and words:
            ranges.append((start, position := start + len(words)))
    encoding = _tokenize(tokenizer, whole, place, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoding["input_ids"]
    spans = [_token_span(encoding["offset_mapping"], ids, span, tokenizer) for span in ranges]
    return ids, [(start, end) for start, end in spans if end > start]


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], place: str, **options: Any) -> str:
    """
    A conversation as the chat template renders it; `options` are those of `apply_chat_template`.

    Raises:
        BadRecord: if the template refuses the conversation, such as turns that do not alternate.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, LookupError, TypeError, ValueError) as error:
        raise BadRecord(f"{place}: the chat template refuses the conversation: {_first_line(error)}") from error


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **options: Any) -> str | None:
    try:
        return rendered(tokenizer, messages, "", **options)
    except BadRecord:  # a template may refuse messages that end with this turn
        return None


def _token_span(
    offsets: list[tuple[int, int]], ids: list[int], span: tuple[int, int], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """Half-open range of the tokens that begin in `span`, a range of characters, up to the first end token."""
    inside = [index for index, (start, end) in enumerate(offsets) if span[0] <= start < span[1] and end > start]
    if not inside:
        return 0, 0
    first, last = inside[0], inside[-1]
    for index in range(first, last + 1):
        if ids[index] == tokenizer.eos_token_id:
            return first, index + 1  # the target does not write the template's text after the end token
    return first, last + 1


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
