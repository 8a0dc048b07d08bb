"""Values that a field of a kind must not have."""

from __future__ import annotations

import json
from typing import Any

from ..models import VOCAB


class Raw(str):
    """JSON that Python does not write, or not so."""


def written(value: Any) -> str:
    """A value as JSON, with what is raw in it as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


LONG = "x" * 10_000
"""More of a request than a message may cite."""
NAN, INFINITY, HUGE = Raw("NaN"), Raw("-Infinity"), Raw("1" * 400)
WRONG: dict[str, list[Any]] = {
    "boolean": ["false", "true", 0, 1, {}, [], LONG],
    "text": [5, True, {}, ["a"], 1.5, "\ud83c", HUGE],
    "object": [5, LONG, True, [], [{}], 1.5],
    "object of strings": [5, "a", [], {"a": 5}, {"a": None}, {"a": {}}],
    "input": [5, True, {}, [], 1.5, "\ud83c"],
    "list": [5, LONG, {}, True, 1.5],
    "best tokens": [-1, 21, 2.5, "3", True, {}, [3], HUGE],
    "included": [5, "a", {}, True, [5], ["a"], [None], ["web_search_call.results"]],
    "most new": [0, -2, -1.0, 2.5, "5", True, {}, 2**31, HUGE],
    "length": [0, -1, 2.5, "5", True, {}, 2**31, HUGE],
    "count": [-1, 2.5, "5", True, [], 2**31, HUGE],
    "n-gram size": [-1, 65, 10**9, 2.5, "3", True, HUGE],
    "temperature": [-1, -0.01, "1", True, {}, 1e39, NAN, INFINITY, Raw("1e400"), HUGE],
    "probability": [-0.1, 1.1, "0.5", True, [], NAN, INFINITY],
    "positive probability": [0, -0.1, 1.1, "0.5", True, NAN],
    "cutoff": [-0.1, 1, 1.5, "0.1", True, NAN],
    "positive": [0, -1, "1", True, {}, NAN, Raw("Infinity"), 1e39],
    "number": ["1", True, [], NAN, INFINITY, 1e39, HUGE],
    "penalty": [-2.1, 3, "1", True, {}, NAN, Raw("Infinity"), Raw("1e999"), 1e39],
    "top-k": [-2, 2.5, "5", True, [], 2**31, HUGE],
    "priority": [2.5, "5", True, [], 2**31, HUGE],
    "stop tokens": [[VOCAB], [-1], ["5"], [True], 5, {}, [NAN]],
    "choices": [0, -1, 129, "1", True, 1.5],
    "other choices": [2, 0, "1", True, 1.5],
    "prompt": [
        *(5, True, {}, [], [[]], ["a", 5], ["a", []], [VOCAB], [1, "a"], [True], [1.5], ["a"] * 129, 1.5, "\ud83c"),
    ],
    "seed": [2.5, "1", True, {}, 2**63, -(2**63) - 1, HUGE],
    "token": [-1, VOCAB, 999_999, "5", 1.5, True, NAN],
    "end": [-2, VOCAB, [], [VOCAB], [-1], ["5"], "5", True, 1.5],
    "tokens": [[], [VOCAB], [-1], ["5"], [True], 5, {}, [NAN]],
    "token or tokens": [[], [VOCAB], -1, VOCAB, [NAN], "5", True],
    "sequences": [[], [[]], [5], [[VOCAB]], [["a"]], [[1] * 65], [[1]] * 1025, {}, [[NAN]]],
    "biases": [[], [[]], [[[1]]], [[[], 1.0]], [[[1], "1"]], [[[VOCAB], 1.0]], [[[1], NAN]], [[1, 1.0]], {"1": 1}, 5],
    "decay": [[], [1], [1, 2, 3], [-1, 1.5], [1, 0], [1, 11], ["1", 1.5], [1.5, 1.5], [1, NAN], 5],
    "watermark": [
        *(True, 5, [], "a", {"bia": 1}, {"bias": "1"}, {"bias": NAN}, {"context_width": 0}, {"context_width": 65}),
        *({"greenlist_ratio": 0}, {"greenlist_ratio": 1}, {"seeding_scheme": "hash"}, {"hashing_key": 0}),
    ],
    "stop": [5, {}, True, [5], ["a", None], [""], ["a"] * 5, "x" * 1025, [LONG]],
    "tree": [5, True, "", "no tree", "[(0, 0)]", [], [[]], {}, {"paths": 5}, "chain:9999999", "dynamic:2,9999999,4"],
    "bias": [
        *([], 5, "a", {"a": 1}, {"1.5": 1}, {"-1": 1}, {str(VOCAB): 1}, {"9" * 30: 1}, {LONG: 1}),
        *({"5": None}, {"5": "a"}, {"5": True}, {"5": NAN}, {"5": INFINITY}, {"5": [1]}, {"5": 1e39}),
    ],
    "model": [5, True, {}, ["a"], "another", LONG, "\ud83c"],
    "verbosity": [5, True, {}, "much", LONG],
    "breakers": [5, True, {}, [5], ["a", None], 1.5],
    "reasoning": [5, "a", [1], {"effort": "low"}, {"effort": 5}, {"summary": "detailed"}, {"efort": "none"}],
    "text options": [
        *(5, "a", [], {"format": 5}, {"verbosity": "much"}, {"format": {"type": "grammar"}}),
        *({"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}),
    ],
    "response format": [
        *(5, "json_object", [], {}),
        *({"type": "json"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}),
        *(
            {"type": "json_schema", "json_schema": {"schema": one}}
            for one in (5, "{}", [], {"type": "objekt"}, {"$ref": 5})
        ),
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(" + LONG}}},
    ],
    "structured outputs": [
        *(5, "a", [], {}),
        *({"json": {}, "regex": "a"}, {"json": "{"}, {"json": 5}, {"json": {"enum": []}}, {"xml": "a"}),
        *({"regex": "a(b"}, {"regex": 5}, {"regex": "(?=a)"}, {"choice": []}, {"choice": "a"}, {"choice": [1]}),
        *({"grammar": "start: x"}, {"grammar": LONG}, {"grammar": ""}, {"json_object": 1}, {"json_object": False}),
    ],
    "stream options": [5, "a", [], {"include_usage": "true"}, {"include_usage": 1}, {"include_obfuscation": []}],
    "choice without tools": [5, [], True, "required", "any", LONG, {"type": "function"}, {}],
    "template variables": [
        *(5, "a", [], True, {"padding": "max_length", "max_length": 10**9}, {"truncation": True}, {"max_length": 2}),
        *({"return_tensors": "pt"}, {"tokenize": False}, {"chat_template": "{{ 1 }}"}),
        *({"add_generation_prompt": False}, {"self": 1}),
        *({"messages": []}, {"tools": []}, {"documents": []}, {"conversation": []}, {"continue_final_message": True}),
        *({"tokenizer_kwargs": {}}, {"add_special_tokens": True}, {"stride": 1}, {"pad_to_multiple_of": 8}),
        *({"__class__": 1}, {"raise_exception": 1}, {"strftime_now": 1}, {"bos_token": "a"}, {"return_dict": False}),
    ],
    "options": [5, [], True, "", "{", "[]", "5", LONG, '{"a": NaN}', "[" * 500, {"temprature": 1}, {LONG: 1}],
}
"""Values that a field of a kind must not have."""
