"""Forward hooks of a model: those that a graph would pass by, and those whose effect may depend on the step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from .modules import modules_of


_OF_LIBRARIES = ("hf_specdec", "transformers", "accelerate", "deepspeed", "torch.distributed", "torch.nn.utils")
"""Modules whose hooks place, shard, record or prepare weights, whatever the number of tokens in a forward."""
_MOST_NAMED = 3

_warned: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Hooks of which a user has been told, by model."""


def has_hooks_for_graphs(modules: list[nn.Module]) -> bool:
    """
    Whether any of the modules has forward hooks, besides ours and those that transformers keeps for
    `output_hidden_states`: a captured graph would pass them by.
    """
    return any(
        not hasattr(hook, "of_features") and _home_of(hook) != output_capturing.__name__
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
        for hook in _hooks_of(module)
    ) or any(True for _ in _global_hooks())


def foreign_hooks(model: nn.Module) -> list[str]:
    """
    The forward hooks and pre-hooks of a model, and those of all modules, that neither we nor a library have made which
    places, shards or records: each as "function (module) at place".
    """
    found = [f"{_name_of(hook)} at every module" for hook in _global_hooks() if _is_foreign(hook)]
    if any(_is_foreign(hook) for module in modules_of(model) for hook in _hooks_of(module)):
        found += [
            f"{_name_of(hook)} at {name or type(model).__name__}"
            for name, module in model.named_modules()  # slow, since it builds names
            for hook in _hooks_of(module)
            if _is_foreign(hook)
        ]
    return found


def check_hooks(models: dict[str, list[nn.Module]], on_foreign_hooks: Literal["warn", "refuse"]) -> None:
    """
    Warns of foreign forward hooks, once for each model and its hooks, or refuses them.

    Args:
        models (`dict`): the models, by their role: "target" or "draft".
        on_foreign_hooks (`str`): see `SpeculativeConfig`.

    Raises:
        ValueError: if there is a foreign hook, and `on_foreign_hooks` is `"refuse"`.
    """
    for role, parts in models.items():
        for model in parts:
            hooks = foreign_hooks(model)
            if not hooks:
                continue
            more = f" and {len(hooks) - _MOST_NAMED} more" if len(hooks) > _MOST_NAMED else ""
            named = f"{', '.join(hooks[:_MOST_NAMED])}{more}"
            if on_foreign_hooks == "refuse":
                raise ValueError(
                    f"`on_foreign_hooks='refuse'`: the {role} {type(model).__name__} has forward hooks: {named}. "
                    "Remove them, or set `on_foreign_hooks='warn'` if their effect on a token does not depend on "
                    "which other tokens are in the forward."
                )
            told = _warned.setdefault(model, set())
            if told.issuperset(hooks):
                continue
            told.update(hooks)
            warnings.warn(
                f"`assistant_model`: the {role} {type(model).__name__} has forward hooks: {named}. {_EFFECTS[role]} "
                "`SpeculativeConfig(on_foreign_hooks='refuse')` makes this an error.",
                stacklevel=2,
            )


_EFFECTS = {
    "target": "Speculative forwards hold a whole tree of tokens, not one: where a hook's effect depends on how many "
    "tokens there are, or on which is last, the text differs from that of plain `generate`. Remove such a hook.",
    "draft": "Draft forwards hold several tokens, not one: where a hook's effect depends on how many tokens there "
    "are, fewer drafts may be accepted. The text stays exact.",
}


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _global_hooks() -> Iterator[Callable[..., Any]]:
    """Hooks that torch calls in every module (`register_module_forward_hook`)."""
    yield from torch_module._global_forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()


def _is_foreign(hook: Callable[..., Any]) -> bool:
    home = _home_of(hook)
    if home.startswith("peft.") and "adapter_names" in _name_of(hook):  # an adapter for each row
        return False
    return not any(home == library or home.startswith(library + ".") for library in _OF_LIBRARIES)


def _unwrapped(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _home_of(hook: Any) -> str:
    """Name of the module in which a hook's function, or its class, is defined."""
    return getattr(_unwrapped(hook), "__module__", None) or ""


def _name_of(hook: Any) -> str:
    hook = _unwrapped(hook)
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)} ({_home_of(hook)})"
