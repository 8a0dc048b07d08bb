"""
What every rank of a tensor-parallel model does whose steps are captured; run by test_captured_steps.py. On the CPU a
stand-in takes the place of CUDA graphs.

The ranks differ wherever they may: in their random state, which is not shared, and in the draft's weights.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device_steps
from support.batches import limits, ragged_prompts
from support.models import prompts
from support.parity import IRREGULAR
from support.ranks import say_where_if_stuck, write_result
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, EagleHead
from hf_specdec.graphs import RECORDERS
from hf_specdec.ranks import Ranks


GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 8}
DYNAMIC = DynamicTree(depth=3, top_k=2, num_nodes=6)


def texts_of(
    rank: int, target: PreTrainedModel, folder: Path, patch: pytest.MonkeyPatch, steps: device_steps.Steps
) -> dict[str, Any]:
    """What `generate` and `generate_batch` write, by name, and how many steps were captured."""
    device, dtype = target.device, target.dtype
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=dtype).to(device).eval()
    head = EagleHead.from_pretrained(folder / "head", dtype=dtype).to(device)
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in draft.parameters():  # rank 0's is as it was
            parameter += 0.05 * rank * parameter.std() * torch.randn_like(parameter)
    inputs, found = {name: value.to(device) for name, value in prompts(2, 12, padding=True).items()}, {}

    def run(name: str, assistant: Any, tree: Any, **options: Any) -> None:
        steps.captures = steps.replays = 0
        torch.manual_seed(100 * rank)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if name.startswith("batch"):
                config = limits(60 + 10 * rank)
                outputs = target.generate_batch(
                    ragged_prompts((9, 1, 30)),
                    assistant_model=assistant,
                    tree=tree,
                    continuous_batching_config=config,
                    **options,
                ).values()
                text = [output.generated_tokens for output in outputs]
                accepted = [output.speculation.accepted_per_step[0] for output in outputs]
            else:
                text = target.generate(**inputs, assistant_model=assistant, tree=tree, **options)
                accepted = hf_specdec.last_metrics().accepted_per_step
        found[name] = {
            "text": text,
            "accepted": accepted,
            "captures": steps.captures,
            "replays": steps.replays,
            "warnings": [str(one.message) for one in told if "could not be captured" in str(one.message)],
        }

    run("greedy, static tree", draft, IRREGULAR, **GREEDY)
    run("greedy, dynamic tree", draft, DYNAMIC, **GREEDY)
    run("greedy, automatic tree", draft, "auto", **GREEDY)
    run("greedy, head", head, IRREGULAR, **GREEDY)
    run("batch, greedy", draft, IRREGULAR, **GREEDY)
    patch.setattr(Ranks, "share_random_state", lambda ranks: None)
    run("sampled, static tree", draft, IRREGULAR, **SAMPLED)
    run("batch, sampled", draft, IRREGULAR, **SAMPLED)
    if rank == 1:
        patch.setitem(RECORDERS, device.type, fails)
    run("batch, greedy, failing on one rank", head, IRREGULAR, **GREEDY)
    return found


def fails(*args: Any, **options: Any) -> Any:
    """A capture that fails, after the run before it."""
    args[0]()
    raise RuntimeError("the capture has failed")


def main() -> None:
    folder = Path(sys.argv[1])
    say_where_if_stuck()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        is_cuda = torch.cuda.is_available()
        steps = device_steps.count(patch) if is_cuda else device_steps.install(patch, with_kernel=True)
        target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, tp_plan="auto").eval()
        texts = texts_of(dist.get_rank(), target, folder, patch, steps)
        write_result(folder, {"backend": dist.get_backend(), "texts": texts})
    dist.destroy_process_group()  # waits for ever if a graph with exchanges is left


if __name__ == "__main__":
    main()
