"""SafeAILab's EAGLE-3, from a checkout of its repository, in an environment that has the transformers it asks for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..job import Answers, Job, versions


TREE = {"total_token": 60, "depth": 7, "top_k": 10}
"""Its own defaults."""
ROOM = 200
"""Places of its cache beside those of the longest text: a text ends when there is no room for another tree."""


class Eagle:
    """`EaModel.eagenerate`, which serves one request at a time."""

    def __init__(self, job: Job, arguments: dict[str, Any]):
        assert job.eagle_code is not None
        sys.path.insert(0, job.eagle_code)
        from eagle.model.ea_model import EaModel  # type: ignore[import-not-found, unused-ignore]

        self._job = job
        options = TREE | {"use_eagle3": True} | arguments
        self._model = EaModel.from_pretrained(
            base_model_path=job.target,
            ea_model_path=job.heads["safeailab"],
            torch_dtype=getattr(torch, job.dtype),
            low_cpu_mem_usage=True,
            device_map=job.device,
            **options,
        ).eval()
        self._model.tokenizer.eos_token = None  # texts are as long as everybody's
        self.ran_with = versions("transformers", "torch") | {"arguments": options, "code": job.eagle_code}

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        if len(prompts) > 1:
            raise ValueError("EAGLE's code serves one request at a time.")
        ids, _, last = self._model.eagenerate(
            torch.tensor(prompts, device=self._job.device),
            temperature=temperature,
            max_new_tokens=self._job.new_tokens - 1,  # it ends when there are more
            max_length=self._job.longest + ROOM,
            log=True,
        )
        text = ids[0, len(prompts[0]) :].tolist()
        drafts = int(last) + 1  # each step adds the root of its tree and what it accepts
        return Answers([text], drafts, len(text) - drafts)

    def close(self) -> None:
        """Has nothing to end."""


def start(way: str, job: Job, arguments: dict[str, Any]) -> Eagle:
    """The contender."""
    return Eagle(job, arguments)
