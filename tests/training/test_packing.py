"""Texts in rows."""

from __future__ import annotations

import random

import torch

from hf_specdec.training.data import Text
from hf_specdec.training.packing import Collator, Rows, cut, ids_and_masks, make_row, pack, split_texts


def texts_of(lengths: list[int]) -> list[Text]:
    return [Text([index] * length, [(0, length)]) for index, length in enumerate(lengths)]


def test_a_row_of_two_texts() -> None:
    row = make_row([Text([5, 6, 7], [(1, 3)]), Text([8, 9], [(0, 1)])])
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert row["loss_mask"].tolist() == [False, True, True, True, False]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert row["segment_ids"].tolist() == [0, 0, 0, 1, 1]


def test_packing_keeps_every_text_and_wastes_little() -> None:
    numbers = random.Random(0)
    texts = texts_of([numbers.randint(4, 100) for _ in range(1000)])
    rows = pack(texts, 100)
    assert sorted(text.input_ids[0] for row in rows for text in row) == list(range(1000))
    tokens = [sum(len(text.input_ids) for text in row) for row in rows]
    assert max(tokens) <= 100
    assert sum(tokens) / (100 * len(rows)) > 0.93
    assert pack(texts, 100) == rows
    assert pack(texts, 100, seed=1) != rows


def test_padding_is_a_text_of_its_own_without_loss() -> None:
    rows = Rows(texts_of([5, 3]), 8, packed=False)
    batch = Collator(99)([rows[0], rows[1]])
    assert {name: tuple(values.shape) for name, values in batch.items()} == dict.fromkeys(batch, (2, 5))
    assert batch["input_ids"][1].tolist() == [1, 1, 1, 99, 99]
    assert batch["segment_ids"][1].tolist() == [0, 0, 0, 1, 1]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 0, 1]
    assert batch["loss_mask"][1].tolist() == [True] * 3 + [False] * 2
    assert Collator(99, 8)([rows[1]])["input_ids"].shape == (1, 8)


def test_long_texts_are_cut_and_pieces_without_answers_left_out() -> None:
    text = Text(list(range(25)), [(8, 13), (22, 23)])
    assert [(list(piece.input_ids), piece.spans) for piece in cut(text, 10)] == [
        (list(range(10)), [(8, 10)]),
        (list(range(10, 20)), [(0, 3)]),
        (list(range(20, 25)), [(2, 3)]),
    ]
    assert cut(Text([1, 2, 3, 4, 5], []), 10) == []
    assert cut(Text([1, 2, 3], [(0, 3)]), 10) == []


def test_ids_and_masks_of_all_texts() -> None:
    texts = [Text([number, 7, number + 1], [(1, 1 + number % 3)]) for number in range(11)]
    row, found = make_row(texts), list(ids_and_masks(texts, at_once=4))
    assert len(found) == 3
    assert torch.equal(torch.cat([ids for ids, _ in found]), row["input_ids"])
    assert torch.equal(torch.cat([mask for _, mask in found]), row["loss_mask"])


def test_held_out_texts_are_the_same_every_time() -> None:
    texts = [cut(text, 30) for text in texts_of(list(range(4, 54)))]
    train, held_out = split_texts(texts, 10)
    numbers = [{text.input_ids[0] for text in side} for side in (train, held_out)]
    assert not numbers[0] & numbers[1] and 10 <= len(held_out) < 10 + max(map(len, texts))
    assert len(train) + len(held_out) == sum(map(len, texts)) > 50
    assert split_texts(texts, 10) == (train, held_out)
    assert len(split_texts([pieces[:1] for pieces in texts], 10)[1]) == 10
    assert len(split_texts(texts[:4], 10)[1]) == 2


def test_few_long_texts_are_not_held_out_by_half() -> None:
    texts = [[Text([number, piece], [(1, 2)]) for piece in range(100)] for number in range(20)]
    train, held_out = split_texts(texts, 64)
    assert (len(train), len(held_out)) == (1900, 100)
    assert torch.equal(make_row(train)["segment_ids"].unique(), torch.arange(len(train)))
