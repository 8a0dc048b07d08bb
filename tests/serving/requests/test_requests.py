"""What bodies and options are taken for: limits of JSON, template variables, roles, options that `generate` gets."""

from __future__ import annotations

import gc
import json
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from support.models import VOCAB
from support.tokenizer import tiny_tokenizer
from transformers import GenerationConfig


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from pydantic import ValidationError  # noqa: E402

from hf_specdec.serving.errors import RequestRefused  # noqa: E402
from hf_specdec.serving.requests import (  # noqa: E402
    BODIES,
    ChatBody,
    CompletionBody,
    Facts,
    ResponseBody,
    checked,
    counting,  # noqa: E402
    options_of,
    parsed,
    reserved_names,
    roles_of,
)
from hf_specdec.serving.requests.counting import MOST_NESTED, check_size  # noqa: E402
from hf_specdec.serving.requests.options import GenerationOptions  # noqa: E402
from hf_specdec.serving.requests.parsing import MOST_DIGITS, json_of  # noqa: E402


USER = {"role": "user", "content": "abc"}


@pytest.fixture(scope="module")
def facts() -> Facts:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'critic' %}{{ enable_thinking }}{% endif %}"
    return Facts(VOCAB, roles_of(tokenizer), reserved_names(tokenizer))


def completion(facts: Facts, **options: Any) -> Any:
    return checked(CompletionBody, {"prompt": "abc", "generation_config": options}, facts).generation_config


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "text, deep",
    [
        ("[]" * 99, False),
        ("[{}]" * 99, False),
        ("[" * 64 + "]" * 64 + "[]", False),
        ("[" * 65 + "]" * 65, True),
        ("[{" * 33 + "}]" * 33, True),
        ('["' + '[\\"' * 99 + '"]', False),
        ('{"a": "' + "[" * 99, False),
        ("[" * 99, True),
        ("]" * 99 + "[" * 60, False),
        ("[" * 40 + "{}" * 40 + "[" * 30, True),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 3, 64, counting.BLOCK])
def test_nesting(text: str, deep: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in strings are none; those that do not fit each other count, too."""
    monkeypatch.setattr(counting, "BLOCK", block)
    with pytest.raises(RequestRefused, match="within each other") if deep else nullcontext():
        check_size(text.encode())


def test_names_that_are_given_twice() -> None:
    """Only the arguments of a call that a model has written may have them."""
    for content, place in (
        (b'{"a": 1, "a": 1}', "a"),
        (b'{"a": [{"b": 1, "c": {"": 1, "": 2}}]}', r"a\[0\].c."),
        (b'{"a": 1e999, "b": {"\\u0061": 1, "c": 5, "a": 2}}', "b.a"),
    ):
        with pytest.raises(RequestRefused, match=f"^`{place}` is given twice"):
            parsed(content)
    with pytest.raises(RequestRefused, match="^`x.a` is given twice"):
        json_of('{"a": 1, "a": 1}', "x")
    assert json_of('{"a": 1, "a": 2}', may_repeat=True) == {"a": 2}


_LARGE = 4 * 2**20
_NESTED = "[" * 60 + "]" * 60 + ","
_MANY = {
    "brackets in a string": '{"prompt": "' + "[{" * (_LARGE // 2 - 20) + '"}',
    "quotes in a string": '{"prompt": "' + '\\"[' * (_LARGE // 3 - 20) + '"}',
    "backslashes": '{"prompt": "' + "\\\\" * (_LARGE // 2 - 20) + '"}',
    "short strings": '{"prompt": [' + '"[",' * (_LARGE // 4 - 20) + '""]}',
    "open": "[" * _LARGE,
    "pairs": '{"prompt": [' + "[]," * (_LARGE // 3 - 20) + "[]]}",
    "nested": '{"prompt": [' + _NESTED * 4800 + "[]]}",
    "in options": json.dumps({"prompt": "a", "generation_config": "[" + "[]," * (_LARGE // 3 - 20) + "[]]"}),
    "nested options": json.dumps({"prompt": "a", "generation_config": "[" + _NESTED * 34_000 + "[]]"}),
    "objects": '{"prompt": [' + '{"a": 1},' * 140_000 + "{}]}",
}


@pytest.mark.parametrize("kind", _MANY)
def test_large_bodies_full_of_brackets(kind: str, facts: Facts) -> None:
    """No other thread waits long for them, and they are read or refused soon."""
    content, gaps, is_over = _MANY[kind].encode(), [0.0], threading.Event()
    assert len(content) <= _LARGE

    def watch() -> None:
        last = time.monotonic()
        while not is_over.wait(0.001):
            gaps.append(time.monotonic() - last)
            last += gaps[-1]

    watching, begun = threading.Thread(target=watch), time.thread_time()
    gc.collect()
    gc.disable()  # as the server keeps it from what has been loaded; see `never_search_again`
    try:
        watching.start()
        with suppress(RequestRefused):
            checked(CompletionBody, parsed(content), facts)
    finally:
        gc.enable()
        is_over.set()
        watching.join()
    assert time.thread_time() - begun < 1.5 and max(gaps) < 0.5


def test_the_deepest_body() -> None:
    inner = MOST_NESTED - 1
    assert parsed(b'{"a": ' + b"[" * inner + b"]" * inner + b"}")
    with pytest.raises(RequestRefused, match=f"`body` has more than {MOST_NESTED}"):
        parsed(b'{"a": ' + b"[" * (inner + 1) + b"]" * (inner + 1) + b"}")


def test_the_longest_number() -> None:
    assert parsed(b'{"a": ' + b"1" * MOST_DIGITS + b"}") == {"a": int("1" * MOST_DIGITS)}
    for number, reason in (
        (b"1" * (MOST_DIGITS + 1), "101 characters"),
        (b"1e999", "finite"),
        (b"-Infinity", "finite"),
    ):
        with pytest.raises(RequestRefused, match=rf"`a\[0\].b` .*{reason}"):
            parsed(b'{"a": [{"b": ' + number + b"}]}")


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/vnd.api+json"])
def test_media_types(kind: str) -> None:
    assert parsed(b'{"a": 1}', kind) == {"a": 1}
    for other in (None, "", "text/plain", "application/x-www-form-urlencoded"):
        with pytest.raises(RequestRefused, match="^The body must be a JSON object: its `Content-Type`"):
            parsed(b'{"a": 1}', other)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(RequestRefused, match="no UTF-8 at byte 7"):
        parsed(b'{"a": "\xff"}')


# ------------------------------------------------------------------------------------------------- roles and variables


def test_roles_that_the_template_names(facts: Facts) -> None:
    body = {"messages": [{"role": "critic", "content": "abc"}]}
    assert checked(ChatBody, body, facts).messages[0].role == "critic"
    with pytest.raises(
        RequestRefused, match=r"`messages\[0\].role` must be one of .*critic, .*user, but is 'critics'"
    ):
        checked(ChatBody, {"messages": [{"role": "critics", "content": "abc"}]}, facts)


@pytest.mark.parametrize(
    "template, roles",
    [
        ("{% if m['role'] == 'ipython' or m.role in ['a', 'b-c'] %}{% endif %}", {"ipython", "a", "b-c"}),
        (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m.content == 'x' %}{% endif %}{% endfor %}",
            set(),
        ),
        ("{% set role = m.role %}{% if role != '<end>' %}{% generation %}a{% endgeneration %}{% endif %}", set()),
        ("{% if %}", set()),
    ],
)
def test_roles_in_templates(template: str, roles: set[str]) -> None:
    tokenizer = tiny_tokenizer()
    assert len(roles_of(tokenizer)) == 6
    tokenizer.chat_template = template
    assert roles_of(tokenizer) - {"system", "developer", "user", "assistant", "tool", "function"} == roles


def test_template_variables(facts: Facts) -> None:
    """Those that the template does not read pass, too."""
    for variables in ({"enable_thinking": False}, {"nobody_reads": [1, {"a": 2}]}, {}, None):
        for kind, body in ((ChatBody, {"messages": [USER]}), (ResponseBody, {"input": "abc"})):
            checked(kind, body | {"chat_template_kwargs": variables}, facts)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- options


def test_options_reach_generate(facts: Facts) -> None:
    given = {"max_new_tokens": 5, "temperature": 2, "top_p": 1, "sequence_bias": [[[5, 6], 1]], "do_sample": True}
    given |= {"eos_token_id": [2, 3], "num_beams": 1, "seed": 5, "transformers_version": "5.0", "min_p": None}
    found = completion(facts, **given, _from_model_config=True)
    assert found.seed == 5
    config = GenerationConfig(**json.loads(json.dumps(options_of(found))))
    assert (config.max_new_tokens, config.temperature, config.eos_token_id, config.num_beams) == (5, 2.0, [2, 3], 1)
    assert isinstance(config.temperature, float) and config.sequence_bias == [[[5, 6], 1.0]]
    assert not hasattr(config, "seed") and not config._from_model_config


def test_every_option_of_transformers_is_known() -> None:
    """Also those that are refused, so that they are by name."""
    known = {field.alias or name for name, field in GenerationOptions.model_fields.items()}
    assert set(GenerationConfig().to_dict()) <= known


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"temprature": 1}, "`generation_config.temprature` is not known here. Write `generation_config.temperature`"),
        ({"watermarking_config": {"biass": 1}}, "`generation_config.watermarking_config.bias`"),
        ({"do_sample": "false"}, "`generation_config.do_sample` must be true or false, but is 'false'"),
        ({"encoder_no_repeat_ngram_size": 10**9}, "must be at most 64, but is 1000000000"),
        ({"exponential_decay_length_penalty": [1, 1.5], "eos_token_id": -1}, "no token ends the text"),
        ({"tree": [[5, "auto"]]}, "schedule"),
    ],
)
def test_wrong_options(facts: Facts, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestRefused) as error:
        completion(facts, **options)
    assert reason in str(error.value)


def test_one_error_is_enough(facts: Facts) -> None:
    """However much is wrong: all errors of a large body would take seconds, in which nothing else runs."""
    options = [
        {"suppress_tokens": [-1] * 1000},
        {"bad_words_ids": [[-1] * 64] * 1000},
        {"sequence_bias": [[[-1] * 64, 1.0]] * 1000},
        {f"x{number}": 1 for number in range(1000)},
    ]
    bodies: list[tuple[type[Any], dict[str, Any]]] = [
        *((CompletionBody, {"prompt": "abc", "generation_config": one}) for one in options),
        (CompletionBody, {"prompt": "abc"} | {f"x{number}": 1 for number in range(1000)}),
        (CompletionBody, {"prompt": "abc", "logit_bias": dict.fromkeys(map(str, range(VOCAB, 1000)), 1)}),
        (ChatBody, {"messages": [5] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [5] * 1000}]}),
        (ChatBody, {"messages": [USER], "tools": [5] * 1000}),
        (ChatBody, {"messages": [USER], "metadata": {f"x{number}": 1 for number in range(1000)}}),
        (ResponseBody, {"input": [USER] + [5] * 1000}),
        (ResponseBody, {"input": "abc", "tools": [5] * 1000}),
        (ResponseBody, {"input": [USER, {"type": "reasoning", "content": [5] * 1000}]}),
    ]
    for kind, body in bodies:
        with pytest.raises(ValidationError) as error:
            kind.model_validate(body, context=facts)
        assert error.value.error_count() == 1


def test_options_in_the_wrong_place(facts: Facts) -> None:
    with pytest.raises(RequestRefused, match="`eta_cutoff` is not known here: options of `generate` go into"):
        checked(CompletionBody, {"prompt": "abc", "eta_cutoff": 0.1}, facts)


@pytest.mark.parametrize("inner", [3, 4, None])
def test_seeds_that_differ(facts: Facts, inner: int | None) -> None:
    body = {"prompt": "abc", "seed": 3, "generation_config": {"seed": inner}}
    if inner != 4:
        assert checked(CompletionBody, body, facts).seed == 3
        return
    with pytest.raises(RequestRefused, match="`seed=3` and `generation_config.seed=4` differ"):
        checked(CompletionBody, body, facts)


def test_every_route_has_a_body() -> None:
    assert all(kind.__doc__ is not None and path in kind.__doc__ for path, kind in BODIES.items())
