"""
Texts that the target writes itself: training data from the target's own distribution by construction.

All rows of a batch are decoded as long as there is work. A row whose conversation ends begins the next one in place:
its slots of the cache count as empty again. No row waits for another.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..attention.kernel import NODES_PER_WORD
from ..cache import TreeCache
from ..cache.sizes import bytes_per_token
from ..forwards.node_inputs import causal_chain
from ..forwards.outputs import over_trees
from ..forwards.tree_forward import TreeForward
from ..generation.model_refusals import check_batching, check_target
from ..graphs import GraphStore, obstacle_to_graphs
from ..models.structure import execution_device
from ..states import layer_kinds_of
from .data import Text
from .scripts import ScriptPart


_MOST_ROWS = {"cuda": 2048, "cpu": 16}
_SHARE_OF_MEMORY = 0.5  # share of free memory for keys and values


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """
    Sampling parameters of a target that writes texts.

    Questions are drawn at temperature 1. Some answers are greedy and some nearly greedy, because heads are mostly used
    on such text; the other answers have temperatures drawn uniformly from a range.

    Args:
        greedy_share (`float`, *optional*, defaults to 0.3): share of the answers at temperature 0.
        cool_share (`float`, *optional*, defaults to 0.2): share of the answers at temperature 0.3.
        low, high (`float`, *optional*, defaults to 0.6 and 1.0): range of temperatures of the other answers.
        min_p (`float`, *optional*, defaults to 0.02): tokens below this share of the best token's probability are not
            drawn.
    """

    greedy_share: float = 0.3
    cool_share: float = 0.2
    low: float = 0.6
    high: float = 1.0
    min_p: float = 0.02

    def temperature(self, writer: str, numbers: random.Random) -> float:
        """Draws the temperature for a part of a conversation. Plain texts are drawn like answers."""
        if writer == "user":
            return 1.0
        draw = numbers.random()
        if draw < self.greedy_share:
            return 0.0
        return 0.3 if draw < self.greedy_share + self.cool_share else numbers.uniform(self.low, self.high)


@dataclass
class _Slot:
    """A row of the batch and the conversation in it."""

    job: int = -1
    parts: deque[ScriptPart] = field(default_factory=deque)
    part: ScriptPart | None = None
    given: deque[int] = field(default_factory=deque)
    temperature: float = 0.0
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    written_from: int = 0

    @property
    def is_idle(self) -> bool:
        return self.part is None


class Writer:
    """
    Generates conversations with a target, in continuously refilled rows.

    Args:
        target (`PreTrainedModel`): a decoder with a K/V cache.
        max_length (`int`): most tokens of a conversation.
        batch_size (`int`): rows of a forward.
        max_question (`int`, *optional*, defaults to 200): most tokens of a question.
        sampling (`Sampling`, *optional*): temperatures and min-p.
        seed (`int`, *optional*, defaults to 0): seed of temperatures and tokens.

    Raises:
        ValueError: for a target whose forwards cannot run over trees, or one with recurrent or convolutional layers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        max_length: int,
        batch_size: int,
        max_question: int = 200,
        sampling: Sampling | None = None,
        seed: int = 0,
    ):
        try:
            check_target(target)
            check_batching(target)
        except ValueError as error:
            raise ValueError(
                f"The target {type(target).__name__} cannot write texts here: {error} Let it write by `generate`, and "
                "give what it wrote with `data`."
            ) from error
        if layer_kinds_of(target) is not None:
            raise ValueError(
                f"The target {type(target).__name__} has recurrent or convolutional layers: rows that begin a new "
                "text in place cannot forget their states. Let it write by `generate_batch`, and give what it wrote "
                "with `data`."
            )
        self.target = target.eval()
        self.max_length, self.batch_size, self.max_question = max_length, batch_size, max_question
        self.sampling = sampling or Sampling()
        self._numbers = random.Random(seed)
        self._generator = torch.Generator(target.device).manual_seed(seed)

    def write(
        self, jobs: Iterable[tuple[int, list[ScriptPart]]], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Text]:
        """
        Writes one text for every job, and yields each as it ends, in any order.

        Args:
            jobs (iterable of `tuple[int, list[ScriptPart]]`): number and parts of each conversation.
            should_stop (callable, *optional*): called every 16 steps; if true, unfinished conversations are lost.

        Yields:
            `Text`: the text; without `spans` if no answer was written, and without tokens if the first part's given
                tokens alone reach `max_length`.
        """
        with over_trees(self.target):
            yield from self._write(iter(jobs), should_stop)

    @torch.inference_mode()
    def _write(self, queue: Iterator[tuple[int, list[ScriptPart]]], should_stop: Callable[[], bool]) -> Iterator[Text]:
        too_long: list[Text] = []
        slots = [_Slot() for _ in range(self.batch_size)]
        forward, device = self._forward(), self.target.device
        step = 0
        while True:
            for slot in slots:
                if slot.is_idle:
                    self._begin(slot, queue, too_long)
            yield from too_long
            too_long.clear()
            if all(slot.is_idle for slot in slots) or (step % 16 == 0 and should_stop()):
                return
            tokens = [slot.given.popleft() if slot.given else 0 for slot in slots]
            forward.cache.set_lengths([len(slot.ids) for slot in slots])  # 0 where a conversation begins
            output = forward(torch.tensor(tokens, device=device)[:, None], *causal_chain(1, device))
            drawn = self._draw(output.logits[:, -1], [slot.temperature for slot in slots])
            for slot, fed, token in zip(slots, tokens, drawn, strict=True):
                if slot.part is None:
                    continue
                slot.ids.append(fed)
                if not slot.given and (text := self._take(slot, slot.part, token)) is not None:
                    yield text
            step += 1

    def _forward(self) -> TreeForward:
        """Forwards of the target over the next token of every row, replayed from a CUDA graph where it can be."""
        target, capacity = self.target, self.max_length + NODES_PER_WORD
        with_graphs = obstacle_to_graphs(target, "auto") is None
        cache = TreeCache(
            target.config.get_text_config(decoder=True).num_hidden_layers,
            self.batch_size,
            execution_device(target),
            capacity=capacity,
            storage=GraphStore(capacity) if with_graphs else None,
        )
        return TreeForward(target, cache, None, torch.zeros(self.batch_size, dtype=torch.long, device=cache.device))

    def _begin(self, slot: _Slot, queue: Iterator[tuple[int, list[ScriptPart]]], too_long: list[Text]) -> None:
        for job, parts in queue:
            if 0 < len(parts[0].given) < self.max_length:
                slot.job, slot.parts, slot.ids, slot.spans = job, deque(parts), [], []
                self._next_part(slot)
                return
            too_long.append(Text([], [], job))
        slot.part, slot.ids = None, []

    def _next_part(self, slot: _Slot) -> None:
        part = slot.part = slot.parts.popleft()
        slot.given = deque(part.given)
        slot.written_from = len(slot.ids) + len(slot.given)
        slot.temperature = self.sampling.temperature(part.writer, self._numbers)

    def _take(self, slot: _Slot, part: ScriptPart, token: int) -> Text | None:
        """Adds the token that a row drew to its part of the conversation. Returns the text if that ended."""
        length = len(slot.ids)
        limit = slot.written_from + (self.max_question if part.writer == "user" else self.max_length)
        ended = token in part.ends
        if not ended or part.keeps_end:
            slot.given.append(token)  # fed at the next step
            length += 1
        if not ended and length < min(limit, self.max_length):
            return None
        is_empty = length - slot.written_from < (2 if part.keeps_end else 1)
        if part.writer != "user" and not is_empty:
            slot.spans.append((slot.written_from, length))
        too_long = length + (len(slot.parts[0].given) if slot.parts else 0) >= self.max_length - 1
        if slot.parts and (part.may_be_empty or not is_empty) and not too_long:
            pending = list(slot.given)
            self._next_part(slot)
            slot.given.extendleft(reversed(pending))
            slot.written_from += len(pending)
            return None
        slot.part = None
        ids = slot.ids + list(slot.given)
        slot.given.clear()
        return Text(ids, slot.spans, slot.job)

    def _draw(self, logits: torch.Tensor, temperatures: list[float]) -> list[int]:
        """Draws a token per row at the row's temperature, by the Gumbel trick; temperature 0 takes the best token."""
        logits = logits.float()
        temperature = torch.tensor(temperatures, device=logits.device)[:, None]
        floor = logits.max(dim=-1, keepdim=True).values + temperature * math.log(self.sampling.min_p)
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_().neg_()
        scores = logits.masked_fill(logits < floor, float("-inf")) + temperature * noise
        return scores.argmax(dim=-1).tolist()


def default_rows(target: PreTrainedModel, max_length: int) -> int:
    """Default rows of a `Writer`: up to 2048 on CUDA, as free memory allows; 16 on a CPU; 256 on other devices."""
    device, config = target.device, target.config.get_text_config(decoder=True)
    most = _MOST_ROWS.get(device.type, 256)
    if device.type != "cuda":
        return most
    per_row = sum(bytes_per_token(target).values()) * (max_length + NODES_PER_WORD)
    per_row += 6 * 4 * config.vocab_size  # logits and noise in float32
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(most, int(free * _SHARE_OF_MEMORY / per_row)))
