"""The two tensors of a target that some formats hold a copy of, read without the target's other tensors."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from .reading import WEIGHT_FILES, HubOptions, find_first, read_weights, shard_paths


class TargetFiles:
    """
    Files of the model that a head drafts for.

    Args:
        name (`str`): folder or Hub repository.
        options (`HubOptions`, *optional*): where to look for its files.

    Raises:
        OSError: if there is no such folder, and the Hub cannot be reached.
    """

    def __init__(self, name: str, options: HubOptions | None = None):
        self.name, self.options = str(name), options or HubOptions()
        self.options.check(self.name)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The target's config."""
        return AutoConfig.from_pretrained(self.name, **self.options.as_arguments())

    @property
    def num_layers(self) -> int:
        """Number of the target's decoder layers."""
        return self.config.get_text_config().num_hidden_layers

    def embeddings(self) -> torch.Tensor:
        """The target's token embeddings, `[V, Ht]`."""
        return self._tensor("embed_tokens.weight")

    def lm_head(self) -> torch.Tensor:
        """The target's lm_head, `[V, Ht]`: its embeddings where the two are tied."""
        if getattr(self.config.get_text_config(), "tie_word_embeddings", False):
            return self.embeddings()
        return self._tensor("lm_head.weight")

    def _tensor(self, name: str) -> torch.Tensor:
        """
        The only tensor that is called `name`, or whose name ends in `.` and `name`.

        Raises:
            ValueError: if no tensor, or more than one, has such a name.
        """
        path = find_first(self.name, WEIGHT_FILES, self.options)
        found: dict[str, torch.Tensor] = {}
        for shard in self._shards_with(name, path):
            tensors = read_weights(shard)
            found |= {key: tensors[key] for key in tensors if key == name or key.endswith(f".{name}")}
        if len(found) != 1:
            raise ValueError(f"{self.name}: needs one tensor `…{name}`, but has {sorted(found) or 'none'}.")
        return next(iter(found.values()))

    def _shards_with(self, name: str, path: Path) -> list[Path]:
        shards = shard_paths(self.name, path, self.options)
        if path.name.endswith(".index.json"):
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            wanted = {file for key, file in files.items() if key == name or key.endswith(f".{name}")}
            shards = [shard for shard in shards if shard.name in wanted]
        return shards
