"""Models that can read no branches: a chain in one row is a text to them, and everything else is refused."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import GenerationMixin, PreTrainedModel

from ..models.layer_kinds import is_attention_free
from ..models.modules import modules_of
from ..models.own_positions import preparation_of
from ..models.reasons import Reason
from ..models.structure import takes_positions
from .switch import has_windows, partial_kinds_of, supports_switching


_ONE_ATTENTION = ("t5gemma2",)
"""Architectures whose layers join the masks of self- and cross-attention."""

_found: WeakKeyDictionary[PreTrainedModel, tuple[int, dict[str, str | None]]] = WeakKeyDictionary()
"""By model its own forward, if it has one, and the obstacles by implementation of attention."""


def obstacle_to_branches(model: PreTrainedModel) -> str | None:
    """
    Why forwards of a model cannot run over the branches of a tree, or over rows of unequal length; None if they can.
    Without branches, in one row, an index is a depth: such a model reads nodes as it reads a prompt.
    """
    own, attention = id(vars(model).get("forward")), model.config._attn_implementation
    if model not in _found or _found[model][0] != own:
        _found[model] = own, {}
    obstacles = _found[model][1]
    if attention not in obstacles:
        obstacles[attention] = _obstacle(model)
    return obstacles[attention]


def _obstacle(model: PreTrainedModel) -> str | None:
    obstacle = obstacle_to_masks(model)
    if obstacle is not None:
        return obstacle
    if not isinstance(model, GenerationMixin):  # a head of ours
        return None
    if not takes_positions(model) and not is_attention_free(model):
        return f"{Reason.POSITIONS}, which the nodes of a tree need"
    if preparation_of(model).first_position is None:
        return (
            f"{Reason.POSITIONS} from `generate`, and does not read those that its forward takes, which the nodes of "
            "a tree need"
        )
    return None


def obstacle_to_masks(model: PreTrainedModel) -> str | None:
    """Why a model takes no mask but one of padding, which suffices for a chain in one row; None if it takes others."""
    if any(hasattr(kind, "_prepare_decoder_attention_mask") for kind in {type(part) for part in modules_of(model)}):
        return f"{Reason.MASK}, only masks of padding"
    if model.config.model_type in _ONE_ATTENTION:
        return f"{Reason.MASK}, since its layers attend to the text and to the encoder at once"
    if _needs_more_than_a_mask(model) and not supports_switching(model):
        return (
            f"{Reason.MASK}: it does not use transformers' attention interface, and its attention needs more (ALiBi, "
            "a sliding window, or chunks)"
        )
    return None


def _needs_more_than_a_mask(model: PreTrainedModel) -> bool:
    text_config = model.config.get_text_config(decoder=True)
    uses_alibi = getattr(text_config, "alibi", False) or text_config.model_type in ("bloom", "mpt")
    own_windows = any(getattr(text_config, option, None) for option in ("window_size", "attention_types"))
    return bool(uses_alibi or own_windows or has_windows(model) or partial_kinds_of(model))
