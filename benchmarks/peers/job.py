"""What every contender is given, and what it answers. Standard library only: other projects' environments read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """
    The work that is equal for all contenders.

    Args:
        target (`str`): Hub id or folder of the target; a folder with nothing but a config for random weights.
        dtype (`str`), device (`str`): as torch names them.
        prompts (`list[list[int]]`): token ids.
        open (`list[int]`): numbers of requests that are open at a time.
        temperatures (`list[float]`): 0 is greedy.
        new_tokens (`int`): tokens of every text, end tokens or not.
        turns (`int`), warm_up (`int`): timed turns over the prompts, and turns before them.
        seconds (`float`): time after which no further turn of a cell begins (one is timed in any case).
        prompts_per_turn (`int`): prompts of a turn where fewer requests are open.
        is_random (`bool`): whether the target's weights are random.
        acceptance_length (`float`, *optional*): tokens that each step is to make, whatever is proposed.
        heads (`dict[str, str]`): folders of the head by format.
        assistant (`str`, *optional*): folder of a small language model, for transformers' assisted generation.
        chain (`int`): draft tokens of chains.
        tree (`str`): our tree, as text.
        compile (`bool`): whether our forwards are compiled.
        eagle_code (`str`, *optional*): a checkout of SafeAILab's repository.
        arguments (`dict[str, dict]`): further arguments of engines, by contender.
    """

    target: str
    dtype: str
    device: str
    prompts: list[list[int]]
    open: list[int]
    temperatures: list[float]
    new_tokens: int
    turns: int = 3
    warm_up: int = 2
    seconds: float = 60.0
    prompts_per_turn: int = 4
    is_random: bool = False
    acceptance_length: float | None = None
    heads: dict[str, str] = field(default_factory=dict)
    assistant: str | None = None
    chain: int = 5
    tree: str = "default"
    compile: bool = False
    eagle_code: str | None = None
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def batches(self, number: int) -> list[list[list[int]]]:
        """The prompts of one turn with so many open requests, as batches that are given at once."""
        count = -(-max(number, self.prompts_per_turn) // number) * number
        chosen = [self.prompts[index % len(self.prompts)] for index in range(count)]
        return [chosen[start : start + number] for start in range(0, count, number)]

    @property
    def cells(self) -> list[tuple[float, int]]:
        """What is measured: temperatures, each with every number of open requests."""
        return [(temperature, number) for temperature in self.temperatures for number in self.open]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its text."""
        return max(map(len, self.prompts)) + self.new_tokens

    def write(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Reads what `write` has written."""
        return cls(**json.loads(path.read_text()))


@dataclass
class Answers:
    """
    New tokens by prompt, and what speculation did for them.

    Args:
        tokens (`list[list[int]]`): the new tokens of every prompt.
        drafts (`int`, *optional*): drafts that were verified, over all rows; None if the engine does not say.
        accepted (`int`, *optional*): draft tokens that were accepted.
    """

    tokens: list[list[int]]
    drafts: int | None = None
    accepted: int | None = None


class Engine(Protocol):
    """
    A contender, loaded. `ran_with` says its versions and arguments, for JSON.
    """

    ran_with: dict[str, Any]

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        """Completes prompts, all of which are given at once."""
        ...

    def close(self) -> None:
        """Ends the engine's processes, if it has any."""
        ...


def versions(*packages: str) -> dict[str, str]:
    """The versions of installed packages."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
