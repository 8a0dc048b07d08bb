"""
Tokens per second of requests with LoRA adapters: one adapter in all of them, and several side by side.

    python benchmarks/adapters.py [--requests 16] [--rank 16] [--new-tokens 32] [--draft] [--device cuda --compile]

The target is SmolLM2-135M-Instruct with adapters of random weights in all linear layers, greedy, without drafts or
with those of n-grams. Each figure is the median of the calls, which take turns; texts do not end early.

- active: one adapter, activated in PEFT as before, and no `adapter=`;
- one, none: `adapter=` the same in all requests, or None;
- 2, 8: as many adapters, taken by the requests in turn;
- peft 8: the same, by the function of PEFT's own `adapter_names` in the place of ours (not captured).

Prints a line for each, then one JSON line. To reach: 2 and 8 at least 0.7 of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from load import blocks_of
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.adapters import LoadedAdapters, RequestAdapters
from hf_specdec.adapters.stacks import Stack
from hf_specdec.benchmarking.comparison import synchronize
from hf_specdec.benchmarking.environment import environment
from hf_specdec.smollm2 import smollm2_folder


MOST_ADAPTERS = 8
PROMPT_TOKENS = 24


def adapted(device: str, rank: int) -> Any:
    """SmolLM2 with `MOST_ADAPTERS` adapters, the first one active."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    for number in range(MOST_ADAPTERS):
        config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        inject_adapter_in_model(config, model, f"adapter {number}")
    for layer in LoadedAdapters.of(model).layers:
        layer.set_adapter("adapter 0")
    return model.to(dtype)


@contextmanager
def by_peft(names: list[str]) -> Iterator[None]:
    """A context in which rows with these adapters get them from PEFT's own function."""

    seen: list[str] = []

    def reading(self: RequestAdapters, choices: Any, tokens: int) -> Any:
        seen[:] = [names[number] for number in self._seated]
        return own(self, choices, tokens)

    def install(self: Stack) -> None:
        install_ours(self)
        vars(self.layer)["forward"] = partial(self.layer._mixed_batch_forward, adapter_names=seen)

    own, install_ours = RequestAdapters._reading, Stack.install
    with mock.patch.object(RequestAdapters, "_reading", reading), mock.patch.object(Stack, "install", install):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--draft", action="store_true", help="speculate, by n-grams")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model, count = adapted(options.device, options.rank), options.requests
    prompts = torch.randint(model.config.vocab_size, (count, PROMPT_TOKENS)).tolist()
    names = [f"adapter {number}" for number in range(MOST_ADAPTERS)]
    contenders: dict[str, dict[str, Any]] = {
        "active": {},
        "one": {"adapter": names[0]},
        "none": {"adapter": None},
        "2": {"adapter": [names[row % 2] for row in range(count)]},
        "8": {"adapter": [names[row % 8] for row in range(count)]},
    }
    if options.device == "cpu":
        contenders["peft 8"] = contenders["8"]
    config = SpeculativeConfig(tree="[(0,), (0, 0), (0, 0, 0)]", compile=options.compile)
    draft, limits = NgramDraft(), ContinuousBatchingConfig(**blocks_of(count * 8))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + options.calls):
        for name, choice in contenders.items():
            context: AbstractContextManager[None] = (
                by_peft([names[0], "__base__", *names]) if name.startswith("peft") else nullcontext()
            )
            synchronize(model.device)
            start = time.perf_counter()
            with context:
                outputs = model.generate_batch(
                    prompts,
                    assistant_model=draft,
                    speculative_config=config,
                    continuous_batching_config=limits,
                    max_new_tokens=options.new_tokens,
                    do_sample=False,
                    eos_token_id=-1,
                    speculate=options.draft,
                    persistent_manager=True,
                    **choice,
                )
            synchronize(model.device)
            number = sum(len(output.generated_tokens) for output in outputs.values())
            rates[name].append(number / (time.perf_counter() - start))
    found = {name: statistics.median(of_calls[1:]) for name, of_calls in rates.items()}
    for name, rate in found.items():
        print(f"{name:>8}: {rate:8.1f} tokens/s, {rate / found['one']:.2f} of one")
    print(
        json.dumps({"tokens_per_second": found, "options": vars(options), "environment": environment(options.device)})
    )


if __name__ == "__main__":
    main()
