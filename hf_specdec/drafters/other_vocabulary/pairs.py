"""What is known of pairs of tokenizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar


Value = TypeVar("Value")


class OfPairs(Generic[Value]):
    """Values for pairs of tokenizers, which live as long as these, and are made anew where a vocabulary has grown."""

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, tuple[Hashable, Value]]]
        self._values = weakref.WeakKeyDictionary()

    def get(self, pair: tuple[Any, Any], key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a pair, and of whatever else `key` says, which `make` makes once."""
        first, second = pair
        whole_key = key, len(first), len(second)
        of_first = self._values.setdefault(first, weakref.WeakKeyDictionary())
        found = of_first.get(second)
        if found is None or found[0] != whole_key:
            found = of_first[second] = whole_key, make()
        return found[1]


def is_one_vocabulary(tokenizer: Any, other: Any) -> bool:
    """
    Whether two tokenizers have the same tokens, with the same numbers. Their roles may differ, as between a model and
    the same after instruction tuning: special tokens are shared by name.
    """

    def compare() -> bool:
        return tokenizer.get_vocab() == other.get_vocab()

    return tokenizer is other or _is_one.get((tokenizer, other), None, compare)


_is_one: OfPairs[bool] = OfPairs()
