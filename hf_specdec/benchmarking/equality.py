"""Whether greedy texts are those of plain `generate`, and how close the model was to another where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .comparison import Call, generate
from .contenders import GREEDY, Contender
from .prompts import EncodedPrompt


@dataclass(frozen=True, kw_only=True)
class Difference:
    """
    Where a text first differs from plain `generate`'s.

    Args:
        contender (`str`), task (`str`), prompt (`int`): which text.
        position (`int`): the first new token that differs.
        gap (`float`): the model's best logit there minus its second best, in the dtype of the texts.
    """

    contender: str
    task: str
    prompt: int
    position: int
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Gate:
    """
    What came of the comparison in float32.

    Args:
        identical (`dict[str, int]`): for each contender, how many texts were identical.
        num_prompts (`int`): of how many.
        differences (`list[Difference]`): the others.
    """

    identical: dict[str, int]
    num_prompts: int
    differences: list[Difference]

    @property
    def is_passed(self) -> bool:
        """Whether all were."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
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
        model (`PreTrainedModel`): in float32.
        advance (`Callable`): called after every call, of which there are prompts · (contenders + 1).
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
    """Of the greedy `calls`, those texts that differ from the contender `reference`'s; each prompt's last counts."""
    texts = {(call.contender, call.prompt): call.tokens for call in calls}
    return [
        _difference(model, prompts[index], texts[reference, index], tokens, contender, index)
        for (contender, index), tokens in texts.items()
        if tokens != texts[reference, index]
    ]


def _difference(
    model: PreTrainedModel, prompt: EncodedPrompt, plain: list[int], other: list[int], contender: str, index: int
) -> Difference:
    shared = min(len(plain), len(other))
    position = next((place for place in range(shared) if plain[place] != other[place]), shared)
    ids = prompt.inputs["input_ids"]
    ids = torch.cat([ids, ids.new_tensor([plain[:position]]).long()], dim=1)
    with torch.no_grad():
        best = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().topk(2).values
    return Difference(
        contender=contender, task=prompt.task, prompt=index, position=position, gap=float(best[0] - best[1])
    )
