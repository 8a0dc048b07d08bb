"""Requests that are wrong in one thing each: rows of a route, the body or a part of it, and the field at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .models import VOCAB


class Raw(str):
    """JSON that Python does not write, or not so."""


class BadRequest(NamedTuple):
    """
    A request that is refused with status 400.

    Args:
        route (`str`): where it goes.
        content (`str`): its body.
        field (`str`): what the message names.
    """

    route: str
    content: str
    field: str


LONG = "x" * 10_000
"""More of a request than a message may cite."""
USER = {"role": "user", "content": "abc"}
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}

CHAT, COMPLETION, RESPONSE, LOAD = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/load_model"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETION: {"prompt": "abc"},
    RESPONSE: {"input": "abc"},
    LOAD: {"model": "some/model"},
    TOKENIZE: {"prompt": "abc"},
    DETOKENIZE: {"tokens": [1]},
}
"""What each route needs."""

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
        5,
        True,
        {},
        [],
        [[]],
        ["a", 5],
        ["a", []],
        [VOCAB],
        [1, "a"],
        [True],
        [1.5],
        ["a"] * 129,
        1.5,
        "\ud83c",
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
    "text options": [
        *(5, "a", [], {"format": 5}, {"verbosity": "much"}, {"format": {"type": "grammar"}}),
        *({"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}),
    ],
    "response format": [
        *(
            5,
            "json_object",
            [],
            {},
            {"type": "json"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {}},
        ),
        *(
            {"type": "json_schema", "json_schema": {"schema": one}}
            for one in (5, "{}", [], {"type": "objekt"}, {"$ref": 5})
        ),
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(" + LONG}}},
    ],
    "structured outputs": [
        *(
            5,
            "a",
            [],
            {},
            {"json": {}, "regex": "a"},
            {"json": "{"},
            {"json": 5},
            {"json": {"enum": []}},
            {"xml": "a"},
        ),
        *({"regex": "a(b"}, {"regex": 5}, {"regex": "(?=a)"}, {"choice": []}, {"choice": "a"}, {"choice": [1]}),
        *({"grammar": "start: x"}, {"grammar": LONG}, {"grammar": ""}, {"json_object": 1}, {"json_object": False}),
    ],
    "stream options": [5, "a", [], {"include_usage": "true"}, {"include_usage": 1}, {"include_obfuscation": []}],
    "choice without tools": [5, [], True, "required", "any", LONG, {"type": "function"}, {}],
    "template variables": [
        *(5, "a", [], True, {"padding": "max_length", "max_length": 10**9}, {"truncation": True}, {"max_length": 2}),
        *(
            {"return_tensors": "pt"},
            {"tokenize": False},
            {"chat_template": "{{ 1 }}"},
            {"add_generation_prompt": False},
        ),
        *({"messages": []}, {"tools": []}, {"documents": []}, {"conversation": []}, {"continue_final_message": True}),
        *(
            {"tokenizer_kwargs": {}},
            {"add_special_tokens": True},
            {"stride": 1},
            {"pad_to_multiple_of": 8},
            {"self": 1},
        ),
        *({"__class__": 1}, {"raise_exception": 1}, {"strftime_now": 1}, {"bos_token": "a"}, {"return_dict": False}),
    ],
    "options": [5, [], True, "", "{", "[]", "5", LONG, '{"a": NaN}', "[" * 500, {"temprature": 1}, {LONG: 1}],
}
"""Values that a field of a kind must not have."""

_OF_ALL: dict[str, str] = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "probability",
    "seed": "seed",
    "stream": "boolean",
    "generation_config": "options",
    "stream_options": "stream options",
    "structured_outputs": "structured outputs",
    "user": "text",
    "top_k": "top-k",
    "min_p": "probability",
    "repetition_penalty": "positive",
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "penalty"),
    "min_tokens": "count",
    "ignore_eos": "boolean",
    "stop_token_ids": "stop tokens",
    "priority": "priority",
    "tree": "tree",
}
_OF_CONVERSATIONS = {
    "chat_template_kwargs": "template variables",
    "tool_choice": "choice without tools",
    "tools": "list",
    "parallel_tool_calls": "boolean",
    "top_logprobs": "best tokens",
    "metadata": "object of strings",
    "store": "boolean",
    "prompt_cache_options": "object",
    **dict.fromkeys(("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "text"),
}
_OF_TEXTS = {"max_tokens": "length", "stop": "stop", "n": "choices", "logit_bias": "bias"}
FIELDS: dict[str, dict[str, str]] = {
    CHAT: _OF_ALL
    | _OF_CONVERSATIONS
    | _OF_TEXTS
    | {"max_completion_tokens": "length", "verbosity": "verbosity", "messages": "list", "logprobs": "boolean"}
    | {"response_format": "response format"},
    COMPLETION: _OF_ALL
    | _OF_TEXTS
    | {"prompt": "prompt", "best_of": "other choices", "logprobs": "best tokens"}
    | {"response_format": "response format"},
    RESPONSE: _OF_ALL
    | _OF_CONVERSATIONS
    | {
        "input": "input",
        "instructions": "text",
        "max_output_tokens": "length",
        "text": "text options",
        "include": "included",
        "image": "object",
        "access_programs": "object",
    },
    LOAD: {"model": "model"},
    TOKENIZE: {
        "model": "model",
        "prompt": "text",
        **dict.fromkeys(("messages", "tools"), "list"),
        "chat_template_kwargs": "template variables",
        **dict.fromkeys(("add_special_tokens", "return_token_strs"), "boolean"),
    },
    DETOKENIZE: {"model": "model", "tokens": "stop tokens"},
}
"""The kinds of the fields that are served, by route."""

_ANYTHING = [5, "a", {"a": 1}, [1], True]
UNSUPPORTED: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "functions": [[{"name": "f"}], 5, "a", {"a": 1}, True],
        "function_call": [{"name": "f"}, "required", 5, [1], True],
        "modalities": [["text", "audio"], ["audio"], "text", 5, {"a": 1}],
        **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options", "moderation"), _ANYTHING),
    },
    COMPLETION: {
        "echo": [True, 1, 0, "false", [1]],
        "suffix": ["a", 5, True, [1], LONG],
    },
    TOKENIZE: {
        "add_generation_prompt": [False, 1, "true", {}, [1]],
        "continue_final_message": [True, 1, "false", {}, [1]],
    },
    RESPONSE: {
        "background": [True, 1, 0, "false", [1]],
        "context_management": [[{"type": "compaction"}], 5, "a", {"a": 1}, True],
        "reasoning": [{"effort": "low"}, {"summary": "auto"}, 5, "a", [1]],
        "truncation": ["auto", 5, True, {"a": 1}, [1]],
        **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id", "prompt", "moderation"), _ANYTHING),
    },
}
"""Fields that are not supported, with values that would change something."""

OPTIONS: dict[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), "length"),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), "count"),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), "n-gram size"),
    **dict.fromkeys(("do_sample", "remove_invalid_values", "renormalize_logits", "use_cache"), "boolean"),
    **dict.fromkeys(("disable_compile", "_from_model_config"), "boolean"),
    **dict.fromkeys(("top_p", "min_p"), "probability"),
    **dict.fromkeys(("top_h", "typical_p"), "positive probability"),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), "cutoff"),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), "positive"),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "tokens"),
    **dict.fromkeys(("forced_bos_token_id", "bos_token_id", "pad_token_id"), "token"),
    **dict.fromkeys(("forced_eos_token_id", "decoder_start_token_id"), "token or tokens"),
    "temperature": "temperature",
    "seed": "seed",
    "guidance_scale": "number",
    "eos_token_id": "end",
    "stop_strings": "stop",
    "bad_words_ids": "sequences",
    "sequence_bias": "biases",
    "exponential_decay_length_penalty": "decay",
    "watermarking_config": "watermark",
    "tree": "tree",
    "transformers_version": "text",
}
"""Kinds of the options of `generate` that are served, or have no effect."""
UNSUPPORTED_OPTIONS: dict[str, list[Any]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), [2, 0, "1", True, 1.5]),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), [0.5, -1, "0", False, NAN]),
    "length_penalty": [2, 0.5, "1", True, [1]],
    "early_stopping": [True, "never", 0, [1], {"a": 1}],
    "cache_implementation": ["static", "paged", 5, True, [1]],
    "num_assistant_tokens": [5, 0, "20", True, [20]],
    "num_assistant_tokens_schedule": ["heuristic", 5, True, [1], {"a": 1}],
    "assistant_confidence_threshold": [0.5, 0, "0.4", True, NAN],
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), [5, 0, "10", True, [10]]),
    **dict.fromkeys(("assistant_early_exit", "prompt_lookup_num_tokens"), [5, -1, "0", False, [0]]),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        [True, 1, 0, "false", [1]],
    ),
    **dict.fromkeys(("is_assistant", "use_mtp", "low_memory", "token_healing"), [True, 1, 0, "false", [1]]),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "cache_config", "max_cache_len"), _ANYTHING),
    **dict.fromkeys(("compile_config", "prefill_chunk_size", "continuous_batching_config"), _ANYTHING),
    **dict.fromkeys(("speculative_config", "assistant_ensemble_weight", "max_matching_ngram_size"), _ANYTHING),
    "speculation_type": _ANYTHING,
}
"""Options that requests do not have."""
UNKNOWN = [
    "temprature",
    "max_token",
    "Stream",
    "__class__",
    "__dict__",
    "_x",
    "",
    " model",
    LONG,
    "ü",
    "epsilon_cutoff",
    "self",
]
"""Names of no field."""

MESSAGES: list[tuple[Any, str]] = [
    ({}, "role"),
    ({"content": "abc"}, "role"),
    *(({"role": role, "content": "abc"}, "role") for role in (5, None, "", "User", "nobody", "<eos>", LONG, ["user"])),
    *(({"role": role}, "content") for role in ("user", "system", "developer", "tool", "function", "assistant")),
    *(({"role": "user", "content": one}, "content") for one in (None, 5, True, {}, [], 1.5)),
    ({"role": "assistant", "content": None, "tool_calls": []}, "content"),
    ({"role": "user", "content": None, "tool_calls": [CALL]}, "content"),
    *(({"role": "user", "content": [one]}, "content[0]") for one in (5, "a", None, [], {}, {"text": "a"})),
    *(
        ({"role": "user", "content": [{"type": one}]}, "content[0].type")
        for one in (5, None, "image_url", "file", LONG)
    ),
    *(({"role": "user", "content": [{"type": "text", "text": one}]}, "content[0].text") for one in (5, None, [], {})),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
    ({"role": "user", "content": "\udf33"}, "content"),
]
"""Messages, and what is wrong in them; for chats and responses."""
CHAT_MESSAGES: list[tuple[Any, str]] = [
    *(({"role": "assistant", "tool_calls": one}, "tool_calls") for one in (5, "f", {}, True, LONG)),
    *(({"role": "assistant", "tool_calls": [one]}, "tool_calls[0]") for one in (5, "f", None, [], {})),
    *(
        ({"role": "assistant", "tool_calls": [{"function": one}]}, "tool_calls[0].function")
        for one in (5, "f", {}, {"name": "f"}, {"arguments": "{}"}, {"name": 5, "arguments": "{}"})
    ),
    *(
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": one}}]},
            "tool_calls[0].function.arguments",
        )
        for one in (5, None, "{", "[]", "5", [], '{"a": NaN}', "[" * 500, LONG)
    ),
    ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type"),
    ({"role": "tool", "content": "abc", "tool_call_id": 5}, "tool_call_id"),
    ({"role": "assistant", "content": "abc", "function_call": {"name": "f"}}, "function_call"),
]
TOOLS: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        *((one, "tools[0]") for one in (5, "f", None, [], {})),
        *(
            ({"type": one, "function": {"name": "f"}}, "tools[0].type")
            for one in (5, "web_search", "custom", [], LONG)
        ),
        *(({"function": one}, "tools[0].function") for one in (5, "f", None, [], {})),
        *(({"function": {"name": one}}, "tools[0].function.name") for one in (5, None, "", [], "x" * 257)),
        *(({"function": {"name": "f", "parameters": one}}, "parameters") for one in (5, "{}", [], True, LONG)),
        *(({"function": {"name": "f", "description": one}}, "description") for one in (5, [], {}, True, 1.5)),
        *(({"function": {"name": "f", "strict": one}}, "strict") for one in (5, [], {}, "true", 1.5)),
        (FLAT, "tools[0].function"),
    ],
    RESPONSE: [
        *((one, "tools[0]") for one in (5, "f", None, [], {})),
        *(({"type": one, "name": "f"}, "tools[0].type") for one in (5, "web_search", "custom", [], LONG)),
        *(({"name": one}, "tools[0].name") for one in (5, None, "", [], "x" * 257)),
        *(({"name": "f", "parameters": one}, "tools[0].parameters") for one in (5, "{}", [], True, LONG)),
        *(({"name": "f", "strict": one}, "tools[0].strict") for one in (5, [], {}, "true", 1.5)),
        *(({"function": one}, "tools[0].function") for one in (5, "f", None, [], {})),
    ],
}
ITEMS: list[tuple[Any, str]] = [
    *((one, "input[1]") for one in (5, "a", None, [], 1.5)),
    *(({"type": one}, "input[1]") for one in ("item_reference", "web_search_call", 5, None, LONG)),
    *(({"type": "reasoning", "content": one}, "input[1].content") for one in (5, "a", {}, [5], [{}], [{"text": 5}])),
    *(({"type": "function_call", "name": "f", "arguments": "{}", "call_id": one}, "call_id") for one in (5, None, [])),
    *(({"type": "function_call", "name": one, "arguments": "{}", "call_id": "1"}, "name") for one in (5, None, "")),
    *(
        ({"type": "function_call", "name": "f", "call_id": "1", "arguments": one}, "input[1].arguments")
        for one in (5, None, "{", "[]", [])
    ),
    *(
        ({"type": "function_call_output", "call_id": "1", "output": one}, "input[1].output")
        for one in (5, None, {}, [], [{"type": "input_image"}])
    ),
    ({"type": "function_call_output", "output": "a"}, "input[1].call_id"),
]
"""Items of a response's input, after a message."""
BODIES = ["", "{", "[]", "[1]", "5", '"text"', "null", "NaN", "{'a': 1}", '{"a": }', "[" * 100_000, '{"a":' * 500]
"""Bodies that are no objects."""


def bad_requests() -> Iterator[BadRequest]:
    """All of them."""
    for route, right in RIGHT.items():
        yield from (BadRequest(route, content, "") for content in BODIES)
        yield from (_with(route, {name: 1}, name[:30] if name else "") for name in UNKNOWN)
        for field, kind in FIELDS[route].items():
            yield from (_with(route, {field: value}, field) for value in WRONG[kind])
        for field, values in UNSUPPORTED.get(route, {}).items():
            yield from (_with(route, {field: value}, field) for value in values)
        for field in right:
            yield from (BadRequest(route, body, field) for body in ("{}", json.dumps({field: None})))
        yield from (_with(route, {"user": _nested(depth)}, "body") for depth in (65, 500, 990, 5000))
    yield _with(TOKENIZE, {"messages": [USER]}, "messages")
    yield BadRequest(TOKENIZE, written({"messages": [USER], "add_special_tokens": True}), "add_special_tokens")
    yield from _with_options()
    for message, field in MESSAGES + CHAT_MESSAGES:
        yield _with(CHAT, {"messages": [USER, message]}, f"messages[1].{field}")
    for message, field in MESSAGES:
        yield _with(RESPONSE, {"input": [USER, message]}, f"input[1].{field}")
    for route, tools in TOOLS.items():
        yield from (_with(route, {"tools": [tool]}, field) for tool, field in tools)
        right_tool = TOOL if route == CHAT else FLAT
        for choice in ("required", "any", 5, {"type": "function", "name": "f"}, {}, [], True):
            yield _with(route, {"tools": [right_tool], "tool_choice": choice}, "tool_choice")
    yield _with(CHAT, {"top_logprobs": 2}, "top_logprobs")
    yield _with(CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs")
    yield from (_with(RESPONSE, {"input": [USER, item]}, field) for item, field in ITEMS)
    yield from (_with(RESPONSE, {"input": [item]}, "input") for item in ({"type": "reasoning"}, 5, "a", {}, []))
    for field, content in _given_twice():
        yield BadRequest(*content, field)
    for pair in ((1, 2), (2, 1), (5, 6), (1, 2**31 - 1), (100, 10)):
        yield _with(CHAT, dict(zip(("max_tokens", "max_completion_tokens"), pair, strict=True)), "max_tokens")
    for route in (CHAT, COMPLETION, RESPONSE):
        yield from (_with(route, {"seed": 1, "generation_config": {"seed": one}}, "seed") for one in (0, 2, -1, 3, 9))


def _with_options() -> Iterator[BadRequest]:
    """Wrong options of `generate`, each on one of the routes, as an object or as JSON."""
    wrong = [(name, value) for name, kind in OPTIONS.items() for value in WRONG[kind]]
    wrong += [(name, value) for name, values in UNSUPPORTED_OPTIONS.items() for value in values]
    wrong += [(name, 1) for name in UNKNOWN if name != "epsilon_cutoff"]
    for number, (name, value) in enumerate(wrong):
        route = (CHAT, COMPLETION, RESPONSE)[number % 3]
        options: Any = {name: value}
        if number % 2:
            options = written(options)
        field = "`stop_strings`" if name == "stop_strings" else f"generation_config.{name[:30]}"
        yield _with(route, {"generation_config": options}, field)


def _given_twice() -> Iterator[tuple[str, tuple[str, str]]]:
    """Fields that a body has twice, with the same value or another one, and their routes and bodies."""
    for route, right in RIGHT.items():
        for field in FIELDS[route]:
            for values in (("null", "null"), ("1", "1"), ('"a"', "null"), ("[]", "{}"), ("true", "1e999")):
                pairs = ", ".join(f"{json.dumps(field)}: {value}" for value in values)
                yield field, (route, written(right)[:-1] + f", {pairs}}}")
    for options, place in (('{"top_k": 1, "top_k": 1}', "top_k"), ('{"tree": {"a": 1, "a": 2}}', "tree.a")):
        for route in (CHAT, COMPLETION, RESPONSE):
            for given in (Raw(options), options):
                yield f"generation_config.{place}", (route, written(RIGHT[route] | {"generation_config": given}))
    message = Raw('{"role": "user", "content": "a", "role": "user"}')
    yield "messages[1].role", (CHAT, written({"messages": [USER, message]}))
    yield "input[1].role", (RESPONSE, written({"input": [USER, message]}))
    for route in (CHAT, RESPONSE):
        for field in ("metadata", "chat_template_kwargs", "prompt_cache_options"):
            yield f"{field}.a", (route, written(RIGHT[route] | {field: Raw('{"a": "b", "a": "b"}')}))


def _with(route: str, part: dict[str, Any], field: str) -> BadRequest:
    return BadRequest(route, written(RIGHT[route] | part), field)


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


def written(value: Any) -> str:
    """A value as JSON, with what is raw in it as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)
