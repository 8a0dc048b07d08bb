"""Draft models with the target's tokenizer whose vocabulary is padded to another size, as in one family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .tree_forward import TreeForward


MOST_PADDING = 1024
"""Vocabularies whose sizes differ by less may be paddings of one: of a tokenizer with the same special tokens."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_padded_otherwise(draft: Any, target: PreTrainedModel) -> bool:
    """Whether a draft is a language model with the target's tokenizer, but another number of rows."""
    if not isinstance(draft, PreTrainedModel):
        return False
    mine, its = (model.config.get_text_config(decoder=True) for model in (draft, target))
    sizes = getattr(mine, "vocab_size", None), getattr(its, "vocab_size", None)
    return None not in sizes and sizes[0] != sizes[1] and _obstacle(mine, its) is None


@dataclass(frozen=True)
class SharedVocabulary:
    """
    The ids that a target and a draft model share: all below the smaller of their sizes. The draft proposes no others.
    One that the target has written and the draft lacks is read as a stand-in: drafting goes on after the next token.

    Args:
        num_target (`int`): size of the target's vocabulary.
        num_draft (`int`): size of the draft's vocabulary.
        stand_in (`int`): id that the draft reads in place of those that it lacks.
    """

    num_target: int
    num_draft: int
    stand_in: int = 0

    @classmethod
    def of(cls, draft: PreTrainedModel, target: PreTrainedModel) -> SharedVocabulary | None:
        """
        What a draft model shares with a target; None if their vocabularies are of the same size.

        Raises:
            ValueError: if the sizes differ by `MOST_PADDING` or more, or the configs do not name the same special
                tokens.
        """
        mine, its = (model.config.get_text_config(decoder=True) for model in (draft, target))
        if mine.vocab_size == its.vocab_size:
            return None
        obstacle = _obstacle(mine, its)
        if obstacle is not None:
            raise ValueError(
                f"`assistant_model`: {type(draft).__name__} has a vocabulary of {mine.vocab_size} tokens, the target "
                f"one of {its.vocab_size}, and {obstacle}. Use a draft model with the target's tokenizer, or pass "
                "`tokenizer` and `assistant_tokenizer`."
            )
        pad = mine.pad_token_id
        is_shared = isinstance(pad, int) and 0 <= pad < min(mine.vocab_size, its.vocab_size)
        return cls(its.vocab_size, mine.vocab_size, pad if is_shared else 0)

    @property
    def num_shared(self) -> int:
        """Number of ids that both know."""
        return min(self.num_target, self.num_draft)

    @property
    def draft_lacks_some(self) -> bool:
        """Whether the target has ids that the draft lacks."""
        return self.num_draft < self.num_target

    def known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of some target tokens the draft has, bool."""
        return tokens < self.num_shared

    def readable(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens as the draft reads them."""
        return torch.where(self.known(tokens), tokens, self.stand_in)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits `[…, draft vocab]` over the target's vocabulary, -inf where the draft has no token."""
        shared = logits[..., : self.num_shared]
        if not self.draft_lacks_some:
            return shared
        return torch.nn.functional.pad(shared, (0, self.num_target - self.num_shared), value=-torch.inf)


def _obstacle(mine: Any, its: Any) -> str | None:
    """Why two vocabularies of different sizes are not taken for paddings of one; None if they are."""
    if abs(mine.vocab_size - its.vocab_size) >= MOST_PADDING:
        return f"padding makes a difference of less than {MOST_PADDING:,}"
    ids = {name: (getattr(mine, name, None), getattr(its, name, None)) for name in _SPECIAL}
    for name, (my_id, its_id) in ids.items():
        if my_id != its_id:
            return f"another `{name}` ({my_id}, the target's is {its_id})"
    if all(my_id is None for my_id, _ in ids.values()):
        return "their configs name no special tokens by which to tell that the tokenizer is the same"
    return None


class ForwardOfShared(TreeForward):
    """A `TreeForward` that reads the target's tokens and gives logits over the target's vocabulary."""

    vocabulary: SharedVocabulary

    def __call__(self, tokens: torch.Tensor, *args: Any, **options: Any) -> CausalLMOutput:
        """As `TreeForward`; the output has `logits` `[batch, queries, target vocab]` alone."""
        outputs = super().__call__(self.vocabulary.readable(tokens), *args, **options)
        return CausalLMOutput(logits=self.vocabulary.logits(outputs.logits))
