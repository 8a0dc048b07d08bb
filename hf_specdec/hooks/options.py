"""Options of ours in `GenerationConfig`, and configs of ours with `AutoConfig`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def add_options() -> None:
    from transformers.generation.configuration_utils import GenerationConfig

    if not hasattr(GenerationConfig, "tree"):
        GenerationConfig.tree = _TreeOption()
        GenerationConfig.speculative_config = None


class _TreeOption:
    """
    `GenerationConfig.tree`, None by default. Trees within a schedule are held in their JSON-able form: transformers
    converts an option that is an object when it saves a config, but not what a list holds.
    """

    def __get__(self, config: Any, kind: Any = None) -> Any:
        return None if config is None else vars(config).get("tree")

    def __set__(self, config: Any, tree: Any) -> None:
        if isinstance(tree, (list, tuple)):
            tree = [_jsonable(entry) if isinstance(entry, (list, tuple)) else entry for entry in tree]
        vars(config)["tree"] = tree

    def __delete__(self, config: Any) -> None:
        vars(config).pop("tree", None)


def _jsonable(entry: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    parts = [part.to_dict() if hasattr(part, "to_dict") else part for part in entry]
    return tuple(parts) if isinstance(entry, tuple) else parts


def register_configs() -> None:
    """Imports the modules that register our configs with `AutoConfig`, except one whose import triggered this hook."""
    for kind in ("block", "eagle", "medusa", "mtp"):
        if (name := f"hf_specdec.{kind}.configuration_{kind}") not in sys.modules:
            import_module(name)
