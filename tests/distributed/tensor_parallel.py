"""
What every rank of a tensor-parallel model does; run by test_tensor_parallel.py.

The ranks differ wherever they may: in their random state, in the clock of a criterion, in what a drafter proposes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.batches import limits, ragged_prompts
from support.models import prompts
from support.parity import IRREGULAR
from support.ranks import say_where_if_stuck, write_result
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

import hf_specdec
from hf_specdec import DraftTree, DynamicTree, EagleHead, NgramDraft, TokenTree
from hf_specdec.models.hooks import foreign_hooks


GREEDY = {"do_sample": False, "max_new_tokens": 16}
SAMPLED = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 16}
DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=8)
CHAIN = TokenTree.chain(4)


def inputs_of(device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in prompts(3, 12, padding=True).items()}


class StopsByRank(StoppingCriteria):
    """As a clock would: on every rank after another number of tokens."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class DraftsByRank(hf_specdec.Drafter):
    """Proposes other tokens on every rank, which rank 0's alone are right sometimes."""

    default_tree = CHAIN

    def __init__(self, text: list[list[int]], rank: int):
        super().__init__()
        self.text, self.rank = text, rank

    def propose(self, sequences: Any) -> DraftTree:
        rows = [row[length : length + 4] for row, length in zip(self.text, sequences.lengths, strict=True)]
        tokens = torch.tensor([row + [3] * (4 - len(row)) for row in rows], device=sequences.device)
        tokens = (tokens + self.rank) % 64
        tokens[:, 2:] = 5
        draft = DraftTree(tokens, hf_specdec.trees.Topology.of_tree(CHAIN, sequences.device))
        return draft.within([sequences.room(row) for row in range(sequences.batch_size)])


def texts_of(rank: int, target: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """What `generate` and `generate_batch` write, by name."""
    device = target.device
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64).to(device).eval()
    draft_tp = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64, tp_plan="auto").eval()
    head = EagleHead.from_pretrained(folder / "head", dtype=torch.float64).to(device)
    inputs, found = inputs_of(device), {}

    def run(name: str, assistant: Any, tree: Any = None, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed + 100 * rank)
        text = target.generate(**inputs, assistant_model=assistant, tree=tree, **options)
        found[name] = {
            "text": text,
            "accepted": hf_specdec.last_metrics().accepted_per_step,
            "random": torch.rand(1, device=device),
        }

    torch.manual_seed(100 * rank)
    found["plain"] = {"text": target.generate(**inputs, **GREEDY)}
    run("greedy, static tree", draft, IRREGULAR, **GREEDY)
    run("greedy, dynamic tree", draft, DYNAMIC, **GREEDY)
    run("greedy, automatic tree", draft, "auto", **GREEDY)
    run("greedy, n-grams", NgramDraft(), NgramDraft.default_tree, **GREEDY)
    run("greedy, head", head, IRREGULAR, **GREEDY)
    run("greedy, tensor-parallel draft", draft_tp, IRREGULAR, **GREEDY)
    run("greedy, repetition penalty", draft, IRREGULAR, repetition_penalty=1.3, **GREEDY)
    run("greedy, other drafts on every rank", DraftsByRank(found["plain"]["text"].tolist(), rank), CHAIN, **GREEDY)
    run("sampled, static tree", draft, IRREGULAR, seed=1, **SAMPLED)
    run("sampled, dynamic tree", draft, DYNAMIC, seed=2, **SAMPLED)
    run("sampled, head", head, IRREGULAR, seed=3, **SAMPLED)
    run("sampled, tensor-parallel draft", draft_tp, IRREGULAR, seed=4, **SAMPLED)
    run("sampled, n-grams", NgramDraft(), seed=5, **SAMPLED)
    run("sampled, along the target", draft, IRREGULAR, seed=6, top_k=5, repetition_penalty=1.3, **SAMPLED)
    stops = [StopsByRank(20 + 7 * rank)]
    run("other stops on every rank", draft, IRREGULAR, **GREEDY, stopping_criteria=stops)
    run("a clock", draft, IRREGULAR, **(GREEDY | {"max_new_tokens": 240, "max_time": 0.15}))

    def run_batch(name: str, assistant: Any, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed + 100 * rank)
        config = limits(30 + 10 * rank)  # some are preempted, and every rank has other memory
        outputs = target.generate_batch(
            ragged_prompts(), assistant_model=assistant, continuous_batching_config=config, **options
        )
        found[name] = {
            "text": [output.generated_tokens for output in outputs.values()],
            "accepted": [output.speculation.accepted_per_step for output in outputs.values()],
            "errors": [output.error for output in outputs.values() if output.error is not None],
        }

    run_batch("batch, greedy", draft, tree=IRREGULAR, **GREEDY)
    run_batch("batch, greedy, head", head, tree=IRREGULAR, **GREEDY)
    run_batch("batch, greedy, automatic tree", draft, tree="auto", **GREEDY)
    run_batch("batch, greedy, n-grams", NgramDraft(), **GREEDY)
    run_batch("batch, sampled", draft, seed=7, tree=IRREGULAR, **SAMPLED)
    run_batch("batch, sampled with a seed", draft, tree=DYNAMIC, **(SAMPLED | {"seed": 3}))
    run_batch("batch, other stops on every rank", draft, tree=IRREGULAR, **GREEDY, stopping_criteria=stops)
    return found


def refusals_of(target: PreTrainedModel) -> dict[str, str]:
    """Messages of what a tensor-parallel target is not for."""
    manager = target.init_continuous_batching(assistant_model=NgramDraft())
    calls = {
        "add_request": lambda: manager.add_request([5, 6]),
        "add_requests": lambda: manager.add_requests([[5, 6]]),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def main() -> None:
    folder = Path(sys.argv[1])
    say_where_if_stuck()
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64, tp_plan="auto").eval()
    rank = dist.get_rank()
    found = {
        "num_ranks": target.tp_size,
        "backend": dist.get_backend(),
        "texts": texts_of(rank, target, folder),
        "refusals": refusals_of(target),
        "foreign hooks": foreign_hooks(target),
    }
    write_result(folder, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
