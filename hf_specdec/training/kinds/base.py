"""`Kind`: what a run asks of the kind of model that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...models.structure import num_logits_of
from ...smollm2 import SMOLLM2_HUB_ID
from ..data import Text
from ..options import TrainOptions
from ..packing import ids_and_masks
from ..vocabulary import choose_vocabulary, count_tokens


logger = logging.get_logger(__name__)

HIGHEST_RATE = 2e-3


class Kind(ABC):
    """
    A kind of model to train: how one is made or taken over, its objective, and how a run of it is described.

    Args:
        options (`TrainOptions`): options of the run.
        target (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
    """

    method: ClassVar[str]
    """The method, as a recipe names it."""

    rate_times_width: ClassVar[float]
    """Default learning rate for a width of 1: this project's own values, not a publication's."""

    warmup: ClassVar[float] = 0.015  # the default of SpecForge (scripts/train_eagle3.py)
    """Share of the steps in which the learning rate rises."""

    max_grad_norm: ClassVar[float] = 0.5  # of EAGLE-3 (SafeAILab/EAGLE, eagle/traineagle3/ds_config.json)
    """Limit of the gradients' norm."""

    reads_all_logits: ClassVar[bool] = False
    """Whether the objective asks for the target's logits outside the draft vocabulary, see `TargetReader`."""

    def __init__(self, options: TrainOptions, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.options, self.target, self.tokenizer = options, target, tokenizer

    @abstractmethod
    def check(self) -> None:
        """
        Checks the options of a new model against the target, before the target writes texts for hours.

        Raises:
            ValueError: for options that do not fit the target.
        """

    @abstractmethod
    def new(self, texts: list[Text]) -> tuple[Any, torch.Tensor | None]:
        """
        A new model in float32 on the target's device, and the target's ids of its draft vocabulary, `[draft vocab]`
        int64; None if the draft vocabulary has all tokens.

        Args:
            texts (`list[Text]`): the training texts.
        """

    @abstractmethod
    def start(self, name: str) -> tuple[Any, torch.Tensor | None]:
        """
        The model to train further, as `new` returns a new one.

        Args:
            name (`str`): Hub id or folder.

        Raises:
            ValueError: if the model is of another kind, is for a target of other sizes, or cannot be trained.
        """

    @abstractmethod
    def objective(self, model: Any, packed: bool) -> nn.Module:
        """The objective, whose `model` is the model; `packed` says whether rows hold several texts."""

    def boundaries(self, model: Any) -> list[int] | None:
        """The target's hidden states that the model reads; None if it reads none."""
        return model.config.aux_boundaries(self.num_layers_of_target)

    def learning_rate(self, model: Any) -> float:
        """The default learning rate. A head is as wide as its target."""
        return min(self.rate_times_width / self.target.get_input_embeddings().weight.shape[1], HIGHEST_RATE)

    def recipe(self, objective: Any) -> dict[str, Any]:
        """What a recipe says of this kind's options."""
        return {}

    # -------------------------------------------------------------------------------------------------------- shared

    @property
    def target_name(self) -> str:
        """The target's name, for the config of a head."""
        return self.options.target or SMOLLM2_HUB_ID

    @property
    def num_layers_of_target(self) -> int:
        """Decoder layers of the target."""
        return self.target.config.get_text_config(decoder=True).num_hidden_layers

    def vocabulary(self, texts: list[Text], size: int) -> torch.Tensor | None:
        """
        A draft vocabulary of the texts' most frequent tokens, `[size]` int64; None for a size of 0 or of all tokens.

        Raises:
            ValueError: for more tokens than there are.
        """
        vocab_size = num_logits_of(self.target)
        if size in (0, vocab_size):
            return None
        masked, everywhere = count_tokens(ids_and_masks(texts), vocab_size)
        ends = self.target.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        token_ids = choose_vocabulary(masked, everywhere, size, ends)
        share = masked[token_ids].sum() / masked.sum()
        logger.info(f"The draft vocabulary of {size} tokens holds {share:.2%} of the tokens to be predicted.")
        return token_ids

    def check_head(self, name: str, head: Any) -> None:
        """
        Checks that a head to train further fits the target.

        Raises:
            ValueError: for another vocabulary or hidden size, or hidden states that the target does not have.
        """
        config = head.config
        check_size("vocabulary", config.vocab_size, num_logits_of(self.target), name)
        hidden_size = self.target.config.get_text_config(decoder=True).hidden_size
        check_size("hidden size", config.target_hidden_size or config.hidden_size, hidden_size, name)
        config.aux_boundaries(self.num_layers_of_target)


def check_size(what: str, found: int, wanted: int, name: str) -> None:
    """Raises `ValueError` if a size of the model to train further is not the target's."""
    if found != wanted:
        raise ValueError(
            f"`start_from`={name!r} has a {what} of {found}, the target one of {wanted}. Use one that was trained for "
            "such a target."
        )
