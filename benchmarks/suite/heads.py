"""P4 and P8: a trained head on its own target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.benchmarking.bench import REFERENCE
from hf_specdec.benchmarking.comparison import compare
from hf_specdec.benchmarking.contenders import baseline, sampling_options, speculative
from hf_specdec.benchmarking.equality import Gate, check, differences_of
from hf_specdec.benchmarking.figures import figures
from hf_specdec.benchmarking.phases import trace_call
from hf_specdec.benchmarking.prompts import EncodedPrompt, built_in, encode, encode_turns
from hf_specdec.config import SpeculativeConfig
from hf_specdec.loading import load_draft_to, load_target, load_tokenizer
from hf_specdec.metrics import SpeculationMetrics, metrics_of_last_call
from hf_specdec.trees import DynamicTree

from .sizes import tree_of


NODES = 59
"""Number of draft tokens of P8's trees."""
SPEED_TASKS = ("chat", "code", "maths")


@dataclass(kw_only=True)
class Trained:
    """
    A trained head with its target, loaded on first use.

    Args:
        target (`str`, *optional*): Hub id or folder of the target; None for SmolLM2.
        draft (`str`): Hub id or folder of the head.
        dtype (`torch.dtype`), device (`str`): dtype and device of target and head.
        max_new_tokens (`int`), rounds (`int`): new tokens and number of timed calls.
        gate_tokens (`int`): new tokens of the comparison in float32.
        num_prompts (`int`, *optional*): most prompts of each task for P8; None for all.
    """

    target: str | None
    draft: str
    dtype: torch.dtype
    device: str
    max_new_tokens: int
    gate_tokens: int
    rounds: int
    num_prompts: int | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.target)

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_target(self.target, self.dtype, self.device)

    @cached_property
    def assistant(self) -> Any:
        return load_draft_to(self.draft, self.dtype, self.device)

    @cached_property
    def prompts(self) -> list[EncodedPrompt]:
        return encode(self.tokenizer, built_in(SPEED_TASKS, 1), self.device)


def gate(trained: Trained) -> Gate:
    """Compares the texts generated with the head's default tree with plain `generate`'s, in float32."""
    target = load_target(trained.target, torch.float32, trained.device)
    draft = load_draft_to(trained.draft, torch.float32, trained.device)
    return check(target, trained.prompts, [speculative(draft, "default")], max_new_tokens=trained.gate_tokens)


TREES = ("default", "dynamic:6,8,31")
"""Trees of P4 on a GPU, where wider trees cost little; the best one counts."""


def speed_of_head(trained: Trained, trace: Path | None = None) -> dict[str, Any]:
    """
    P4: tokens per second over those of `generate` eager, and with a static cache and compiled. Prompt lookup runs
    beside them.
    """
    contenders = [baseline(name, None) for name in ("eager", "static", "lookup")]
    if trained.model.device.type == "cuda":
        contenders += [speculative(trained.assistant, tree, compiles) for tree in TREES for compiles in (False, True)]
    else:
        contenders.append(speculative(trained.assistant, "default"))
    calls = compare(
        trained.model,
        trained.prompts,
        contenders,
        temperature=0.0,
        max_new_tokens=trained.max_new_tokens,
        rounds=trained.rounds,
    )
    if trace is not None:
        trace_call(trained.model, trained.prompts[0], contenders[-1], trace)
    found = figures(calls, temperature=0.0, reference=REFERENCE)
    _, static, _, *own = (row for row in found if row.task == found[-1].task)
    ours = max(own, key=lambda row: row.tokens_per_second)
    return {
        "over": {
            "eager": ours.speed_up,
            "static": ours.tokens_per_second / static.tokens_per_second,
        },
        "acceptance_length": ours.mean_acceptance_length,
        "calls": [row.to_dict() for row in found],
        "differences": [d.to_dict() for d in differences_of(trained.model, trained.prompts, calls, REFERENCE)],
    }


def drawn_over_best(trained: Trained) -> dict[str, Any]:
    """
    P8: tokens per step at temperature 1 of drawn trees with recursive rejection, over those of best-token trees with
    the next token drawn from the target. The better of a static and a dynamic tree counts for each.
    """
    trees = {
        "static": tree_of(NODES, depth=6),
        "dynamic": DynamicTree(depth=6, top_k=10, num_nodes=NODES),
    }
    ways: dict[str, dict[str, Any]] = {
        "drawn": {"draft_sampling": "sample", "verification": "rejection"},
        "best": {"draft_sampling": "greedy", "verification": "target"},
    }
    found = {
        f"{way}, {kind} tree": acceptance(trained, SpeculativeConfig(tree=tree, **options))
        for way, options in ways.items()
        for kind, tree in trees.items()
    }
    best = {way: max(value for name, (value, _) in found.items() if name.startswith(way)) for way in ways}
    return {
        "ratio": best["drawn"] / best["best"],
        "acceptance_length": {name: value for name, (value, _) in found.items()},
        "standard_error": {name: error for name, (_, error) in found.items()},
        "nodes": NODES,
    }


def acceptance(trained: Trained, config: SpeculativeConfig) -> tuple[float, float]:
    """Tokens per step at temperature 1, over the built-in prompts in one batch, and their standard error."""
    texts = [prompt.text for prompt in built_in(num_prompts=trained.num_prompts)]
    torch.manual_seed(0)
    trained.model.generate(
        **encode_turns(trained.tokenizer, texts).to(trained.device),
        **sampling_options(1.0),
        max_new_tokens=trained.max_new_tokens,
        assistant_model=trained.assistant,
        speculative_config=config,
    )
    return mean_length(metrics_of_last_call())


def mean_length(metrics: SpeculationMetrics) -> tuple[float, float]:
    """The mean acceptance length and its standard error, taking steps as independent."""
    counts = torch.tensor(
        [float(count) for row in metrics.accepted_per_step for count in row], dtype=torch.float64, device="cpu"
    )
    return 1 + float(counts.mean()), float(counts.std() / len(counts) ** 0.5)
