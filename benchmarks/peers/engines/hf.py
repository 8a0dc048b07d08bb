"""Transformers' own ways to generate, in a process that does not import this library."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..job import Answers, Job, versions
from .loading import load, padded, sampling


LOOKUP_LENGTH = 10
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "assisted": {},
    "assisted-static": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": LOOKUP_LENGTH},
    "mtp": {"use_mtp": True},
}
COUNTED = ("assisted", "lookup", "mtp")
"""Ways whose forwards are counted; a hook would be in the way where the forward is compiled."""


class Generate:
    """`model.generate`, with the arguments of a way."""

    def __init__(self, way: str, job: Job, arguments: dict[str, Any]):
        self._model, self._job = load(job.target, job, job.is_random), job
        self._options = WAYS[way] | arguments
        self.ran_with = versions("transformers", "torch", "triton") | {"arguments": dict(self._options)}
        if way.startswith("assisted"):
            assert job.assistant is not None
            self._options["assistant_model"] = _assistant(job.assistant, job)
            self.ran_with["arguments"] |= {"assistant_model": job.assistant, "num_assistant_tokens": job.chain}
        self._counts, self._forwards = way in COUNTED, 0
        if self._counts:
            self._model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        self._forwards = 0
        inputs = padded(prompts, self._job.device)
        options = sampling(temperature) | {"max_new_tokens": self._job.new_tokens}
        ids = self._model.generate(**inputs, **options, **self._options)
        tokens = ids[:, inputs["input_ids"].shape[1] :].tolist()
        if not self._counts or len(prompts) > 1 or self._forwards < 2:
            return Answers(tokens)
        drafts = self._forwards - 1  # the first forward reads the prompt
        return Answers(tokens, drafts, len(tokens[0]) - 1 - drafts)

    def close(self) -> None:
        """Has nothing to end."""


def _assistant(folder: str, job: Job) -> Any:
    """The small model, which proposes chains of fixed length."""
    assistant = load(folder, job)
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = job.chain, "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


class Batching:
    """Transformers' continuous batching. Its manager is kept between calls, and made anew for another temperature."""

    def __init__(self, job: Job, arguments: dict[str, Any]):
        self._model, self._job = load(job.target, job, job.is_random), job
        self._temperature: float | None = None
        options: dict[str, Any] = {"max_requests_per_batch": max(job.open), "allow_block_sharing": False}
        if job.device == "cpu":  # by default it takes most of the memory
            empty = ContinuousBatchingConfig()
            size = getattr(empty, "page_size", None) or empty.block_size  # as releases before 5.23 call it
            options["num_blocks"] = max(job.open) * (job.longest // size + 2)
        self._config = ContinuousBatchingConfig(**(options | arguments))
        self.ran_with = versions("transformers", "torch", "triton", "flash-attn") | {"arguments": options | arguments}

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        if self._temperature not in (None, temperature):
            self.close()
        self._temperature = temperature
        config = GenerationConfig(
            **sampling(temperature), max_new_tokens=self._job.new_tokens, eos_token_id=-1, pad_token_id=0
        )
        found = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=self._config, persistent_manager=True
        )
        if torch.device(self._job.device).type == "cuda":
            torch.cuda.synchronize()
        outputs = list(found.values())
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None or len(outputs) < len(prompts):
            raise RuntimeError(f"Of {len(prompts)} requests {len(outputs)} have ended; an error: {failed}")
        return Answers([list(output.generated_tokens) for output in outputs])

    def close(self) -> None:
        """Frees the manager that the model keeps."""
        self._model.destroy_cached_continuous_batching_manager()


def start(way: str, job: Job, arguments: dict[str, Any]) -> Generate | Batching:
    """The contender of a way."""
    return Batching(job, arguments) if way == "batching" else Generate(way, job, arguments)
