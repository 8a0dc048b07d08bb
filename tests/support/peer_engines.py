"""
Stand-ins for vLLM, SGLang and SafeAILab's EAGLE, which refuse what the real ones have no name for.

The names are those of the wheels of vllm 0.33.0 and sglang 0.5.23, in tests/benchmarking/peer_signatures.json. Every
engine continues a prompt by counting on from its last token, and makes steps of three tokens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


SIGNATURES = json.loads((Path(__file__).parents[1] / "benchmarking" / "peer_signatures.json").read_text())
STEP = 3


def check(names: Any, of: str, *sections: str) -> None:
    """Raises a TypeError for names that a package does not have in any of its sections."""
    known = {name for section in sections for name in SIGNATURES[of][section]}
    if unknown := set(names) - known:
        raise TypeError(f"{of} {sections[0]} has no {', '.join(sorted(unknown))}")


def continued(prompt: list[int], count: int) -> list[int]:
    """What every engine answers."""
    return [prompt[-1] + 1 + index for index in range(count)]


def fake_vllm() -> ModuleType:
    """The module `vllm`."""
    module: Any = ModuleType("vllm")

    class SamplingParams:
        def __init__(self, **options: Any):
            check(options, "vllm 0.33.0", "SamplingParams")
            self.options = options

    class LLM:
        def __init__(self, **options: Any):
            check(options, "vllm 0.33.0", "LLM", "EngineArgs")
            check(options.get("speculative_config", {}), "vllm 0.33.0", "SpeculativeConfig")
            self.options, self.drafts = options, 0

        def generate(self, prompts: Any, sampling_params: SamplingParams, **options: Any) -> list[Any]:
            check(options, "vllm 0.33.0", "LLM.generate")
            count = sampling_params.options["max_tokens"]
            self.drafts += len(prompts) * (count // STEP)
            texts = [continued(prompt["prompt_token_ids"], count) for prompt in prompts]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(text))]) for text in texts]

        def get_metrics(self) -> list[Any]:
            if self.options["disable_log_stats"]:
                raise AssertionError("Stat logging disabled")
            counts = {"num_drafts": self.drafts, "num_accepted_tokens": (STEP - 1) * self.drafts, "num_other": 99}
            return [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counts.items()]

    module.LLM, module.SamplingParams = LLM, SamplingParams
    return module


def fake_sglang() -> ModuleType:
    """The module `sglang`, whose `variables` are those of the acceptance when it was used first."""
    module: Any = ModuleType("sglang")

    class Engine:
        def __init__(self, **options: Any):
            check(options, "sglang 0.5.23", "ServerArgs")
            module.variables = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
            check(module.variables, "sglang 0.5.23", "environment")
            self.options, self.is_open = options, True

        def generate(self, **options: Any) -> list[dict[str, Any]]:
            check(options, "sglang 0.5.23", "Engine.generate")
            check(options["sampling_params"], "sglang 0.5.23", "SamplingParams")
            count = options["sampling_params"]["max_new_tokens"]
            about: dict[str, Any] = {"completion_tokens": count}
            if "speculative_algorithm" in self.options:
                about |= {"spec_verify_ct": count // STEP, "spec_num_correct_drafts": (STEP - 1) * (count // STEP)}
            return [{"output_ids": continued(ids, count), "meta_info": about} for ids in options["input_ids"]]

        def shutdown(self) -> None:
            self.is_open = False

    module.Engine = Engine
    return module


class FakeEagle:
    """`EaModel`, which ends no sooner than its step does."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(eos_token="</s>")

    @classmethod
    def from_pretrained(
        cls,
        use_eagle3: bool = True,
        base_model_path: str | None = None,
        ea_model_path: str | None = None,
        total_token: int = 60,
        depth: int = 7,
        top_k: int = 10,
        threshold: float = 1.0,
        **kwargs: Any,
    ) -> FakeEagle:
        assert base_model_path and ea_model_path
        check(kwargs, "transformers", "from_pretrained")
        return cls()

    def eval(self) -> FakeEagle:
        return self

    def eagenerate(
        self,
        input_ids: torch.Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
    ) -> Any:
        assert log and len(input_ids) == 1 and self.tokenizer.eos_token is None
        count, last = 0, -1
        while count <= max_new_tokens:
            count, last = count + STEP, last + 1
        text = continued(input_ids[0].tolist(), count)
        return torch.tensor([input_ids[0].tolist() + text]), count, last


SIGNATURES["transformers"] = {"from_pretrained": ["torch_dtype", "low_cpu_mem_usage", "device_map"]}
