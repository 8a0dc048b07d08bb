"""Requests go where the beginning of their text is known, unless that replica is much busier."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_specdec.replicas.prefixes import BLOCK, MOST_BLOCKS, PrefixTable, keys_of


SYSTEM = "You are a helpful assistant. " * 40


def keys(**body: Any) -> list[str]:
    return keys_of(json.dumps(body).encode())


def chat(*texts: str, **further: Any) -> list[str]:
    return keys(messages=[{"role": "user", "content": text} for text in texts], **further)


def common(first: list[str], second: list[str]) -> int:
    return sum(one == other for one, other in zip(first, second, strict=False))


def test_texts_that_begin_alike_have_keys_in_common() -> None:
    assert common(chat(SYSTEM, "a"), chat(SYSTEM, "b")) == len(SYSTEM) // BLOCK
    longer = chat(SYSTEM, "a" * BLOCK, "and then?")
    assert longer[: len(chat(SYSTEM, "a" * BLOCK))] == chat(SYSTEM, "a" * BLOCK)
    assert not common(chat("x" + SYSTEM), chat(SYSTEM)) and len(set(chat(SYSTEM))) == len(chat(SYSTEM))
    assert not common(chat(SYSTEM, model="sql"), chat(SYSTEM)), "an adapter has K/V of its own"
    assert not common(chat(SYSTEM, tools=[{"name": SYSTEM}]), chat(SYSTEM))
    assert len(keys(prompt="a" * BLOCK * 2 * MOST_BLOCKS)) == MOST_BLOCKS
    assert len(keys(prompt=[7] * BLOCK)) > 0 and len(keys(input=SYSTEM)) > 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff", b'{"prompt": 5}', b'{"prompt": "short"}', b"[" * 9999]
)
def test_what_has_no_keys(content: bytes) -> None:
    assert keys_of(content) == []


def test_the_longest_beginning_counts() -> None:
    table: PrefixTable[str] = PrefixTable()
    table.add(["a", "b"], "one")
    table.add(["a", "b", "c"], "two")
    table.add(["x"], "three")
    loads = {"one": 0, "two": 3, "three": 0}
    assert table.ranked(["a", "b", "c", "d"], loads)[0] == "two"
    assert table.ranked(["a", "b", "d"], loads)[0] == "one", "of two that know as much, the idler"
    assert table.ranked(["y"], loads | {"one": 1, "three": 2})[0] == "one", "the idlest for what is new"
    table.forget("two")
    assert table.ranked(["a", "b", "c"], loads)[0] == "one"
    assert [table.depth(["a", "b", "c"], name) for name in ("one", "two")] == [2, 0]


def test_a_replica_that_is_much_busier_is_passed_over() -> None:
    table: PrefixTable[str] = PrefixTable(most_ahead=4)
    table.add(["a"], "one")
    assert table.ranked(["a"], {"one": 4, "two": 0})[0] == "one"
    assert table.ranked(["a"], {"one": 5, "two": 0})[0] == "two"
    assert table.ranked(["a"], {"one": 9, "two": 8})[0] == "one"
    assert table.ranked(["a"], {}) == []


def test_fronts_that_know_nothing_choose_alike() -> None:
    """Requests of one beginning go to one replica, those of many beginnings to all."""
    loads = dict.fromkeys("abcd", 0)
    firsts = [[table.ranked([str(key)], loads)[0] for key in range(200)] for table in (PrefixTable(), PrefixTable())]
    assert firsts[0] == firsts[1]
    assert min(firsts[0].count(name) for name in loads) > 25


def test_old_beginnings_are_forgotten_from_their_end() -> None:
    table: PrefixTable[str] = PrefixTable(most_keys=4)
    table.add(["a", "b", "c"], "one")
    table.add(["x", "y"], "one")
    assert table.depth(["a", "b", "c"], "one") == 2 and table.depth(["x", "y"], "one") == 2


def test_a_shared_system_prompt_does_not_overload_its_first_replica() -> None:
    """Conversations of several turns, which begin alike: none moves, and all replicas get some."""
    table: PrefixTable[int] = PrefixTable(most_ahead=2)
    loads, places = dict.fromkeys(range(3), 0), {}
    for turn in range(4):
        for one in range(30):
            own = ["s", *(f"{one}-{part}" for part in range(turn + 1))]
            place = table.ranked(own, loads)[0]
            assert places.setdefault(one, place) == place
            table.add(own, place)
            loads[place] += 1
            if one % 15 == 14:  # their answers end
                loads = dict.fromkeys(loads, 0)
    assert {*places.values()} == {0, 1, 2}
