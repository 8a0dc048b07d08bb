"""
The switch of a model's attention implementation to "tree_attention" and back, and what the model had before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from packaging import version
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import INDEXED
from ..models.config_switch import ConfigSwitches
from ..models.layer_kinds import layer_kinds_of
from ..models.modules import modules_of
from ..models.probe import layers_of


NAME = "tree_attention"
"""The name under which tree attention is registered with transformers."""

PARTIAL_KINDS = INDEXED | {"chunked_attention"}
"""Kinds of layers (`config.layer_types`) that attend to chunks, or to the keys that an indexer selects."""


class SwitchedName(str):
    """
    The name "tree_attention" as a switched config holds it. A copy of the config that is made meanwhile (by
    `copy.deepcopy` or `pickle`) holds the previous implementation.
    """

    previous: str

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.previous,)


COPIES_ARE_AS_BEFORE = version.parse(torch.__version__).release >= (2, 13)
"""Whether configs are switched to a `SwitchedName`: no older torch.compile was seen to trace a subclass of `str`."""


@lru_cache(maxsize=16)  # one object per name: compiled forwards may check its identity
def switched_name(previous: str) -> str:
    """The name "tree_attention" for a config that had the implementation `previous`."""
    if not COPIES_ARE_AS_BEFORE:
        return NAME
    name = SwitchedName(NAME)
    name.previous = previous
    return name


_switches: ConfigSwitches[str] = ConfigSwitches("_attn_implementation", NAME)


def previous_implementation(config: PreTrainedConfig) -> str:
    """The implementation that a config had before the switch; that of a config that names none is eager attention."""
    name = _switches.said(config)
    # A config that is not in `_switches` may say "tree_attention": a separate object that was switched together with
    # its parent's config, or a config that has just been restored.
    if isinstance(name, SwitchedName):
        return name.previous
    return "sdpa" if name == NAME else name or "eager"


def implementation_of(model: PreTrainedModel) -> str:
    """The attention implementation that a model has outside of speculative calls."""
    return previous_implementation(model.config.get_text_config(decoder=True))


def is_exact(implementation: str) -> bool:
    """
    Whether an attention implementation is known to compute softmax attention, so that another one may take its place
    over trees: transformers' own, and kernels from the Hub, which have a repository's name.
    """
    name = implementation.rpartition("|")[2]  # "paged|sdpa" is sdpa
    return name in ("eager", "sdpa", "flex_attention") or name.startswith("flash_attention_") or "/" in name


def supports_switching(model: PreTrainedModel) -> bool:
    """
    Whether the model's attention goes through transformers' `AttentionInterface`, with all keyword arguments: as its
    class says, or, where layers need more than a mask or have states, as one probe shows.
    """
    if not model._can_set_attn_implementation():
        return False
    if getattr(model, "_supports_attention_backend", False):
        return True
    if layer_kinds_of(model) is not None:
        layers = layers_of(model)
        return layers is not None and layers.hands_on_context and _attends_by_interface(model)
    return (has_windows(model) or bool(partial_kinds_of(model))) and _attends_by_interface(model)


def _attends_by_interface(model: PreTrainedModel) -> bool:
    """Whether there are layers with K/V, and each calls the attention function that the config names."""
    layers = layers_of(model)
    if layers is None or not layers.calls:
        return False
    return set(layers.cached) <= {getattr(call.module, "layer_idx", None) for call in layers.calls}


def partial_kinds_of(model: PreTrainedModel) -> set[str]:
    """Kinds of the model's layers that are among `PARTIAL_KINDS`."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return set(kinds) & PARTIAL_KINDS


def has_windows(model: PreTrainedModel) -> bool:
    """Whether layers attend to a sliding window."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    return not kinds.isdisjoint(("sliding_attention", "hybrid_sliding")) or bool(
        getattr(config, "sliding_window", None)
    )


def needs_context(model: PreTrainedModel) -> bool:
    """
    Whether layers need the `TreeContext` because a dense mask is not enough: with sliding windows, chunks or selected
    keys, and with implementations that take no dense mask.
    """
    config = model.config.get_text_config(decoder=True)
    needs_more = has_windows(model) or bool(partial_kinds_of(model))
    return needs_more or previous_implementation(config) not in ("eager", "sdpa")


@contextmanager
def switched_to_tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Switches a model to `tree_attention` inside the context. Calls of several threads on one model are counted: the
    first call switches, the last call restores.
    """
    with _switches.switched(lambda: _decoder_configs(model), previous_implementation, switched_name):
        yield


def _decoder_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that the decoder's attention layers read, each once."""
    text_config = model.config.get_text_config(decoder=True)
    configs = {id(text_config): text_config}
    for module in modules_of(model):
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and hasattr(module, "layer_idx"):
            configs.setdefault(id(config), config)
    return list(configs.values())
