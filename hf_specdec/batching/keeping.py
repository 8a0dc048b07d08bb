"""A manager that a model keeps from one call to the next: its memory, its graphs, and what "auto" has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel


if TYPE_CHECKING:
    from .manager import SpeculativeBatchingManager

_ATTRIBUTE = "_kept_speculative_manager"


class _Kept:
    """Holds the manager. A copy of the model has none: it is over other weights."""

    def __init__(self, manager: SpeculativeBatchingManager | None = None):
        self.manager = manager

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def keep(manager: SpeculativeBatchingManager) -> None:
    """Leaves a manager with its model, in the place of another."""
    setattr(manager.model, _ATTRIBUTE, _Kept(manager))


def let_go(model: PreTrainedModel) -> SpeculativeBatchingManager | None:
    """What was left with a model, if anything, which keeps it no longer."""
    kept = vars(model).pop(_ATTRIBUTE, None)
    return None if kept is None else kept.manager
