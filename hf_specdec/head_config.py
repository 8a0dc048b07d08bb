"""What the configs of heads of all kinds derive from their fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self


class WithDefaultTree:
    """A config whose `default_tree` may be given as an object, and which has copies with other values."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them: a default tree that was given as an object is a dict."""
        fields = super().to_dict()  # type: ignore[misc]
        tree = fields.get("default_tree")
        return fields | ({"default_tree": tree.to_dict()} if hasattr(tree, "to_dict") else {})

    def changed(self, **fields: Any) -> Self:
        """A copy with other values."""
        config = copy.deepcopy(self)
        for field, value in fields.items():
            setattr(config, field, value)
        return config


class HeadSizes(WithDefaultTree):
    """Sizes of a head, from the config of its decoder layers and what it reads of its target."""

    if TYPE_CHECKING:
        text_config: Any
        target_hidden_size: int | None
        num_aux_features: int | None
        aux_layer_ids: list[int] | None
        draft_vocab_size: int | None

    @property
    def hidden_size(self) -> int:
        """H, the head's hidden size."""
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.text_config.vocab_size

    size_between_steps = 0
    """Size of the outputs for a text's last token that the head itself reads with the next one."""

    @property
    def feature_size(self) -> int:
        """Width of the target's features that the head reads, `num_aux_features` · Ht, or Ht without any."""
        return (self.num_aux_features or 1) * (self.target_hidden_size or self.hidden_size)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the head can propose."""
        return self.draft_vocab_size or self.vocab_size

    def check_whole_numbers(self, least: Mapping[str, int]) -> None:
        """Raises a `ValueError` unless each of these fields is None or a whole number of at least so much."""
        for field, bound in least.items():
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < bound):
                raise ValueError(f"`{field}` must be a whole number of at least {bound}, but is {value!r}.")

    def check_layer_ids(self, kind: str = "layer numbers") -> None:
        """Raises a `ValueError` unless `aux_layer_ids` is None or has a number for each feature."""
        ids = self.aux_layer_ids
        if ids is None:
            return
        if not isinstance(ids, list | tuple) or not all(type(layer) is int and layer >= 0 for layer in ids):
            raise ValueError(f"`aux_layer_ids` must be a list of {kind}, but is {ids!r}.")
        if len(ids) != self.num_aux_features:
            raise ValueError(
                f"`aux_layer_ids`={list(ids)} has {len(ids)} layers, but the head reads {self.num_aux_features} "
                "features. Give as many."
            )
