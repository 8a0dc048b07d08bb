"""
Structured output: a grammar of llguidance says at every token which tokens may come next.

    compiled.py    a grammar for one tokenizer and its end tokens
    depths.py      how deep its parts may be within each other
    chains.py      the longest chain of things that name each other
    lark_rules.py  which rules a Lark grammar has, and which they name
    spelled.py     grammars of texts that look like a special token
    texts.py       where one text stands in its grammar: allowed tokens, forced tokens
    growing.py     what may come at the nodes of a tree that grows
    beginnings.py  free text before that of a grammar
    mask.py        the logits processor that lets only allowed tokens through
    options.py     `grammar=` and `grammar_after=` among the options of a call or request
"""

from .beginnings import FreeBeginning
from .compiled import CompiledGrammar, llguidance_of, special_tokens
from .growing import GrowingMask
from .mask import GrammarMask, grammar_in
from .options import grammar_mask, with_grammar


__all__ = [
    "CompiledGrammar",
    "FreeBeginning",
    "GrammarMask",
    "GrowingMask",
    "grammar_in",
    "grammar_mask",
    "llguidance_of",
    "special_tokens",
    "with_grammar",
]
