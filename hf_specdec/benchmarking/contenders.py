"""Contenders of a benchmark: ways to call `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..config import SpeculativeConfig
from ..drafters import OtherVocabularyDrafter, is_own_draft
from ..trees.text import parse_tree, shorten


GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""Arguments of a greedy `generate` call, whatever the model's own defaults are."""

BASELINES = ("eager", "static", "assisted", "lookup")
"""
Generation methods of transformers itself: plain; a static cache with a compiled forward (compiled on accelerators
only); assisted generation with chains of 5 tokens of the same draft, universal for one of another tokenizer; prompt
lookup of 10 tokens.
"""
OURS = "tree "
"""Beginning of the names of this library's contenders."""
CHAIN_LENGTH = 5
LOOKUP_LENGTH = 10


def sampling_options(temperature: float) -> dict[str, Any]:
    """The arguments of `generate` for a temperature; 0 is greedy."""
    return GREEDY if temperature == 0 else {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True, eq=False)
class Contender:
    """
    One way to call `generate`.

    Args:
        name (`str`): name in tables.
        options (`dict`): arguments of `generate`.
        tree (`str`, *optional*): tree of a contender that speculates with this library; None for a baseline.
        warm_up_calls (`int`): calls before timing; two where the first compiles.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    tree: str | None = None
    warm_up_calls: int = 1

    @property
    def is_ours(self) -> bool:
        """Whether the contender speculates with this library."""
        return self.tree is not None

    @contextmanager
    def settings(self) -> Iterator[dict[str, Any]]:
        """Yields the arguments of `generate`; the draft of an "assisted" baseline proposes chains of fixed length."""
        assistant = self.options.get("assistant_model")
        if self.is_ours or assistant is None:
            yield dict(self.options)
            return
        before = assistant.generation_config
        assistant.generation_config = _fixed_chains(before)
        try:
            yield dict(self.options)
        finally:
            assistant.generation_config = before


def _fixed_chains(config: GenerationConfig) -> GenerationConfig:
    config = copy.deepcopy(config)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = CHAIN_LENGTH, "constant"
    config.assistant_confidence_threshold = 0.0
    return config


def baseline(name: str, draft: Any) -> Contender:
    """
    The contender of a name in `BASELINES`.

    Raises:
        ValueError: for another name, and for "assisted" without a draft model.
    """
    if name not in BASELINES:
        raise ValueError(f"{name!r} is no baseline. There are {', '.join(BASELINES)}.")
    assisted: dict[str, Any] = {"assistant_model": draft}
    if name == "assisted" and isinstance(draft, OtherVocabularyDrafter) and draft.tokenizers is not None:
        names = ("assistant_model", "tokenizer", "assistant_tokenizer")
        # Of a copy: sampled, universal assisted generation replaces the draft's embeddings, and leaves it so.
        assisted = dict(zip(names, (copy.deepcopy(draft.model), *draft.tokenizers), strict=True))
    elif name == "assisted" and (is_own_draft(draft) or not isinstance(draft, PreTrainedModel)):
        raise ValueError(
            "'assisted' is transformers' own assisted generation and needs a draft model, no head or ngram."
        )
    return {
        "eager": Contender("generate"),
        "static": Contender("generate, static cache", {"cache_implementation": "static"}, warm_up_calls=2),
        "assisted": Contender(f"assisted, chain of {CHAIN_LENGTH}", assisted),
        "lookup": Contender("prompt lookup", {"prompt_lookup_num_tokens": LOOKUP_LENGTH}),
    }[name]


def speculative(draft: Any, tree: str, compiles: bool = False) -> Contender:
    """
    A contender that speculates with this library.

    Args:
        draft: a value of `assistant_model=`.
        tree (`str`): a tree in the notation of `parse_tree`.
        compiles (`bool`, *optional*, defaults to `False`): see `SpeculativeConfig.compile`.
    """
    config = SpeculativeConfig(tree=parse_tree(tree), compile=compiles)
    name = f"{OURS}{shorten(tree)}{', compiled' if compiles else ''}"
    return Contender(name, {"assistant_model": draft, "speculative_config": config}, tree)


def speculative_with_all(draft: Any, trees: Sequence[str]) -> list[Contender]:
    """Contenders of this library, one per tree. Contenders with equal short names are numbered."""
    found: list[Contender] = []
    for tree in trees:
        contender = speculative(draft, tree)
        same = sum(other.name.partition(" #")[0] == contender.name for other in found)
        found.append(replace(contender, name=f"{contender.name} #{same + 1}") if same else contender)
    return found
