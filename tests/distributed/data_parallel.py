"""
What every rank of a target does whose weights are sharded by FSDP, each with prompts of its own; run by
test_data_parallel.py.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.caches import assert_same_states
from support.heads import tiny_head
from support.hybrids import Oracle, hybrid, padded
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from support.ranks import say_where_if_stuck, write_result
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import NgramDraft
from hf_specdec.compat import CACHE
from hf_specdec.models.hooks import foreign_hooks


def rows_that_end_early(plain: PreTrainedModel, mesh: Any, rank: int) -> dict[str, Any]:
    """
    New tokens of each row before its padding, and whether texts are plain `generate`'s, where rows end early: in the
    first rank all of them, long before the other's. The returned cache is compared as well.
    """
    inputs = {name: value.to(plain.device) for name, value in padded(3, seed=3).items()}
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    text, prompt = plain.generate(**inputs, **options).sequences, inputs["input_ids"].shape[1]
    ends = [(row, prompt + 2 + 2 * row) for row in range(3)] if rank == 0 else [(0, prompt + 5)]
    options["eos_token_id"] = [int(text[end]) for end in ends]
    expected, target = plain.generate(**inputs, **options), copy.deepcopy(plain)
    for module in (*target.model.layers, target):
        fully_shard(module, mesh=mesh)
    drafter = Oracle(text.tolist(), 2, rests=0.1)
    found = target.generate(**inputs, **options, assistant_model=drafter, synced_gpus=True)
    assert_same_states(found[CACHE], expected[CACHE])
    new = (expected.sequences[:, prompt:] != 0).sum(dim=1)
    return {"new": new, "is_plain": found.sequences.tolist() == expected.sequences.tolist()}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say_where_if_stuck()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, mesh = dist.get_rank(), dist.init_device_mesh(device, (2,))
    plain = tiny_model().to(device)
    target, draft, head = copy.deepcopy(plain), noisy_copy(plain, 0.05), tiny_head(plain).to(device)
    for module in (*target.model.layers, target):
        fully_shard(module, mesh=mesh)
    # Texts of other lengths: the one rank is done long before the other.
    inputs = {name: value.to(device) for name, value in prompts(2, 8 + 5 * rank, seed=rank, padding=True).items()}
    options = {"do_sample": False, "max_new_tokens": 20 + 15 * rank}
    found: dict[str, Any] = {"expected": plain.generate(**inputs, **options)}

    def run(name: str, assistant: Any, tree: Any = None) -> None:
        output = target.generate(
            **inputs, **options, assistant_model=assistant, tree=tree, synced_gpus=True, return_dict_in_generate=True
        )
        found[name] = output.sequences
        found[f"{name}, accepted"] = output.speculation.num_accepted_tokens

    run("draft model", draft, IRREGULAR)
    run("automatic tree", draft, "auto")
    run("n-grams", NgramDraft())
    run("head", head, IRREGULAR)
    for family in ("qwen3_5_text", "zaya"):  # states by functions, and level by level, beside attention
        found[f"{family}, ending early"] = rows_that_end_early(hybrid(family).to(device), mesh, rank)
    sharded = fully_shard(noisy_copy(plain, 0.05), mesh=mesh)
    for name, call in {
        "refused draft": lambda: run("sharded draft", sharded, IRREGULAR),
        "refused batch": lambda: target.generate_batch([[5, 6]], assistant_model=draft, tree=IRREGULAR),
    }.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    found["foreign hooks"] = foreign_hooks(target)
    found["metrics are this rank's own"] = hf_specdec.last_metrics().num_drafts
    write_result(Path(sys.argv[1]), found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
