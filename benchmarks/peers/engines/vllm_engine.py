"""vLLM's offline engine. Names are those of vLLM 0.33."""

from __future__ import annotations

from typing import Any

from ..job import Answers, Job, versions


COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


def engine_arguments(way: str, job: Job) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    found: dict[str, Any] = {
        "model": job.target,
        "skip_tokenizer_init": True,
        "dtype": job.dtype,
        "seed": 0,
        "load_format": "dummy" if job.is_random else "auto",
        "max_model_len": job.longest + 16,
        "max_num_seqs": max(job.open),
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # the counts of drafts are among them
    }
    if way == "plain":
        return found
    speculation = {"method": "eagle3", "model": job.heads["specforge"], "num_speculative_tokens": job.chain}
    if job.acceptance_length is not None:
        speculation |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": job.acceptance_length,
        }
    return found | {"speculative_config": speculation}


class VLLM:
    """`vllm.LLM`, plain or with chains of an EAGLE-3 head."""

    def __init__(self, way: str, job: Job, arguments: dict[str, Any]):
        import vllm

        self._job, self._vllm = job, vllm
        options = engine_arguments(way, job) | arguments
        self._engine = vllm.LLM(**options)
        self._counts = way != "plain"
        self.ran_with = versions("vllm", "torch", "transformers", "triton", "flashinfer-python") | {
            "arguments": options
        }

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        sampling = self._vllm.SamplingParams(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=self._job.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        before = self._counters()
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._engine.generate(inputs, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if not self._counts:
            return Answers(tokens)
        return Answers(tokens, *(after - first for after, first in zip(self._counters(), before, strict=True)))

    def _counters(self) -> list[int]:
        if not self._counts:
            return []
        values = dict.fromkeys(COUNTERS, 0)
        for metric in self._engine.get_metrics():
            if metric.name in values:
                values[metric.name] += int(metric.value)
        return list(values.values())

    def close(self) -> None:
        """Lets the engine go; its processes end with this one."""
        del self._engine


def start(way: str, job: Job, arguments: dict[str, Any]) -> VLLM:
    """The contender of a way."""
    return VLLM(way, job, arguments)
