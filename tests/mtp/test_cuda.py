"""MTP modules on a GPU: real CUDA graphs, batches and requests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.batches import limits
from support.mtp import KNOWN, load_target, write_checkpoint
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree, last_metrics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)


@cache
def the_target(family: str) -> PreTrainedModel:
    """Kept with its head: `"mtp"` reads the checkpoint once."""
    with TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder))
        target = load_target(Path(folder)).cuda()
        target.generate(torch.tensor([[5, 6, 7]], device="cuda"), max_new_tokens=4, assistant_model="mtp")
        return target


@pytest.mark.parametrize("tree", [DYNAMIC, TokenTree.chain(3), "auto"], ids=["dynamic", "chain", "auto"])
@pytest.mark.parametrize("family", ["hy_v3", "exaone_moe", "deepseek_v3", "glm4_moe"])
def test_texts(family: str, tree: Any) -> None:
    """Of dense heads, windows, a latent cache and two modules, in a batch and in flight."""
    target = the_target(family)
    ids = torch.randint(3, 64, (3, 18), generator=torch.Generator().manual_seed(3)).cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **options)
    text = target.generate(ids, **options, assistant_model="mtp", tree=tree)
    assert text.equal(plain)
    found = target.generate_batch(
        ids.tolist(),
        continuous_batching_config=limits(),
        max_new_tokens=24,
        do_sample=False,
        assistant_model="mtp",
        tree=tree,
    )
    texts = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    assert [texts[tuple(row)] for row in ids.tolist()] == plain[:, 18:].tolist()


@pytest.mark.parametrize("family", ["hy_v3", "glm4_moe", "mimo_v2_flash"])
def test_whole_steps_accept_what_those_of_the_host_do(family: str) -> None:
    """With one module, two, and three that have windows."""
    if family not in KNOWN:
        pytest.skip(f"this release of transformers has no {family}")
    target, accepted = the_target(family), []
    ids = torch.randint(3, 64, (1, 18), generator=torch.Generator().manual_seed(3)).cuda()
    for cuda_graphs in (False, True):
        config = SpeculativeConfig(tree=DYNAMIC, cuda_graphs=cuda_graphs)
        target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model="mtp", speculative_config=config)
        assert ("steps" in last_metrics().seconds) is cuda_graphs
        accepted.append([row[:-2] for row in last_metrics().accepted_per_step])
    assert accepted[0] == accepted[1]
