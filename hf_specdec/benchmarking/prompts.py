"""Prompts of a benchmark: built-in sets, or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase


TASKS = ("chat", "code", "summarise", "translate", "maths", "rag")
"""Names of the built-in prompt sets, which were written for this project."""

_BUILT_IN = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """
    A prompt as text.

    Args:
        task (`str`): kind of text, by which figures are grouped.
        text (`str`): the user's turn.
        later_turns (`tuple[str, ...]`): what the user says after the answers.
    """

    task: str
    text: str
    later_turns: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """
    A prompt as tokens.

    Args:
        task (`str`): kind of text, by which figures are grouped.
        inputs (`BatchEncoding`): `input_ids` `[1, tokens]` int64, and the other inputs of `generate`.
        question (`int`, *optional*): number of the question of which it is a turn; None: a question of its own.
    """

    task: str
    inputs: BatchEncoding
    question: int | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return self.inputs["input_ids"].shape[1]


def built_in(tasks: Sequence[str] = TASKS, num_prompts: int | None = None) -> list[Prompt]:
    """
    The prompts that come with the package.

    Args:
        tasks (`Sequence[str]`): names from `TASKS`.
        num_prompts (`int`, *optional*): most prompts of each task.

    Raises:
        ValueError: for a name that is not in `TASKS`.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no built-in set of prompts. There are {', '.join(TASKS)}.")
    return first_of_each(sorted(read(_BUILT_IN), key=lambda prompt: TASKS.index(prompt.task)), num_prompts, tasks)


def read(path: Path) -> list[Prompt]:
    """
    Reads prompts from a file: one prompt per line, or, in a .jsonl file, one object per line with `prompt` and
    optionally `task`. The default task is the file's name without its suffix.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file holds no prompts, or a line of a .jsonl file is not an object with a `prompt`.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [
        _object(path, number, line) if path.suffix == ".jsonl" else Prompt(path.stem, line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ValueError(f'{path} holds no prompts. Write one a line, or {{"prompt": "…"}} a line in a .jsonl.')
    return found


def _object(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}, is not valid JSON ({error}).") from error
    text, task = (value.get("prompt"), value.get("task", path.stem)) if isinstance(value, dict) else (None, None)
    if not isinstance(text, str) or not text.strip() or not isinstance(task, str):
        raise ValueError(f'{path}, line {number}: write {{"task": "chat", "prompt": "…"}}; `task` may be left out.')
    return Prompt(task, text)


def first_of_each(
    prompts: Iterable[Prompt], num_prompts: int | None, tasks: Sequence[str] | None = None
) -> list[Prompt]:
    """At most `num_prompts` prompts of each task, of the given `tasks` only."""
    counts: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        counts[prompt.task] = counts.get(prompt.task, 0) + 1
        if (tasks is None or prompt.task in tasks) and (num_prompts is None or counts[prompt.task] <= num_prompts):
            kept.append(prompt)
    return kept


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], device: str | torch.device
) -> list[EncodedPrompt]:
    """Tokenizes prompts onto a device, with the tokenizer's chat template if it has one."""
    return [EncodedPrompt(prompt.task, encode_turns(tokenizer, [prompt.text]).to(device)) for prompt in prompts]


def encode_turns(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> BatchEncoding:
    """
    Tokenizes texts, each as the user's turn if the tokenizer has a chat template, else as it is; see
    `encode_messages`.
    """
    return encode_messages(tokenizer, [[{"role": "user", "content": text}] for text in texts])


def encode_messages(tokenizer: PreTrainedTokenizerBase, chats: Sequence[list[dict[str, str]]]) -> BatchEncoding:
    """
    Tokenizes conversations that the model is to answer: as the tokenizer's chat template has them, or else their
    contents with empty lines between them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        chats (`Sequence[list[dict[str, str]]]`): messages with `role` and `content`.

    Returns:
        `BatchEncoding`: `input_ids` and `attention_mask`, `[chats, tokens]` int64, padded on the left. There are no
            `token_type_ids`, which many models refuse: text is of one type.

    Raises:
        ValueError: for several chats, by a tokenizer without a padding token.
    """
    padding: dict[str, Any] = {"padding": True, "padding_side": "left"} if len(chats) > 1 else {}
    if tokenizer.chat_template is None:
        texts = ["\n\n".join(message["content"] for message in messages) for messages in chats]
        inputs = tokenizer(texts, return_tensors="pt", **padding)
    else:
        side = {"padding_side": padding.pop("padding_side")} if padding else None
        inputs = tokenizer.apply_chat_template(
            list(chats),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            tokenizer_kwargs=side,
            **padding,
        )
    inputs.pop("token_type_ids", None)
    return inputs
