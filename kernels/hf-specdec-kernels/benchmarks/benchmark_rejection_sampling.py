"""
P7: times walks down trees of 64 draft nodes over a vocabulary of 128,256, bfloat16, at batch 64 and 1.

    python benchmarks/benchmark_rejection_sampling.py
    python benchmarks/benchmark_rejection_sampling.py --sweep    # tries other block sizes, one to two minutes

The floor is the time to read the target's logits once at the measured copy bandwidth. Children are drawn without
replacement from a draft near the target; the mean acceptance length is printed. Peers: softmax and multinomial of all
nodes in PyTorch (as a sampler without walks would do), and the argmax of all nodes. Equality with the naive version is
checked first. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from measuring import attempt, copy_bandwidth, environment, require_cuda, time_calls

from hf_specdec_kernels import greedy_walk, rejection_walk, target_walk
from hf_specdec_kernels.rejection_sampling.naive import greedy_walk_naive, rejection_walk_naive, target_walk_naive


VOCAB = 128_256
BRANCHING = (4, 3, 2, 1)
"""Children of each node by depth: 4 + 12 + 24 + 24 = 64 nodes."""


def parents_of(branching: tuple[int, ...]) -> list[int]:
    parents, level = [0], [0]
    for children in branching:
        first = len(parents)
        parents += [node for node in level for _ in range(children)]
        level = list(range(first, len(parents)))
    return parents


class Setting:
    """Inputs of the walks: target and draft logits, and trees drawn from the draft."""

    def __init__(self, batch: int, vocab: int = VOCAB, sharpness: float = 3.0, distance: float = 1.0):
        parents = parents_of(BRANCHING)
        self.batch, self.nodes, self.max_depth = batch, len(parents), len(BRANCHING)
        shape = (batch, self.nodes, vocab)
        self.logits = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        self.draft_logits = torch.empty_like(self.logits)
        self.tokens = torch.full((batch, self.nodes), -1, device="cuda")
        for node in range(self.nodes):  # one node at a time: float32 logits of all nodes would fill the device
            scores = sharpness * torch.randn(batch, vocab, device="cuda")
            self.logits[:, node] = scores
            self.draft_logits[:, node] = scores + distance * torch.randn_like(scores)
            children = [child for child in range(1, self.nodes) if parents[child] == node]
            if children:
                noise = torch.empty_like(scores).exponential_().log_()
                drawn = (self.draft_logits[:, node].float() - noise).topk(len(children), dim=-1).indices
                self.tokens[:, children] = drawn
        self.parents = torch.tensor([parents], device="cuda")
        self.uniforms = torch.rand(batch, self.nodes, device="cuda", dtype=torch.float64)
        rows = torch.ones(batch, device="cuda")
        self.temperature, self.top_k, self.top_p = 0.8 * rows, (50 * rows).int(), 0.95 * rows
        self.bytes = self.logits.numel() * self.logits.element_size()

    @property
    def tree(self) -> dict[str, Any]:
        return {"logits": self.logits, "tokens": self.tokens, "parents": self.parents, "max_depth": self.max_depth}

    @property
    def filters(self) -> dict[str, torch.Tensor]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    @property
    def calls(self) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]]:
        """The fast version, the naive version and the arguments of every walk, by name."""
        drawn = self.tree | {"uniforms": self.uniforms}
        drafted = drawn | {"draft_logits": self.draft_logits}
        warm = {"temperature": self.temperature}
        return {
            "greedy": (greedy_walk, greedy_walk_naive, self.tree),
            "target": (target_walk, target_walk_naive, drawn),
            "target, filters": (target_walk, target_walk_naive, drawn | self.filters),
            "rejection": (rejection_walk, rejection_walk_naive, drafted),
            "rejection, temperature": (rejection_walk, rejection_walk_naive, drafted | warm),
            "rejection, top-p": (rejection_walk, rejection_walk_naive, drafted | warm | {"top_p": self.top_p}),
            "rejection, filters": (rejection_walk, rejection_walk_naive, drafted | self.filters),
        }

    def softmax_of_all(self) -> torch.Tensor:
        probabilities = self.logits.flatten(0, 1).float().softmax(dim=-1)
        return torch.multinomial(probabilities, num_samples=1)


def check() -> None:
    """Checks equality with the naive version in all rows but one: float32 may round one draw across a boundary."""
    for batch in (16, 4):  # without and with the preparing kernel, which sums all nodes beforehand
        setting = Setting(batch)
        for name, (ours, naive, arguments) in setting.calls.items():
            found, expected = ours(**arguments), naive(**arguments)
            agree = (found.path == expected.path).all(dim=1) & (found.next_tokens == expected.next_tokens)
            if agree.sum() < batch - 1:
                raise SystemExit(f"{name} differs from the naive version in {int((~agree).sum())} rows of {batch}.")
    print("equal to the naive version")


def measure(batch: int, bandwidth: float) -> list[dict[str, Any]]:
    """Times every walk and peer at a batch size; one row of the table for each."""
    setting = Setting(batch)
    floor = 1e3 * setting.bytes / bandwidth
    print(f"batch {batch}: reading the target's logits once takes {floor:.4f} ms")
    rows = []
    for name, (ours, _, arguments) in setting.calls.items():
        walks = ours(**arguments)
        time = time_calls([lambda ours=ours, arguments=arguments: ours(**arguments)] * 3, replays=20)
        length = 1 + walks.accepted.double().mean().item()
        row = {"batch": batch, "walk": name, "ms": time.median, "p20": time.p20, "p80": time.p80}
        rows.append(row | {"floor_ms": floor, "over_floor": time.median / floor, "acceptance_length": length})
        print(f"  {name}: {time}, {time.median / floor:.2f} × that; mean acceptance length {length:.2f}")
    peers = {
        "softmax and multinomial of all nodes": setting.softmax_of_all,
        "argmax of all nodes": lambda: setting.logits.argmax(dim=-1),
    }
    for name, peer in peers.items():
        time = attempt(name, lambda peer=peer: time_calls([peer], replays=10))
        if time is not None:
            rows.append({"batch": batch, "peer": name, "ms": time.median, "over_floor": time.median / floor})
            print(f"  {name}, in PyTorch: {time}")
    return rows


def sweep() -> list[dict[str, Any]]:
    """Times some walks with other block sizes and numbers of pipeline stages."""
    from hf_specdec_kernels.rejection_sampling import triton as launches

    rows = []
    for batch in (64, 1):
        setting = Setting(batch)
        for block, stages in ((16384, 3), (16384, 1), (8192, 3), (8192, 5)):
            launches.LARGEST_BLOCK = block
            launches.STAGES = dict.fromkeys(launches.STAGES, stages)
            for name in ("rejection, temperature", "rejection, top-p"):
                ours, _, arguments = setting.calls[name]
                run = [lambda ours=ours, arguments=arguments: ours(**arguments)] * 3
                time = attempt(name, lambda run=run: time_calls(run, replays=20))
                if time is not None:
                    rows.append({"batch": batch, "walk": name, "block": block, "stages": stages, "ms": time.median})
                    print(f"  batch {batch}, {name}, blocks of {block}, {stages} stages: {time}")
    return rows


@torch.inference_mode()
def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Walks against the time to read the target's logits once.")
    parser.add_argument("--sweep", action="store_true", help="other sizes of blocks instead")
    options = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    check()
    if options.sweep:
        found = {"sweep": sweep(), **environment()}
        print(json.dumps(found))
        return found
    bandwidth = copy_bandwidth()
    print(f"{environment()}\ncopy bandwidth {bandwidth / 1e12:.2f} TB/s (read + write)")
    rows = [row for batch in (64, 1) for row in measure(batch, bandwidth)]
    main_row = next(row for row in rows if row.get("walk") == "rejection, temperature" and row["batch"] == 64)
    summary = f"batch 64, sampled tree: {main_row['over_floor']:.2f} × the time to read the target's logits once"
    found = {"summary": summary, "copy_bandwidth": bandwidth, **environment(), "rows": rows}
    print(summary)
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
