"""The layers of a cache: with keys and values, with states, with both, or with nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..compat import NoCacheLayer
from ..states import LayerKind, LayerKinds
from .layers import TreeLayer
from .state_layers import StateLayer


if TYPE_CHECKING:
    from .tree_cache import TreeCache


class HybridLayer(StateLayer, TreeLayer):
    """A layer with both states and keys and values, as in Falcon-H1."""

    is_initialized = False

    def __init__(self, cache: TreeCache, index: int, number_of_states: int = 1):
        TreeLayer.__init__(self, cache, index)
        StateLayer.__init__(self, cache, index, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Dispatches on the arguments: keys and values are positional, a state is not."""
        if args:
            TreeLayer.lazy_initialization(self, *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)


class NoLayer(NoCacheLayer):
    """A layer that caches nothing."""

    has_memory = True
    """There is nothing to allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = False

    def view_for(self, cache: TreeCache) -> NoLayer:
        """A layer of another cache: nothing."""
        return NoLayer()


def new_layers(
    cache: TreeCache,
    num_layers: int,
    kinds: LayerKinds | None,
    of_attention: Callable[[int], Any],
    of_both: Callable[[Any, int, int], Any] = HybridLayer,
) -> list[Any]:
    """
    The layers of a cache, of these `kinds`; keys and values in all layers, where none has states. `of_attention` makes
    a layer with keys and values, `of_both` one that has states as well.
    """
    if kinds is None:
        return [of_attention(index) for index in range(num_layers)]
    made: list[Any] = []
    for index, (kind, number_of_states) in enumerate(kinds):
        if kind == LayerKind.STATES:
            made.append(StateLayer(cache, index, number_of_states))
        elif kind == LayerKind.BOTH:
            made.append(of_both(cache, index, number_of_states))
        else:
            made.append(NoLayer() if kind == LayerKind.NOTHING else of_attention(index))
    return made


def states_among(layers: list[Any]) -> list[StateLayer]:
    """The layers that have states."""
    return [layer for layer in layers if isinstance(layer, StateLayer)]
