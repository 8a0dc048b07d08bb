"""Files of texts that a target writes, one line each, which outlive a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm.auto import tqdm

from .data import Text


def read_written(path: Path) -> list[Text]:
    """The texts in a file of `write_texts`; an incomplete last line of a killed run is removed from the file."""
    if not path.is_file():
        return []
    texts = list(iterate_written(path))
    with path.open("rb+") as file:
        data = file.read()
        if not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
    return texts


def iterate_written(path: Path) -> Iterator[Text]:
    """Yields the texts in a file of `write_texts` one by one, without an incomplete last line."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                fields = json.loads(line)
                yield Text(fields["input_ids"], [tuple(span) for span in fields["spans"]], fields.get("job"))


def written_jobs(path: Path) -> set[int]:
    """The job numbers in a file of `write_texts`, read from the ends of the lines only."""
    with path.open("rb") as lines:
        return {int(line[line.rindex(b":") + 1 : -2]) for line in lines if line.endswith(b"}\n") and b'"job":' in line}


def write_texts(
    path: Path,
    texts: Iterable[Text],
    total: int | None,
    done: int = 0,
    progress: bool = True,
    description: str = "Target writes",
) -> int:
    """
    Appends texts to a file as they come, one line each, with a progress bar; a kill loses only unfinished texts.

    Args:
        path (`Path`): the .jsonl file.
        texts (iterable of `Text`): texts to append.
        total (`int`, *optional*): number of texts that there will be, for the progress bar; None if unknown.
        done (`int`, *optional*, defaults to 0): texts that exist already.
        progress (`bool`, *optional*, defaults to `True`): whether to show the bar.
        description (`str`, *optional*): label of the bar.

    Returns:
        `int`: `done` plus the texts appended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = 0
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=total, initial=done, desc=description, unit="text", disable=not progress) as bar,
    ):
        for text in texts:
            file.write(text.to_json() + "\n")
            file.flush()
            done += 1
            tokens += len(text.input_ids)
            bar.update(1)
            bar.set_postfix(tokens=tokens, refresh=False)
    return done
