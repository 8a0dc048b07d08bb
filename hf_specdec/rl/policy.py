"""A policy as rollouts meet it: in training mode, changed by every optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.structure import num_embeddings_of


@contextmanager
def writing(model: PreTrainedModel) -> Iterator[None]:
    """
    A context in which a model writes: in evaluation mode, and in the dtype of its weights, without the autocast that
    accelerate puts around the forward of what it trains (keys and values would have two dtypes). Afterwards it and
    each of its modules are as they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    own, trained = (vars(model).get(name) for name in ("_original_forward", "forward"))
    model.eval()
    if own is not None and trained is not None:
        vars(model)["forward"] = own
    try:
        yield
    finally:
        if own is not None and trained is not None:
            vars(model)["forward"] = trained
        for module, mode in modes:
            module.training = mode


def base_of(model: Any) -> PreTrainedModel:
    """
    The model on which `generate_batch` runs: inside of what PEFT or `torch.compile` has made of it.

    Raises:
        TypeError: for anything but a model of transformers.
    """
    inner = getattr(model, "_orig_mod", model)
    if getattr(inner, "peft_config", None) is not None and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"`model` must be a model of transformers, but is {type(model).__name__}. Give the one that the trainer "
            "got, not its wrapper."
        )
    return inner


class Shapes:
    """
    Vocabulary and shapes of a policy's weights, which no training changes. Names that come or go, as with an adapter,
    are no matter; nor are weights without values, which other processes hold at times.

    Args:
        model (`PreTrainedModel`): the policy.
    """

    def __init__(self, model: PreTrainedModel):
        self._vocab_size, self._shapes = num_embeddings_of(model), _shapes_of(model)

    def check(self, model: PreTrainedModel) -> None:
        """
        Checks that the policy has kept them.

        Raises:
            ValueError: naming what has changed.
        """
        vocab_size = num_embeddings_of(model)
        if vocab_size != self._vocab_size:
            raise ValueError(
                f"`model`: the policy's vocabulary had {self._vocab_size} tokens when `rollouts` began, and has "
                f"{vocab_size} now. Leave the context, and enter another with a draft for this vocabulary."
            )
        for name, shape in _shapes_of(model).items():
            before = self._shapes.get(name, shape)
            if shape != before:
                raise ValueError(
                    f"`model`: the policy's weight `{name}` had the shape {tuple(before)} when `rollouts` began, and "
                    f"has {tuple(shape)} now. Leave the context, and enter another."
                )


def _shapes_of(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters() if weight.numel()}
