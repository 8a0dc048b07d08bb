"""Grammars whose parts are too deep within each other: llguidance's recursion would end the process."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher
from support.grammar import chain, rules, small_tokenizer

from hf_specdec.grammar import CompiledGrammar
from hf_specdec.grammar.chains import longest_chain
from hf_specdec.grammar.depths import MOST_LEVELS, check_grammar, check_lark, check_schema


DEEPEST = (MOST_LEVELS - 2) // 2
"""The longest chain of definitions."""


def of(*parts: dict[str, Any]) -> str:
    return json.dumps({"grammars": parts})


def test_schemas() -> None:
    """Those in a circle are all within each other, others as deep as they are; all are where they have names."""
    named = {
        "$defs": {f"a{number}": {"$anchor": f"a{number}", "$ref": f"#a{number + 1}"} for number in range(MOST_LEVELS)}
    }
    wide = {f"p{number}": {"$ref": "#/$defs/d0"} for number in range(1000)}
    right = [
        *(True, {}, {"$ref": "#/nothing"}, {"$ref": 5}, {"properties": wide, "$defs": {"d0": {"type": "string"}}}),
        *(chain(DEEPEST), chain(50, {"$ref": "#/$defs/d0"}), chain(100, type="array", items=[{"$ref": "#/$defs/d1"}])),
        {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/anyOf/1"}}]},
        *({"items": [{"$ref": f"#/items/{place}"}]} for place in ("9" * 5000, "\N{SUPERSCRIPT TWO}")),
    ]
    wrong = [chain(DEEPEST + 1), chain(DEEPEST + 1, {"$ref": "#/$defs/d0"}), named | {"$ref": "#a0"}]
    wrong.append(
        {"anyOf": [chain(0)["$defs"]["d0"], {"items": {"$ref": "#/anyOf/2"}}, *chain(300)["$defs"].values()]}
        | chain(300)
    )
    for schema in right:
        check_schema(schema)
    for schema in wrong:
        with pytest.raises(ValueError, match="within each other"):
            check_schema(schema)


def test_definitions_within_others() -> None:
    """What is looked at is bounded where each definition is in all before it, and not where there is just much."""
    inner: dict[str, Any] = {"enum": [1] * 20_000}
    for number in reversed(range(30)):
        inner = {"b": inner, "$ref": "#/$defs/a" + "/b" * (number + 1)}
    with pytest.raises(ValueError, match="too large within each other"):
        check_schema({"$defs": {"a": inner}, "$ref": "#/$defs/a"})
    check_schema({"enum": [*range(400_000)]})


@pytest.mark.parametrize(
    "lark",
    [
        rules(MOST_LEVELS - 1),
        rules(240, form="({})"),
        "start: " + " | ".join(f"x{number}" for number in range(2000)).replace("1", "b") + '\nx: "a"',
        rules(300) + rules(300).replace("start", "zstart").replace("x", "y"),
        f'start: {" ".join("abc"[number % 3] for number in range(2000))}\na: ("(")+\nb: /[([{{"]:/\nc: ":" // a: b\n',
        rules(300, "%lark {\n" + rules(300) + "} xa xb"),
        'start: "\\" start " | "start" | /start\\/ start/ | <start> | @start | "a"i # start\n',
        "start: %json " + json.dumps(chain(DEEPEST)) + "\n",
        "start: %json " + json.dumps(chain(9_000)).replace("}", "]"),  # no JSON: an error of llguidance's
    ],
    ids=["chain", "groups", "wide", "two", "flat", "inner", "literals", "json", "no json"],
)
def test_lark(lark: str) -> None:
    """As deep as may be, or much that is not deep; and llguidance compiles it, or says what is wrong."""
    check_grammar(lark)
    LLMatcher.validate_grammar_with_warnings(lark)


@pytest.mark.parametrize(
    "lark, times",
    [
        (rules(MOST_LEVELS), MOST_LEVELS + 1),
        (rules(600, "start"), 601),
        (rules(200, form='("b" ({} | "c")+)*'), 601),
        (rules(600).upper().replace("START", "start"), 601),
        (rules(600).replace("\n", ' # : "\n  |"b" /\\/[(]#x/ <a"b> "\\"" //"\r\n\n\t'), 601),
        (rules(600, form="?{}").replace("\nx", "\n!?x"), 601),
        ('start: %json {"const": "\\""} ' + rules(600)[7:], 601),
        ('start: %lark {\nstart: "a"{1,2}\n} ' + rules(600)[7:], 601),
        ("start: %lark {\n" + rules(600) + "}\n", 601),
        ("%ignore " + rules(600).upper()[7:] + 'start: "a"', 602),
    ],
)
def test_lark_that_is_too_deep(lark: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"its rules and groups are within each other {times} times, but may be 500"):
        check_lark(lark)


@pytest.mark.parametrize(
    "grammar, says",
    [
        (rules(6_000), "rules and groups are within each other 6001 times"),
        (LLMatcher.grammar_from_json_schema(chain(6_000)), "parts are within each other 12002 times"),
        ("start: %json " + json.dumps(chain(6_000)), "parts are within each other 12002 times"),
        (of({"lark_grammar": 'start: "a"'}, {"json_schema": chain(6_000)}), "parts are within each other 12002 times"),
        (" " + of({"lark_grammar": rules(6_000)}), "rules and groups are within each other 6001 times"),
        (of({"json_schema": {"const": 0}}).replace("0", "9" * 5000), "number out of range"),
        (of({"json_schema": {"const": 0}}).replace("0", "[" * 50_000 + "]" * 50_000), "arrays and objects in it"),
        ("start: %json " + "[" * 50_000 + "]" * 50_000, "arrays and objects in it"),
        (of({"json_schema": 5}, {}), "grammar must have either"),
        ('{"grammars": 5}', "invalid type"),
    ],
)
def test_they_are_not_compiled(grammar: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"`grammar` cannot be compiled: .*{says}"):
        CompiledGrammar(grammar, small_tokenizer(), 8)


def test_longest_chains() -> None:
    """Beside all paths, of graphs without circles; and at least those of any."""
    draws = random.Random(0)

    def longest(name: str, behind: frozenset[str]) -> int:
        below = [longest(one, behind | {one}) for one in inner[name] if one not in behind]
        return levels[name] + max(below, default=0)

    for number in range(200):
        names = [str(one) for one in range(6)]
        levels = {name: draws.randint(0, 3) for name in names}
        inner = {
            name: [one for one in names if draws.random() < 0.3 and (number % 2 or int(one) > int(name))]
            for name in draws.sample(names, 6)
        }
        levels = {name: levels[name] for name in inner}
        expected, found = max(longest(name, frozenset([name])) for name in names), longest_chain(levels, inner)
        assert found >= expected if number % 2 else found == expected
    assert longest_chain({"a": 1, "b": 2, "c": 4}, {"a": ["b"], "b": ["a", "c"], "c": []}) == 7
    assert longest_chain({}, {}) == 0
