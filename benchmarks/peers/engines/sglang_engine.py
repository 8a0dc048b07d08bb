"""SGLang's offline engine. Names are those of SGLang 0.5.23."""

from __future__ import annotations

import os
from typing import Any

from ..job import Answers, Job, versions


TREE = {"speculative_num_steps": 7, "speculative_eagle_topk": 10, "speculative_num_draft_tokens": 60}
"""EAGLE's own tree of 60 nodes, 8 levels deep with the root."""


def engine_arguments(way: str, job: Job) -> dict[str, Any]:
    """The arguments of `sglang.Engine`."""
    found: dict[str, Any] = {
        "model_path": job.target,
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "random_seed": 0,
        "load_format": "dummy" if job.is_random else "auto",
        "context_length": job.longest + 80,  # of a tree's nodes, too
        "max_running_requests": max(job.open),
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
    }
    if way == "plain":
        return found
    chain = {
        "speculative_num_steps": job.chain,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": job.chain + 1,
    }
    head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": job.heads["specforge"]}
    return found | head | {"speculative_draft_load_format": "auto"} | (TREE if way == "tree" else chain)


def environment(way: str, job: Job) -> dict[str, str]:
    """The environment variables that set the acceptance; they are read when SGLang is imported."""
    if job.acceptance_length is None or way == "plain":
        return {}
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(job.acceptance_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed" if way == "tree" else "real-draft-token",  # drafts' own: chains only
    }


class SGLang:
    """`sglang.Engine`, plain, or with chains or trees of an EAGLE-3 head."""

    def __init__(self, way: str, job: Job, arguments: dict[str, Any]):
        variables = environment(way, job)
        os.environ.update(variables)
        import sglang

        self._job = job
        options = engine_arguments(way, job) | arguments
        self._engine = sglang.Engine(**options)
        self.ran_with = versions("sglang", "sglang-kernel", "torch", "transformers", "triton", "flashinfer-python") | {
            "arguments": options,
            "environment": variables,
        }

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        sampling = {"temperature": temperature, "max_new_tokens": self._job.new_tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        about = [output["meta_info"] for output in outputs]
        tokens = [list(output["output_ids"]) for output in outputs]
        if "spec_verify_ct" not in about[0]:
            return Answers(tokens)
        drafts, accepted = (sum(one[name] for one in about) for name in ("spec_verify_ct", "spec_num_correct_drafts"))
        return Answers(tokens, drafts, accepted)

    def close(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def start(way: str, job: Job, arguments: dict[str, Any]) -> SGLang:
    """The contender of a way."""
    return SGLang(way, job, arguments)
