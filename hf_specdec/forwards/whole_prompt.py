"""A prompt that a model reads as plain `generate` does: in one forward of its own, with images and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..attention import implementation_of
from ..cache import TreeCache
from ..cache.layers import TreeLayer
from ..cache.row_copies import copy_start
from ..compat import cache_name_of
from ..models.own_positions import counts_by_mask, preparation_of
from ..models.structure import keeping_one_logit, shares_kv
from ..states import running_over


def read_whole(
    model: PreTrainedModel,
    cache: TreeCache,
    tokens: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    records: bool,
    encoder_cache: Any = None,
) -> ModelOutput:
    """
    Forwards prompts into a cache and commits them there; of one prompt, what follows the slots that the cache holds.

    Args:
        model (`PreTrainedModel`): the target.
        cache (`TreeCache`): the cache.
        tokens (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
        generation_config (`GenerationConfig`), model_kwargs (`dict`): as `generate` hands them to a decoding method.
        records (`bool`): whether a drafter reads the hidden states of all tokens.
        encoder_cache (`DynamicCache`, *optional*): K/V of the call's `encoder_hidden_states`.

    Returns:
        `ModelOutput`: the model's output, with logits of the last position at least, `[batch, positions, vocab]`.

    Raises:
        ValueError: if the target reads the prompt past the cache that it was given.
    """
    own = {cache_name_of(model): cache.beside(encoder_cache)} | _logits_of_prompt(model, records)
    with running_over(cache):
        outputs = model._prefill(tokens, generation_config, model_kwargs | own)
    cache.adopt_prefill()
    if cache.lengths[0] == 0:
        raise ValueError(
            f"`assistant_model`: the target {type(model).__name__} has read the prompt past the cache that "
            "it was given, as some do after a length at which their rotary embedding changes. Call `generate` "
            "without `assistant_model`."
        )
    return outputs


@torch.no_grad()
def continues_alike(
    model: PreTrainedModel,
    cache: TreeCache,
    first: int,
    prepare_start: Callable[[int], tuple[GenerationConfig, dict[str, Any]]] | None,
    tokens: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> bool:
    """
    Whether a model makes the same K/V from a prompt that it has read into `cache` if it reads the tokens before
    `first` by themselves and the others after them, up to rounding. Not so where positions or masks are made from the
    tokens at hand alone, or where text beside images is read otherwise because of these.

    Args:
        prepare_start (`Callable`, *optional*): returns generation config and keyword arguments for the tokens before
            `first` alone. None: they are not read alone.
        tokens, generation_config, model_kwargs: the prompt, as for `read_whole`.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, TreeLayer) and layer.is_initialized]
    if prepare_start is None or cache.state_layers:
        return False
    if any(layer.index_keys is not None or layer.positions is not None for layer in layers):
        return False
    length = tokens.shape[1]
    try:
        start, other = (TreeCache(len(cache.layers), 1, cache.device, capacity=most) for most in (first, length))
        read_whole(model, start, tokens[:, :first], *prepare_start(first), records=False)
        copy_start(start, first, other)
        read_whole(model, other, tokens, generation_config, model_kwargs, records=False)
    except Exception:  # noqa: BLE001  (such as a mask of another size)
        return False
    if other.lengths[0] != length:
        return False
    return all(
        _greatest(one - its) <= torch.finfo(one.dtype).eps ** 0.5 * one.norm() / length**0.5
        for layer, made in zip(cache.layers, other.layers, strict=True)
        if layer.is_initialized
        for one, its in zip(layer.read(0, length), made.read(0, length), strict=True)
    )


def _greatest(states: torch.Tensor) -> torch.Tensor:
    """The greatest norm of any token among `states`, `[1, heads, tokens, size]`: a wrong mask changes only some."""
    return states.transpose(1, 2).flatten(2).norm(dim=2).max()


def _logits_of_prompt(model: PreTrainedModel, records: bool) -> dict[str, Any]:
    """
    Arguments for a target whose last layers share K/V: they must run at all positions if a drafter reads hidden
    states, and for flash attention, whose masks the model cannot shorten.
    """
    if shares_kv(model) and (records or implementation_of(model) not in ("eager", "sdpa")):
        return keeping_one_logit(model)
    return {}


def shift_after(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    visible: torch.Tensor | None,
    cache: TreeCache,
    slots: int | None = None,
) -> torch.Tensor:
    """
    Position of a token minus its slot in the text after prompts that `cache` holds, `[…, batch]`, from what `generate`
    gave the prompts; `visible` (`[batch, slots]` bool, *optional*) says which of their slots are no padding. `slots`
    (*optional*): how many the prompts have, if not all that it holds.
    """
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    positions, rows = model_kwargs.get(f"{prefix}position_ids"), len(cache.lengths)
    slots = cache.lengths[0] if slots is None else slots
    preparation = preparation_of(model)
    if preparation.drops_positions:
        first = preparation.first_position or 0  # targets with None are refused
        return torch.full((rows,), first, device=cache.device)
    if positions is not None:
        return (positions[..., -1] + 1 - slots).expand(*positions.shape[:-2], rows)
    if visible is not None and (not prefix or counts_by_mask(model)):
        return visible.sum(dim=1) - slots
    return torch.zeros(rows, dtype=torch.long, device=cache.device)
