"""Comparison of greedy texts with plain `generate`'s, and the logit gap where they first differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.structure import keeping_one_logit
from .comparison import Call, generate
from .contenders import GREEDY, Contender
from .prompts import EncodedPrompt


NEAR_TIE = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 64}
"""
Rounding errors of a logit that make a near-tie, by dtype: in half precision sums are rounded at their end alone, in
float32 after every term. The numbers are this project's choice; a larger gap deserves a look.
"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """
    The first difference of a text from plain `generate`'s.

    Args:
        contender (`str`), task (`str`), prompt (`int`): contender, task and prompt number of the text.
        position (`int`): index of the first new token that differs.
        gap (`float`): the model's best logit at `position` minus that of the token that is worse, of the two which
            the texts have there (of the second best token, where one text ends), in the model's dtype.
        rounding (`float`): largest gap that roundings in the model's dtype may open or close: `NEAR_TIE` times the
            relative rounding error of the dtype, times the best logit.
    """

    contender: str
    task: str
    prompt: int
    position: int
    gap: float
    rounding: float = 0.0

    @property
    def is_near_tie(self) -> bool:
        """Whether roundings explain the difference."""
        return self.gap <= self.rounding

    def to_dict(self) -> dict[str, Any]:
        """The difference as a dictionary for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Gate:
    """
    Result of the comparison in float32.

    Args:
        identical (`dict[str, int]`): number of identical texts by contender.
        num_prompts (`int`): number of texts of each contender.
        differences (`list[Difference]`): the first difference of every other text.
    """

    identical: dict[str, int]
    num_prompts: int
    differences: list[Difference]

    @property
    def is_passed(self) -> bool:
        """Whether all texts were identical."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        return {
            "dtype": "float32",
            "identical": self.identical,
            "prompts": self.num_prompts,
            "differences": [difference.to_dict() for difference in self.differences],
        }


def check(
    model: PreTrainedModel,
    prompts: Sequence[EncodedPrompt],
    contenders: Sequence[Contender],
    *,
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> Gate:
    """
    Compares the greedy texts of every contender with plain `generate`'s.

    Args:
        model (`PreTrainedModel`): the target in float32.
        prompts (`Sequence[EncodedPrompt]`): the prompts.
        contenders (`Sequence[Contender]`): contenders to compare with plain `generate`.
        max_new_tokens (`int`): most new tokens of every call.
        advance (`Callable`): called after every call, prompts · (contenders + 1) times.
    """
    options = GREEDY | {"max_new_tokens": max_new_tokens}
    identical, differences = dict.fromkeys((contender.name for contender in contenders), 0), []
    for index, prompt in enumerate(prompts):
        plain, _ = generate(model, Contender("generate"), prompt, **options)
        advance()
        for contender in contenders:
            tokens, _ = generate(model, contender, prompt, **options)
            advance()
            identical[contender.name] += tokens == plain
            if tokens != plain:
                differences.append(_difference(model, prompt, plain, tokens, contender.name, index))
    return Gate(identical, len(prompts), differences)


def differences_of(
    model: PreTrainedModel, prompts: Sequence[EncodedPrompt], calls: Sequence[Call], reference: str
) -> list[Difference]:
    """The greedy texts of `calls` that differ from those of contender `reference`; each prompt's last round counts."""
    texts = {(call.contender, call.prompt): call.tokens for call in calls}
    return [
        _difference(model, prompts[index], texts[reference, index], tokens, contender, index)
        for (contender, index), tokens in texts.items()
        if tokens != texts[reference, index]
    ]


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The index of the first token that differs; the shorter text's length if the other one begins with it."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def _difference(
    model: PreTrainedModel, prompt: EncodedPrompt, plain: list[int], other: list[int], contender: str, index: int
) -> Difference:
    position = first_difference(plain, other)
    ids = prompt.inputs["input_ids"]
    ids = torch.cat([ids, ids.new_tensor([plain[:position]]).long()], dim=1)
    with torch.no_grad():
        logits = model(ids, use_cache=False, **keeping_one_logit(model)).logits[0, -1].float()
    best = float(logits.max())
    chosen = [text[position] for text in (plain, other) if position < len(text)]
    worst = float(logits[chosen].min()) if len(chosen) == 2 else float(logits.topk(2).values[1])
    return Difference(
        contender=contender,
        task=prompt.task,
        prompt=index,
        position=position,
        gap=best - worst,
        rounding=NEAR_TIE.get(model.dtype, 64) * torch.finfo(model.dtype).eps * abs(best),
    )
