"""Draws of one token by speculative steps, counted beside the probabilities that plain `generate` draws from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specdec.benchmarking.contenders import sampling_options


COUNT, AT_ONCE = 400, 100
TREE = "branching:4"
"""A step drafts so many tokens for the place: more depth would only reach tokens that are not counted."""
SHOWN = 9
"""The most likely tokens, which have bars of their own."""


@dataclass
class Draws:
    """
    Args:
        tokens (`list[int]`): the most likely tokens; all others are counted together, behind them.
        exact (`list[float]`): their probabilities, one more than tokens.
        accepted (`list[int]`), own (`list[int]`): how often each was an accepted draft, or the model's own token.
    """

    tokens: list[int]
    exact: list[float]
    accepted: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * len(self.exact)
        self.own = self.own or [0] * len(self.exact)

    @classmethod
    def none_yet(cls, probabilities: torch.Tensor) -> Draws:
        """Before the first draw from probabilities `[vocab]`."""
        best = probabilities.topk(min(SHOWN, len(probabilities)))
        exact = best.values.tolist()
        return cls(best.indices.tolist(), [*exact, max(1 - sum(exact), 0.0)])

    @property
    def counts(self) -> list[int]:
        return [accepted + own for accepted, own in zip(self.accepted, self.own, strict=True)]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def add(self, token: int, is_accepted: bool) -> None:
        place = self.tokens.index(token) if token in self.tokens else len(self.tokens)
        (self.accepted if is_accepted else self.own)[place] += 1

    @property
    def distance(self) -> float:
        """Total variation between counts and probabilities, over the bars."""
        return float(self._distances(np.array([self.counts]))[0])

    def usual_distances(self) -> tuple[float, float]:
        """Between which distances nine of ten samples of this size lie that are drawn from the probabilities."""
        exact = np.array(self.exact) / sum(self.exact)
        samples = np.random.default_rng(0).multinomial(self.total, exact, size=2000)
        low, high = np.quantile(self._distances(samples), [0.05, 0.95])
        return float(low), float(high)

    def _distances(self, counts: np.ndarray) -> np.ndarray:
        shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
        return np.abs(shares - np.array(self.exact)).sum(-1) / 2


class Given(LogitsProcessor):
    """Lets a text of `length` tokens continue with `token`, and changes nothing elsewhere."""

    def __init__(self, length: int, token: int):
        self.length, self.token = length, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != self.length:
            return scores
        given = torch.full_like(scores, -torch.inf)
        given[:, self.token] = 0
        return given


class EndsAt(StoppingCriteria):
    """Ends texts of `length` tokens, which `max_new_tokens` would leave nothing to draft for."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= self.length
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


def next_token_probabilities(target: PreTrainedModel, context: list[int], temperature: float) -> torch.Tensor:
    """What plain `generate` draws the token after the context from: its processed scores, as `[vocab]`."""
    inputs = torch.tensor([context], device=target.device)
    options = sampling_options(temperature) | {"return_dict_in_generate": True, "output_scores": True}
    mask = torch.ones_like(inputs)
    scores = target.generate(inputs, attention_mask=mask, max_new_tokens=1, pad_token_id=0, **options).scores[0][0]
    return scores.double().softmax(-1).cpu()


def telling_place(target: PreTrainedModel, prompt: list[int], written: list[int], temperature: float) -> int:
    """
    Tokens of the written text before the place where the likeliest token's probability is nearest to one half: where a
    token is certain, draws tell nothing.
    """
    with torch.no_grad():
        logits = target(torch.tensor([prompt + written], device=target.device)).logits[0, len(prompt) - 1 : -1]
    best = (logits.float() / temperature).softmax(-1).amax(-1)
    return int((best - 0.5).abs().argmin())


def draw(
    target: PreTrainedModel, draft: Any, context: list[int], temperature: float, count: int = COUNT
) -> Iterator[Draws]:
    """
    Draws the token after the context again and again, a few requests of `generate_batch` at once.

    The first token of a request comes from the prompt's own forward, without drafts. So the prompt ends one token
    earlier, the context's last token is given as the first, and the token that counts is the one after it: from a step
    that drafts from this root and verifies.

    Yields:
        `Draws`: all so far.

    Raises:
        ValueError: at temperature 0, where there is nothing to draw, and for a context of less than two tokens.
    """
    if temperature == 0:
        raise ValueError("temperature=0: the next token is certain. Set a temperature above 0, and run again.")
    if len(context) < 2:
        raise ValueError(f"A context of {len(context)} token(s): draws need a prompt and a token after it.")
    *prompt, root = context
    draws = Draws.none_yet(next_token_probabilities(target, context, temperature))
    yield draws
    options = sampling_options(temperature) | {
        "assistant_model": draft,
        "tree": TREE,
        "max_new_tokens": 3,
        "eos_token_id": -1,
        "logits_processor": LogitsProcessorList([Given(len(prompt), root)]),
        "stopping_criteria": StoppingCriteriaList([EndsAt(len(context) + 1)]),
    }
    while draws.total < count:
        outputs = target.generate_batch([prompt] * min(AT_ONCE, count - draws.total), **options)
        for output in outputs.values():
            draws.add(output.generated_tokens[1], output.speculation.num_accepted_tokens > 0)
        yield draws
