"""Texts as rows of equal length: packed, or padded."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import Text


class Row(dict):
    """`input_ids`, `loss_mask`, `position_ids` and `segment_ids` of a row, each `[tokens]`."""


def make_row(texts: Sequence[Text]) -> Row:
    """Concatenates texts into a row. `position_ids` restart at 0 with each text; `segment_ids` number the texts."""
    ids: list[int] = []
    mask: list[bool] = []
    positions: list[int] = []
    segments: list[int] = []
    for number, text in enumerate(texts):
        length = len(text.input_ids)
        ids += text.input_ids
        loss = [False] * length
        for start, end in text.spans:
            loss[start:end] = [True] * (end - start)
        mask += loss
        positions += range(length)
        segments += [number] * length
    return Row(
        input_ids=torch.tensor(ids, device="cpu"),
        loss_mask=torch.tensor(mask, dtype=torch.bool, device="cpu"),
        position_ids=torch.tensor(positions, device="cpu"),
        segment_ids=torch.tensor(segments, device="cpu"),
    )


def ids_and_masks(texts: Sequence[Text], at_once: int = 4096) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `input_ids` (`[tokens]`, int64) and `loss_mask` (`[tokens]`, bool) of `at_once` texts, concatenated."""
    for first in range(0, len(texts), at_once):
        some = texts[first : first + at_once]
        ids = torch.from_numpy(np.concatenate([np.asarray(text.input_ids, dtype=np.int64) for text in some]))
        mask, place = torch.zeros_like(ids, dtype=torch.bool), 0
        for text in some:
            for start, end in text.spans:
                mask[place + start : place + end] = True
            place += len(text.input_ids)
        yield ids, mask


def cut(text: Text, max_length: int, min_length: int = 4) -> list[Text]:
    """
    Cuts a text into pieces of at most `max_length` tokens.

    Pieces below `min_length` tokens and pieces without tokens to predict are dropped. `input_ids` of the pieces are
    arrays, because Python integers for a large data set would fill the memory.
    """
    pieces = []
    for start in range(0, len(text.input_ids), max_length):
        end = min(start + max_length, len(text.input_ids))
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in text.spans if a < end and b > start]
        if end - start >= min_length and any(b > 2 for a, b in spans):  # row 0 predicts token 2
            pieces.append(Text(array("i", text.input_ids[start:end]), spans))
    return pieces


def pack(texts: Sequence[Text], max_length: int, seed: int = 0, open_rows: int = 64) -> list[list[Text]]:
    """
    Packs texts of at most `max_length` tokens into rows of `max_length` tokens.

    Texts are shuffled with `seed`; each goes into the fullest of at most `open_rows` open rows that has room for it.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    full: list[list[Text]] = []
    rows: list[tuple[int, list[Text]]] = []  # tokens left, texts
    for index in order:
        length = len(texts[index].input_ids)
        fitting = [place for place, (left, _) in enumerate(rows) if left >= length]
        if fitting:
            place = min(fitting, key=lambda place: rows[place][0])
            rows[place] = (rows[place][0] - length, [*rows[place][1], texts[index]])
        else:
            rows.append((max_length - length, [texts[index]]))
            if len(rows) > open_rows:
                place = min(range(len(rows)), key=lambda place: rows[place][0])
                full.append(rows.pop(place)[1])
    return full + [row for _, row in rows]


class Rows(Dataset):
    """
    Data set of rows for the trainer; `lengths` has the number of tokens of each row.

    Args:
        texts (list of `Text`): texts of at most `max_length` tokens each (see `cut`).
        max_length (`int`): tokens of a row.
        packed (`bool`): whether a row may hold several texts; if not, one text per row.
        seed (`int`, *optional*, defaults to 0): seed of the order in which texts are packed.
    """

    def __init__(self, texts: Sequence[Text], max_length: int, packed: bool, seed: int = 0):
        self.groups = pack(texts, max_length, seed) if packed else [[text] for text in texts]
        self.lengths = [sum(len(text.input_ids) for text in group) for group in self.groups]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Row:
        return make_row(self.groups[index])


class Collator:
    """
    Stacks rows into a batch `[rows, tokens]`, padded on the right; padding is a separate text without loss.

    Args:
        pad_token_id (`int`): token id of the padding; any token will do.
        length (`int`, *optional*): tokens to pad to; defaults to the longest row of the batch.
    """

    def __init__(self, pad_token_id: int, length: int | None = None):
        self.pad_token_id, self.length = pad_token_id, length

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The batch by the four keys of `Row`, each `[rows, tokens]`."""
        length = self.length or max(len(row["input_ids"]) for row in rows)
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in rows[0]}
        for row in rows:
            pads = length - len(row["input_ids"])
            padding = {
                "input_ids": torch.full((pads,), self.pad_token_id, device="cpu"),
                "loss_mask": torch.zeros(pads, dtype=torch.bool, device="cpu"),
                "position_ids": torch.arange(pads, device="cpu"),
                "segment_ids": torch.full((pads,), int(row["segment_ids"][-1]) + 1, device="cpu"),
            }
            for name, values in padding.items():
                columns[name].append(torch.cat([row[name], values]))
        return {name: torch.stack(values) for name, values in columns.items()}


def split_texts(texts: Sequence[Sequence[Text]], eval_texts: int, seed: int = 0) -> tuple[list[Text], list[Text]]:
    """
    The pieces of the training texts, and those of the held-out texts: whole texts, until these have `eval_texts`
    pieces, or are half of all texts.

    Args:
        texts (list of lists of `Text`): the pieces of every text.
        eval_texts (`int`): number of held-out pieces, unless the last text held out has more.
        seed (`int`, *optional*, defaults to 0): seed of the choice.
    """
    held_out: set[int] = set()
    num_pieces = 0
    for index in random.Random(seed).sample(range(len(texts)), min(eval_texts, len(texts) // 2)):
        if num_pieces < eval_texts:
            held_out.add(index)
            num_pieces += len(texts[index])
    train = [piece for index, pieces in enumerate(texts) if index not in held_out for piece in pieces]
    return train, [piece for index, pieces in enumerate(texts) if index in held_out for piece in pieces]
