"""What the rows of a captured step are told, where much of it is the same from step to step."""

from __future__ import annotations

import random

import pytest
import torch
from support.models import tiny_model

from hf_specdec import NgramDraft
from hf_specdec.cache.blocks import BlockPool
from hf_specdec.engine.captured.keys import StepSize
from hf_specdec.engine.captured.rows import InFlightRows
from hf_specdec.engine.captured.staged_rows import RowValues
from hf_specdec.engine.request import Request
from hf_specdec.verification import Verifier
from hf_specdec.verification.biases import BIASES, ENDINGS, HIDDEN_TOKENS


ALL = (HIDDEN_TOKENS, BIASES, ENDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 4])
def test_reused_rows_are_told_the_same_as_new_rows(lag: int) -> None:
    """While requests come, go, change places, and lose blocks to others that they get back later."""
    manager = tiny_model("llama").init_continuous_batching(assistant_model=NgramDraft())
    draws, pool, size = random.Random(0), BlockPool(40, 4), StepSize(rows=6, blocks=10, depth=2, lag=lag)
    own, names = [], iter(range(10**6))
    rows = InFlightRows(size, torch.device("cpu"), 0, processing=ALL)

    def new_request() -> Request:
        options = draws.choice(
            [
                {"do_sample": False},
                {"do_sample": True, "temperature": 0.5, "top_k": 7},
                {"do_sample": True, "min_p": 0.1, "min_new_tokens": 4, "suppress_tokens": [3, 4]},
                {"sequence_bias": [[[5], 2.0], [[6, 7], -1.0]], "bad_words_ids": [[draws.randint(3, 60)]]},
            ]
        )
        prompt = [draws.randint(3, 60) for _ in range(draws.randint(5, 20))]
        return manager._admission.request(str(next(names)), prompt, {"max_new_tokens": 9} | options, streaming=False)

    for _ in range(300):
        for request in [one for one in own if draws.random() < 0.2]:
            own.remove(request)
            pool.release(request.table)
        while len(own) < draws.randint(1, size.rows):
            own.append(new_request())
        if draws.random() < 0.2:
            draws.shuffle(own)
        for request in own:
            if draws.random() < 0.1:
                pool.release(request.table)
            assert pool.reserve(request.table, request.length + draws.randint(0, 3))
            if draws.random() < 0.2:
                pool.release(request.table, request.length)
            request.tokens[-1] = draws.randint(3, 60)
        loaded = own[: draws.randint(1, len(own))]  # the others' rows rest, and may be theirs again
        counts = [draws.randint(1, lag) for _ in loaded]
        values = RowValues([Verifier.GREEDY] * len(loaded), *[counts] * 6, draft_temperature=[1.0] * len(loaded))
        fresh = InFlightRows(size, torch.device("cpu"), 0, processing=ALL)
        for one in (rows, fresh):
            one.load(loaded, values)
        for one, other in ((rows, fresh), (rows.biases, fresh.biases)):
            assert torch.equal(one._buffer._on_device, other._buffer._on_device)
