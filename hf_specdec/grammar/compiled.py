"""A grammar, compiled for a tokenizer and the tokens that end a text."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .beginnings import FreeBeginning, LateText
from .depths import check_grammar
from .spelled import spelled_out, unforced
from .texts import GrammarText


MOST_TABLES = 4
"""Most tables kept of a tokenizer, a second to make for a large vocabulary. Nearly all calls share one."""
MOST_GRAMMARS = 64
"""Most compiled grammars that are kept per table."""


def llguidance_of(name: str = "grammar") -> Any:
    """
    The module `llguidance`.

    Raises:
        ImportError: if it is not installed; the message names the argument that needs it.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"`{name}` needs llguidance: `pip install hf-specdec[grammar]`.") from error
    return llguidance


class CompiledGrammar:
    """
    A grammar for one tokenizer.

    Args:
        grammar (`str`): a grammar as `llguidance.LLMatcher.grammar_from_json_schema`, `…_from_regex` or `…_from_lark`
            return it.
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        vocab_size (`int`): number of tokens that the target has logits for.
        end_tokens (`Sequence[int]`): tokens that end a text; by default the tokenizer's.
        beginning (`FreeBeginning`, *optional*): of a text before the grammar begins.

    Raises:
        TypeError: if the grammar is no string, or the tokenizer no fast one.
        ValueError: for a grammar that cannot be compiled, or whose parts are too deep within each other.
        ImportError: without `llguidance`.
    """

    def __init__(
        self,
        grammar: str,
        tokenizer: Any,
        vocab_size: int,
        end_tokens: Sequence[int] = (),
        beginning: FreeBeginning | None = None,
    ):
        llguidance = llguidance_of()
        if not isinstance(grammar, str):
            raise TypeError(
                f"`grammar` must be a string, but is {type(grammar).__name__}. Give what "
                "`llguidance.LLMatcher.grammar_from_json_schema(schema)` returns, or `grammar_from_regex`, or "
                "`grammar_from_lark`."
            )
        self._table, self._end_tokens = _table_of(tokenizer, vocab_size, end_tokens)
        self._grammar, self._beginning = grammar, beginning
        self._matcher = self._table.matcher(llguidance, grammar)

    def text(self) -> GrammarText | LateText:
        """A text that has no token yet."""
        with self._table.lock:
            special = self._table.special.values()
            text = GrammarText(self._matcher.deep_copy(), self._end_tokens, special, self._unforced)
        if self._beginning is None:
            return text
        return LateText(text, self._beginning, self._table.tokenizer.vocab_size)

    def _unforced(self) -> Any:
        """A matcher of the same grammar that forces nothing."""
        matcher = self._table.matcher(llguidance_of(), unforced(self._grammar))
        with self._table.lock:
            return matcher.deep_copy()


class _Table:
    """
    What llguidance knows of a tokenizer, and the grammars that were compiled for it.

    Args:
        tokenizer (`LLTokenizer`): its own.
        added (`dict[int, AddedToken]`): tokens that were added to the vocabulary.
    """

    def __init__(self, tokenizer: Any, added: dict[int, Any]):
        self.tokenizer, self.lock = tokenizer, threading.Lock()
        self.special = {one.content: token for token, one in added.items() if tokenizer.is_special_token(token)}
        """The tokenizer's special tokens, by their text."""
        self._matchers: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, llguidance: Any, grammar: str) -> Any:
        """The matcher of a grammar, which itself takes no token."""
        with self.lock:
            matcher = self._matchers.get(grammar)
        if matcher is None:
            try:
                check_grammar(grammar)
            except ValueError as error:
                raise ValueError(f"`grammar` cannot be compiled: {error}.") from error
            matcher = llguidance.LLMatcher(self.tokenizer, spelled_out(grammar, self.special), log_level=0)
            if matcher.is_error():
                raise ValueError(f"`grammar` cannot be compiled: {matcher.get_error().strip()}")
            # Copies share what the first mask needs, up to 30 ms of work: here it is the caller's, not the engine's.
            GrammarText(matcher.deep_copy(), frozenset()).allowed()
        with self.lock:
            self._matchers[grammar] = matcher
            self._matchers.move_to_end(grammar)
            while len(self._matchers) > MOST_GRAMMARS:
                self._matchers.popitem(last=False)
        return matcher


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """
    The tokens of a tokenizer, by their text, that no text of a grammar stands for: a Lark grammar names their ids,
    `<[5]>`. To llguidance these are special tokens, and others whose text looks like a tag.
    """
    llguidance_of()
    return _table_of(tokenizer, len(tokenizer), ())[0].special


_tables: weakref.WeakKeyDictionary[Any, OrderedDict[tuple[int, int, int], _Table]] = weakref.WeakKeyDictionary()
"""By tokenizer: number of tokens of the target and of the tokenizer, and the end token that llguidance knows."""
_lock = threading.Lock()


def _table_of(tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> tuple[_Table, frozenset[int]]:
    """
    A table of a tokenizer whose end token is one of these, or else one of the tokenizer's; and these end tokens. A new
    table takes up to a second for a large vocabulary.
    """
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(
            f"`tokenizer` must be a fast tokenizer where there is a `grammar`, but is {type(tokenizer).__name__}. "
            "Load it with `AutoTokenizer`."
        )
    size = max(vocab_size, len(tokenizer)), len(tokenizer)
    own = tokenizer.eos_token_id
    ends = frozenset(end for end in end_tokens or [own] if end is not None and end < size[0])
    if not ends:
        raise ValueError(
            "`grammar`: neither `eos_token_id` nor the tokenizer names a token that ends a text. Give `eos_token_id`."
        )
    with _lock:
        known = _tables.setdefault(tokenizer, OrderedDict())
        key = next((key for key in known if key[:2] == size and key[2] in ends), None)
        if key is None:
            key = (*size, own if own in ends else min(ends))
            try:
                own_table = from_tokenizer(tokenizer, n_vocab=size[0], eos_token=key[2])
            except ValueError as error:
                raise ValueError(
                    f"`tokenizer`: llguidance cannot read it, as it has to for a `grammar` ({error}). It reads "
                    "byte-level and SentencePiece vocabularies."
                ) from error
            known[key] = _Table(own_table, tokenizer.added_tokens_decoder)
        known.move_to_end(key)
        while len(known) > MOST_TABLES:
            known.popitem(last=False)
        return known[key], ends
