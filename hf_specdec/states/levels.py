"""
Mixers with code of their own over the nodes of a tree, level by level: a level's nodes are rows of one token, whose
states are those after their parents. A text is read row by row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..models.node_rows import NodeRows


if TYPE_CHECKING:
    from ..cache.state_layers import StateLayer
    from ..cache.tree_cache import TreeCache


class _Running(threading.local):
    """
    What the mixers that run in this thread were given: the mixer, its arguments, keyword arguments, and the cache
    among them; the innermost last.
    """

    def __init__(self) -> None:
        self.given: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []


_running = _Running()


@contextmanager
def by_levels(mixers: list[nn.Module]) -> Iterator[None]:
    """A context in which these mixers run level by level in forwards over a tree."""
    hooks = [mixer.register_forward_pre_hook(_enter, with_kwargs=True) for mixer in mixers]
    hooks += [mixer.register_forward_hook(_leave) for mixer in mixers]
    try:
        yield
    finally:
        _running.given.clear()  # of a mixer that failed
        for hook in hooks:
            hook.remove()


def _enter(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: the mixer's own call runs over one token, and its result is not used."""
    cache: Any = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)
    if getattr(cache, "topology", None) is None:
        return None
    _running.given.append((mixer, args, kwargs, cache))
    first = torch.zeros(1, dtype=torch.long, device=cache.device)
    rows = NodeRows(_shape_of(cache), first, first)
    return tuple(rows.of(one, None) for one in args), {name: rows.of(one, None) for name, one in kwargs.items()}


def _leave(mixer: Any, args: tuple[Any, ...], output: Any) -> Any:
    """A forward hook: what the mixer returns for all nodes."""
    if not _running.given or _running.given[-1][0] is not mixer:
        return None
    _, args, kwargs, cache = _running.given.pop()
    outputs = [one.new_zeros(*_shape_of(cache), *one.shape[2:]) for one in _tensors(output)]
    counts = cache.topology.counts
    for rows, states in _levels_of(cache) if counts is None else _rows_of_text(cache, counts):
        own = (rows.of(one, states) for one in args)
        found = mixer.forward(*own, **{name: rows.of(one, states) for name, one in kwargs.items()})
        states.keep()
        for one, part in zip(outputs, _tensors(found), strict=True):
            one[rows.rows.to(one.device), rows.nodes.to(one.device)] = part if rows.is_text else part[:, 0]
    return outputs[0] if isinstance(output, torch.Tensor) else type(output)(outputs)


def _tensors(output: Any) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _shape_of(cache: TreeCache) -> tuple[int, int]:
    """Rows and queries of a forward."""
    return len(cache.lengths), cache.nodes.num_queries


def _levels_of(cache: TreeCache) -> Iterator[tuple[NodeRows, _RowStates]]:
    """The queries of every depth, from the root down."""
    topology, shape = cache.nodes, _shape_of(cache)
    depths = topology.ancestors_on(cache.device).sum(dim=2).expand(shape)
    parents = topology.parents_on(cache.device).expand(shape)
    for depth in depths.unique().tolist():
        rows, nodes = (depths == depth).nonzero(as_tuple=True)
        places = topology.offset + nodes
        yield NodeRows(shape, rows, nodes), _RowStates(cache, rows, places, parents[rows, nodes])


def _rows_of_text(cache: TreeCache, counts: list[int]) -> Iterator[tuple[NodeRows, _RowStates]]:
    """The tokens of every row that reads some."""
    for row, count in enumerate(counts):
        if count:
            own = torch.tensor([row], device=cache.device)
            tokens = torch.arange(count, device=cache.device)
            rows = NodeRows(_shape_of(cache), own[:, None], tokens[None], is_text=True)
            yield rows, _RowStates(cache, own, torch.zeros_like(own), None)


class _RowStates(Cache):
    """
    Stands for a cache whose rows are some nodes, or a text: with the states before them, and then after them.

    Args:
        cache (`TreeCache`): the cache of the forward.
        rows, places (`torch.Tensor` of shape `[nodes]`, int64): each node's row, and where the states after it are
            kept.
        parents (`torch.Tensor` of shape `[nodes]`, int64, *optional*): the places of their parents, -1 for none; None
            for a text, which follows the committed tokens.
    """

    def __init__(self, cache: TreeCache, rows: torch.Tensor, places: torch.Tensor, parents: torch.Tensor | None):
        super().__init__(layers=[LinearAttentionLayer()])
        self._cache, self._rows, self._places, self._parents = cache, rows, places, parents
        self._touched: dict[tuple[int, str, int], None] = {}
        self.num_layers = len(cache.layers)
        self.layers: Any = _Layers(self)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._touched[layer_idx, "conv_states", state_idx] = None  # which some mixers change in place
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._touched[layer_idx, "recurrent_states", state_idx] = None
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._touched[layer_idx, "conv_states", state_idx] = None
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self._touched[layer_idx, "recurrent_states", state_idx] = None
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def before(self, layer_idx: int) -> LinearAttentionLayer:
        """The states of a layer before the rows; none for a text at the very beginning."""
        source: StateLayer = self._cache.layers[layer_idx]
        layer = LinearAttentionLayer(number_of_states=source.number_of_states)
        if self._parents is None and not self._cache.lengths[int(self._rows[0])]:
            return layer
        for kind, is_there in (
            ("conv_states", layer.is_conv_states_initialized),
            ("recurrent_states", layer.is_recurrent_states_initialized),
        ):
            for number in getattr(source, kind):
                states = source.states_after(kind, number, self._rows, self._parents)
                if states is not None:
                    getattr(layer, kind)[number], is_there[number] = states, True
                    layer.has_previous_state[number] = True
                    if kind == "conv_states":
                        layer.conv_kernel_size[number] = states.shape[-1]
        return layer

    def keep(self) -> None:
        """Hands the states after the rows to the layers of the cache."""
        for layer_idx, kind, number in self._touched:
            states = getattr(self.layers[layer_idx], kind)[number]
            if states is not None:
                self._cache.layers[layer_idx].keep_states(kind, number, self._rows, self._places, states)


class _Layers(dict[int, LinearAttentionLayer]):
    """Layers by their index, made when they are asked for."""

    def __init__(self, states: _RowStates):
        super().__init__()
        self._states = states

    def __len__(self) -> int:
        return self._states.num_layers

    def __missing__(self, index: int) -> LinearAttentionLayer:
        self[index] = layer = self._states.before(index)
        return layer
