"""
What the verify of a tree costs in a model with recurrent layers, on a GPU: over its matmuls and the bytes of its
states, and over a step of one node.

    python benchmarks/hybrid_step.py [--shape 4b 27b] [--nodes 8 32 64] [--compile]

The target is a Qwen3.5 of the shape with random weights, in bfloat16, after a prompt of 1,024 tokens. Measured, in
milliseconds, each captured alone:

- verify: the forward over so many nodes, root included, and the same over one;
- floor: every weight matrix by cuBLAS at as many rows in one graph, and the states read and written once at the
  bandwidth of a copy.

Prints a line for each shape and number of nodes, then one JSON line. To reach with 32 nodes: verify at most 1.25 × its
floor and 1.15 × the forward of one node.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from suite.forwards import forward_after, matmuls
from suite.sizes import tree_of
from suite.timing import captured, milliseconds
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.benchmarking.environment import environment


COMMON = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "27b": {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
}
PROMPT, DEPTH = 1024, 6


def random_target(shape: str) -> PreTrainedModel:
    """A random Qwen3.5 of a shape: three layers of Gated DeltaNet to one of attention."""
    config = AutoConfig.for_model("qwen3_5_text", **COMMON, **SHAPES[shape])
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def milliseconds_of_states(model: PreTrainedModel) -> float:
    """Time to read and write the recurrent states of one row once, at the bandwidth of a copy."""
    config = model.config
    layers = config.layer_types.count("linear_attention")
    size = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = captured(lambda: target.copy_(source), source.device)
    return statistics.median(milliseconds(copy, source.device, 20)) * layers * size / source.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 64], help="with the root")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device.")
    device, found = torch.device("cuda"), []
    for shape in arguments.shape:
        target = random_target(shape)
        ids, states = torch.randint(1000, (1, PROMPT), device=device), milliseconds_of_states(target)
        one = None
        for nodes in (1, *arguments.nodes):
            tree = None if nodes == 1 else tree_of(nodes - 1, depth=DEPTH)
            with forward_after(target, ids, tree, compiles=arguments.compile) as forward:
                verify = statistics.median(milliseconds(captured(forward, device), device, arguments.replays))
            floor = statistics.median(
                milliseconds(captured(matmuls(target, nodes), device), device, arguments.replays)
            )
            one = verify if one is None else one
            figures = {"shape": shape, "nodes": nodes, "verify": verify, "matmuls": floor, "states": states}
            found.append(figures | {"over_floor": verify / (floor + states), "over_one": verify / one})
            print(
                f"{shape}, {nodes} nodes: verify {verify:.3f} ms, {verify / (floor + states):.3f} × its floor "
                f"(matmuls {floor:.3f}, states {states:.3f}), {verify / one:.3f} × one node",
                flush=True,
            )
        del target
        torch.cuda.empty_cache()
    print(json.dumps({"verify": found, **environment("cuda")}))


if __name__ == "__main__":
    main()
