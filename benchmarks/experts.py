"""
What the experts of a layer take on a GPU, in microseconds: transformers' own ways, and the captured one.

    python benchmarks/experts.py [--shapes mixtral-8x7b qwen3-30b-a3b gpt-oss-20b] [--tokens 1 13 64]

"Captured" is what runs within CUDA graphs where the model's own way waits for the host
(`hf_specdec/graphs/experts.py`); "eager" runs without a graph, the others are replayed from one, where they can be.
Weights are random. Prints a line for each size, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from suite.timing import captured, milliseconds
from transformers import AutoConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_specdec.benchmarking.environment import environment
from hf_specdec.graphs.experts import captured_experts


SHAPES = {
    "mixtral-8x7b": (8, 2, 4096, 14_336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
"""Experts, experts of a token, hidden size, width of an expert."""
MOST_BYTES = 24e9
"""Most bytes of weights that "batched" may copy."""


def experts(shape: str, dtype: torch.dtype) -> Any:
    """The experts of a layer, with random weights."""
    num, of_token, hidden, inner = SHAPES[shape]
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=num,
        num_experts_per_tok=of_token,
        experts_implementation="eager",
    )
    module = MixtralExperts(config).to("cuda", dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module


@torch.no_grad()
def measure(module: Any, shape: str, tokens: int) -> dict[str, float | str]:
    """Microseconds of each way, or why it cannot be captured."""
    num, of_token, hidden, inner = SHAPES[shape]
    dtype, device = next(module.parameters()).dtype, torch.device("cuda")
    states = torch.randn(tokens, hidden, device=device, dtype=dtype)
    chosen = torch.rand(tokens, num, device=device).topk(of_token)
    given = module, states, chosen.indices, chosen.values.to(dtype)
    ways = {
        "eager": lambda: module(*given[1:]),
        "grouped": lambda: grouped_mm_experts_forward(*given),
        "captured": lambda: captured_experts(*given),
    }
    if tokens * of_token * 3 * hidden * inner * dtype.itemsize < MOST_BYTES:
        ways["batched"] = lambda: batched_mm_experts_forward(*given)
    found: dict[str, float | str] = {}
    for name, run in ways.items():
        try:
            replay = run if name == "eager" else captured(run, device)
            found[name] = round(1e3 * statistics.median(milliseconds(replay, device, 20)), 1)
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
            torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 13, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    results = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            module = experts(shape, getattr(torch, dtype))
            for tokens in arguments.tokens:
                times = measure(module, shape, tokens)
                results.append({"shape": shape, "dtype": dtype, "tokens": tokens, **times})
                print(f"{shape}, {dtype}, {tokens} tokens: {times}", flush=True)
            del module
    print(json.dumps({"experts": results, **environment("cuda")}))


if __name__ == "__main__":
    main()
