"""Limits that let nothing run are refused, by both of their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits
from transformers import PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.batching import Limits


@pytest.mark.parametrize(
    "name, value",
    [
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_blocks", -3),
        ("num_blocks", 2.5),
        ("max_requests", 0),
        ("chunk_size", 0),
        ("chunk_size", True),
        ("max_queue_size", -1),
        ("memory_share", 0.0),
        ("memory_share", 1.5),
    ],
)
def test_refusals(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}`.* but is {value!r}"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_requests_per_batch": 0}, "`max_requests_per_batch` of a"),
        ({"max_batch_tokens": 0}, "`max_batch_tokens` of a"),
        ({"num_blocks": 0}, "`num_blocks`"),
        ({"block_size": 0}, "`page_size` of a"),
    ],
)
def test_refusals_of_transformers_config(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Limits.of(limits(**options), torch.device("cpu"))


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
def test_a_length_that_is_no_integer(target: PreTrainedModel, name: str) -> None:
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits()
    )
    with pytest.raises(TypeError, match=rf"`{name}` must be an integer, but is 6.5"):
        manager.add_request([5, 6, 7], **{name: 6.5})
