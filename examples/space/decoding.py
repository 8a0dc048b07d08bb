"""A `generate` call in a thread, and what it has written so far: tokens, and the steps that they came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import DraftTree, SpeculationMetrics
from hf_specdec.drafters import ObservedDrafter, as_drafter


SECONDS_BETWEEN_UPDATES = 0.2


@dataclass
class Step:
    """
    One step of a speculative call.

    Args:
        root (`int`): the token that the tree grows from.
        tokens (`list[int]`): the tokens of its nodes, from node 1 on; -1 where a node does not count.
        parents (`list[int]`): for every node from 1 on, its parent; 0 is the root.
        path (`list[int]`): the accepted nodes, from the root's child down.
        own (`int`, *optional*): the bonus or recovered token, once it is written.
    """

    root: int
    tokens: list[int]
    parents: list[int]
    path: list[int]
    own: int | None = None

    @classmethod
    def of(cls, root: int, draft: DraftTree | None, path: list[int]) -> Step:
        """The step of a call of one row."""
        if draft is None:
            return cls(root, [], [], path)
        return cls(root, draft.tokens_list[0], draft.topology.parents[0, 1:].tolist(), path)

    @property
    def num_drafted(self) -> int:
        """Nodes that count."""
        return sum(token >= 0 for token in self.tokens)

    @property
    def origin_of_own(self) -> str:
        """`bonus` if nothing was rejected: the last accepted node has no children. Else `recovered`."""
        last = self.path[-1] if self.path else 0
        children = [
            node for node, parent in enumerate(self.parents, 1) if parent == last and self.tokens[node - 1] >= 0
        ]
        return "recovered" if children else "bonus"


@dataclass(frozen=True)
class Token:
    """
    A token that was written.

    Args:
        id (`int`): the token.
        origin (`str`): `accepted`, `bonus`, `recovered`, or `plain` where nothing was drafted.
        depth (`int`): the depth at which it was accepted, else 0.
        step (`int`, *optional*): its step, from 0 on; None for the first token, which comes from the prefill.
    """

    id: int
    origin: str = "plain"
    depth: int = 0
    step: int | None = None


@dataclass
class Recording(BaseStreamer):
    """What a call has written so far. `generate` puts the tokens in, an `ObservedDrafter` the steps."""

    tokens: list[Token] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    metrics: SpeculationMetrics | None = None
    seconds: float = 0.0
    done: bool = False

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def tokens_per_second(self) -> float:
        """Prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def start(self) -> None:
        self._started, self._has_prompt, self._in_step = time.perf_counter(), False, 0

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then every token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.tokens.append(self._token(int(value)))
        self.seconds = time.perf_counter() - self._started

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._started

    def observe(self, draft: DraftTree | None, paths: list[list[int] | None]) -> None:
        """A step, before its tokens are put."""
        path = paths[0] or []
        self.metrics = self.metrics or SpeculationMetrics()
        self.metrics.add_draft(0 if draft is None else draft.num_valid(0), len(path))
        self.steps.append(Step.of(self.tokens[-1].id, draft, path))
        self._in_step = 0

    def _token(self, token: int) -> Token:
        if not self.steps:
            return Token(token)
        step, number = self.steps[-1], len(self.steps) - 1
        self._in_step += 1
        if self._in_step <= len(step.path):
            return Token(token, "accepted", self._in_step, number)
        step.own = token
        return Token(token, step.origin_of_own if step.num_drafted else "plain", 0, number)


class StopWhen(StoppingCriteria):
    """Ends a call when an event is set."""

    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), dtype=torch.bool, device=input_ids.device)


def decode(model: PreTrainedModel, inputs: BatchEncoding, draft: Any = None, **options: Any) -> Iterator[Recording]:
    """
    Runs one `generate` call, plain if there is no draft, in a thread of its own, and yields what it has written a few
    times per second, and once when it is done. Closing the iterator ends the call.

    Args:
        draft: what `assistant_model=` takes.
        options: those of `generate`.

    Raises:
        ValueError, TypeError: what `generate` refuses.
    """
    recording, stop, errors = Recording(), threading.Event(), []
    if draft is not None:
        options["assistant_model"] = ObservedDrafter(as_drafter(draft), recording.observe)

    def run() -> None:
        try:
            recording.start()
            model.generate(**inputs, **options, streamer=recording, stopping_criteria=[StopWhen(stop)])
            if draft is not None:
                recording.metrics = hf_specdec.last_metrics()  # which leaves out what came after the text's end
        except Exception as error:  # raised again by whoever reads the iterator
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(SECONDS_BETWEEN_UPDATES)
            yield recording
        if errors:
            raise errors[0]
        recording.done = True
        yield recording
    finally:
        stop.set()
        thread.join()


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> BatchEncoding:
    """
    The prompt as the user's turn where the model chats, else as it is, `[1, tokens]`.

    Raises:
        ValueError: if there is none.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty. Type a question or a task.")
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return inputs.to(device)
