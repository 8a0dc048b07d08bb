"""
Tokens per second with a head on a model with recurrent layers, over plain steps of the same run, on a GPU.

    python benchmarks/hybrid_speed.py [--shape 4b] [--trees chain tree] [--compile]

The target is a Qwen3.5 of the shape, the head an EAGLE-3 head of one layer that proposes 32,768 tokens; both have
random weights, in bfloat16. Since such a head is never right, each captured step accepts a set number of tokens, see
`suite/set_walks.py`. One row, greedy; a time is the median of the calls, prefill left out:

- chain: 5 draft tokens, 3.5 tokens a step; tree: 31 draft tokens (32 nodes with the root), 4.0 tokens a step;
- plain: steps without a tree, captured too;
- verify, draft: the forwards of a step, those of the target and of the head, each captured alone;
- first token: a call for one token after a prompt of 2,000, transformers' own forward over that prompt beside it.

Prints a line for each, then one JSON line. To reach: with the chain 2.2 × plain, with the tree 2.5 ×; forwards at
least 0.93 of a step. `--shape tiny` tries the code out on a CPU, where a stand-in captures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hybrid_step import COMMON, SHAPES
from journey import record
from suite.set_walks import accepting
from suite.sizes import tree_of
from suite.timing import captured, milliseconds
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec import EagleConfig, EagleHead, SpeculativeConfig, TokenTree, graphs, kernels
from hf_specdec.benchmarking.comparison import synchronize
from hf_specdec.benchmarking.environment import environment
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.forwards.outputs import over_trees


TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TREES: dict[str, tuple[TokenTree, float, float]] = {
    "chain": (TokenTree.chain(5), 3.5, 2.2),
    "tree": (tree_of(31, depth=5), 4.0, 2.5),
}
"""Trees with the tokens that a step shall make, and the goal over plain steps."""
DRAFT_TOKENS = 32_768
OTHER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
"""A draft model for plain steps, which proposes nothing."""


def random_models(shape: str, device: str) -> tuple[PreTrainedModel, EagleHead, PreTrainedModel]:
    """A random target of a shape, its head, and a small draft model."""
    sizes = TINY if shape == "tiny" else COMMON | SHAPES[shape]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = AutoConfig.for_model("qwen3_5_text", **sizes, eos_token_id=None, pad_token_id=0)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    layers = {name: sizes[name] for name in names} | {"model_type": "llama", "num_hidden_layers": 1}
    layers |= {"head_dim": min(128, sizes["head_dim"]), "max_position_embeddings": 8192}
    of_head = EagleConfig(text_config=layers, draft_vocab_size=min(DRAFT_TOKENS, sizes["vocab_size"] // 2))
    other = LlamaConfig(**OTHER, vocab_size=sizes["vocab_size"], max_position_embeddings=8192, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        return target, EagleHead(of_head).to(dtype).eval(), LlamaForCausalLM(other).to(dtype).eval()


class Calls:
    """
    Timed calls after one prompt.

    Args:
        target (`PreTrainedModel`): the target.
        prompt (`int`): tokens of the prompt.
        max_new_tokens (`int`), number (`int`): new tokens of a call, and number of calls.
    """

    def __init__(self, target: PreTrainedModel, prompt: int, max_new_tokens: int, number: int):
        self.target, self.max_new_tokens, self.number = target, max_new_tokens, number
        self.ids = torch.randint(target.config.vocab_size, (1, prompt), device=target.device)

    def seconds(self, draft: Any, config: SpeculativeConfig, max_new_tokens: int) -> float:
        """Seconds of one call, prefill included."""
        synchronize(self.ids.device)
        start = time.perf_counter()
        self.target.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            assistant_model=draft,
            speculative_config=config,
        )
        synchronize(self.ids.device)
        return time.perf_counter() - start

    def rates(self, draft: Any, config: SpeculativeConfig) -> list[float]:
        """Tokens per second of each call, after two that compile and capture."""
        found = []
        for _ in range(2 + self.number):
            seconds, metrics = self.seconds(draft, config, self.max_new_tokens), hf_specdec.last_metrics()
            if "steps" not in metrics.seconds:
                raise RuntimeError("No step was captured.")
            # The first token comes of the prefill.
            found.append((self.max_new_tokens - 1) / (seconds - metrics.seconds["prefill"]))
        return found[2:]

    def first_token(self, draft: Any, config: SpeculativeConfig) -> dict[str, float]:
        """Milliseconds of a call for one token, and of transformers' own forward over the prompt."""
        times: dict[str, list[float]] = {"call": [], "forward": []}
        for _ in range(2 + self.number):
            times["call"].append(1e3 * self.seconds(draft, config, 1))
            synchronize(self.ids.device)
            start = time.perf_counter()
            with torch.no_grad():
                self.target(self.ids, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1).tolist()
            times["forward"].append(1e3 * (time.perf_counter() - start))
        return {name: statistics.median(values[2:]) for name, values in times.items()}


@contextmanager
def noting_steps() -> Iterator[list[InFlightStep]]:
    """A context that notes the steps with a tree that are captured, with the models that they run."""
    noted: list[InFlightStep] = []
    patched: Any = InFlightStep
    run = patched._run

    def noting(step: InFlightStep) -> list[torch.Tensor]:
        if step.kind.tree is not None and step not in noted:
            noted.append(step)
        return run(step)

    patched._run = noting
    try:
        yield noted
    finally:
        patched._run = run


def forwards_of(step: Any) -> dict[str, Callable[[], object]]:
    """The forwards of a step by name: the target's over the tree, and all of the head's."""
    draft, rows, levels = step.draft, step.rows, []
    rows.state_slots.zero_()  # the rows had left theirs
    drafter = draft.drafter
    run_level = drafter.run_level
    drafter.run_level = lambda nodes: (levels.append(nodes), run_level(nodes))[1]
    proposed = draft.propose(None)
    drafter.run_level = run_level
    starts, waiting = rows.lengths - 1 - rows.counts, draft._waiting.index_select(0, rows.places)
    last = (rows.counts - 1)[:, None, None]
    tokens, topology = torch.cat([rows.roots, proposed.tokens], dim=1), proposed.topology

    def draft_forwards() -> None:
        draft.cache.at(starts)
        states = drafter.forward_features(rows.tail, waiting)
        states = states.gather(1, last.expand(-1, 1, states.shape[2]))
        draft.cache.at(rows.lengths - 1)
        drafter.begin_tree(states, rows.roots, len(levels) + 1)
        for nodes in levels:
            run_level(nodes)

    def verify() -> None:
        step._cache.at(rows.lengths - 1)
        step._forward(tokens, topology.ancestors, topology.depths, position_depths=topology.depths)

    return {"verify": verify, "draft": draft_forwards}


def speed_of(name: str, calls: Calls, head: EagleHead, compiles: bool, replays: int) -> dict[str, Any]:
    """Speed with a tree, and its step beside its forwards, in milliseconds."""
    tree, length, _ = TREES[name]
    config, device = SpeculativeConfig(tree=tree, compile=compiles), calls.ids.device
    with accepting(tree, length, device), noting_steps() as steps:
        rates = calls.rates(head, config)
    found: dict[str, Any] = {"rates": rates, "tokens_per_second": statistics.median(rates)}
    found["acceptance_length"] = hf_specdec.last_metrics().mean_acceptance_length
    with torch.no_grad(), over_trees(calls.target, head):
        for part, forward in forwards_of(steps[-1]).items():
            found[part] = statistics.median(milliseconds(captured(forward, device), device, replays))
    found["step"] = 1e3 * found["acceptance_length"] / found["tokens_per_second"]
    return found | {"forwards_of_step": (found["verify"] + found["draft"]) / found["step"]}


def stand_in() -> None:
    """Lets steps on a CPU run as captured ones do."""
    kernels.DEVICES["cpu"] = (torch.float64, torch.float32)
    graphs.RECORDERS["cpu"] = record


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="4b")
    parser.add_argument("--trees", nargs="*", choices=TREES, default=list(TREES))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument(
        "--long-prompt", type=int, default=2000, help="tokens of the prompt of the first token; 0: none"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--replays", type=int, default=50, help="of a forward alone")
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    arguments = parser.parse_args(words)
    device = "cpu" if arguments.shape == "tiny" else "cuda"
    if device == "cpu":
        stand_in()
    elif not torch.cuda.is_available():
        parser.error("it needs a CUDA device. Try the code out with --shape tiny.")
    target, head, other = random_models(arguments.shape, device)
    calls = Calls(target, arguments.prompt, arguments.max_new_tokens, arguments.calls)
    found: dict[str, Any] = {}
    off = SpeculativeConfig(tree="chain:1", disable_by_batch_size=0, compile=arguments.compile)
    plain = statistics.median(calls.rates(other, off))
    print(f"plain: {plain:.1f} tokens/s, {1e3 / plain:.3f} ms a step", flush=True)
    for name in arguments.trees:
        one = speed_of(name, calls, head, arguments.compile, arguments.replays)
        found[name] = one | {"over_plain": one["tokens_per_second"] / plain}
        print(
            f"{name}: {one['tokens_per_second']:.1f} tokens/s ({min(one['rates']):.1f} – {max(one['rates']):.1f}), "
            f"{one['tokens_per_second'] / plain:.3f} × plain (goal {TREES[name][2]}), {one['acceptance_length']:.2f} "
            f"tokens a step; verify {one['verify']:.3f} and draft {one['draft']:.3f} of {one['step']:.3f} ms: "
            f"{one['forwards_of_step']:.3f} (goal 0.93)",
            flush=True,
        )
    if arguments.long_prompt:
        calls = Calls(target, arguments.long_prompt, 1, arguments.calls)
        config = SpeculativeConfig(tree=TREES["chain"][0], compile=arguments.compile)
        found["first_token"] = times = calls.first_token(head, config)
        print(
            f"first token after {arguments.long_prompt}: {times['call']:.1f} ms; transformers' forward "
            f"{times['forward']:.1f} ms"
        )
    setting = {"shape": arguments.shape, "compile": arguments.compile, **environment(device)}
    print(json.dumps({"plain": plain, **found, **setting}))


if __name__ == "__main__":
    main()
