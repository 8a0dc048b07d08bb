"""The manager that a model keeps between calls, with its K/V memory, CUDA graphs and what "auto" has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel


if TYPE_CHECKING:
    from .manager import SpeculativeBatchingManager
    from .thread import HasThread

_ATTRIBUTE = "_kept_speculative_manager"


class _Kept:
    """Holds a manager. Copies and pickles of it are empty, because the manager belongs to one model's weights."""

    def __init__(self, manager: Any = None):
        self.manager = manager

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def keep(manager: HasThread) -> None:
    """Stores a manager on its model, replacing the one stored before."""
    setattr(manager.model, _ATTRIBUTE, _Kept(manager))


def let_go(model: PreTrainedModel) -> SpeculativeBatchingManager | None:
    """Removes the manager stored on a model and returns it; None if there is none."""
    kept = vars(model).pop(_ATTRIBUTE, None)
    return None if kept is None else kept.manager
