"""The draft vocabulary."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.training.vocabulary import choose_vocabulary, count_tokens, draft_indices, offsets


def test_the_most_frequent_tokens_under_the_mask_first() -> None:
    ids = torch.tensor([7, 7, 7, 7, 5, 5, 9, 2, 2, 2])
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    masked, everywhere = count_tokens([(ids, mask)], 12)
    assert choose_vocabulary(masked, everywhere, 1).tolist() == [5]
    assert choose_vocabulary(masked, everywhere, 2).tolist() == [2, 5]  # 2 and 9 once each; 2 more often at all
    assert choose_vocabulary(masked, everywhere, 3).tolist() == [2, 5, 9]
    assert choose_vocabulary(masked, everywhere, 5).tolist() == [0, 2, 5, 7, 9]
    assert choose_vocabulary(masked, everywhere, 2, always=[11]).tolist() == [5, 11]


def test_offsets_and_the_way_back() -> None:
    chosen = torch.tensor([2, 5, 9])
    assert (torch.arange(3) + offsets(chosen)).tolist() == [2, 5, 9]
    indices = draft_indices(chosen, 12, torch.device("cpu"))
    assert indices[chosen].tolist() == [0, 1, 2]
    assert (indices == -1).sum() == 9
    assert draft_indices(None, 12, torch.device("cpu")) is None


@pytest.mark.parametrize("size", [0, 13])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(ValueError, match="draft_vocab_size"):
        choose_vocabulary(torch.ones(12).long(), torch.ones(12).long(), size)
