"""Calls on several CUDA streams. Skipped, and said so, where there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR

import hf_specdec


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_one_stream_after_the_other() -> None:
    """A call's last step may be under way when the next call borrows its memory on a stream of its own."""
    target = tiny_model(dtype=torch.float32)
    draft = noisy_copy(target, 0.05).cuda()
    target = target.cuda()
    calls = [{name: value.cuda() for name, value in prompts(1, length).items()} for length in (9, 14)]
    options = {"max_new_tokens": 40, "do_sample": False}
    plain = [target.generate(**inputs, **options) for inputs in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()

    def run(number: int) -> tuple[torch.Tensor, bool]:
        with torch.cuda.stream(streams[number % 2]):
            text = target.generate(**calls[number % 2], **options, assistant_model=draft, tree=IRREGULAR)
        return text, "steps" in hf_specdec.last_metrics().seconds

    with ThreadPoolExecutor(1) as worker:  # by turns here and in another thread
        found = [run(number) if number % 2 else worker.submit(run, number).result() for number in range(20)]
    torch.cuda.synchronize()
    for number, (text, was_whole) in enumerate(found):
        assert was_whole and torch.equal(text, plain[number % 2])
