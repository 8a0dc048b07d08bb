"""Assistants of Gemma 4 on a GPU: real CUDA graphs, in a batch and in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gemma import make_target, write_assistant

from hf_specdec import DynamicTree, GemmaAssistant, SpeculativeConfig, last_metrics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("rows", [1, 3])
def test_texts(rows: int, tmp_path: Path) -> None:
    target, assistant = make_target().cuda(), GemmaAssistant.from_pretrained(write_assistant(tmp_path)).cuda()
    ids = torch.randint(3, 60, (rows, 18), generator=torch.Generator().manual_seed(3)).cuda()
    call = {"max_new_tokens": 24, "do_sample": False}
    drafts = {"assistant_model": assistant, "tree": DynamicTree(depth=4, top_k=3, num_nodes=10)}
    plain = target.generate(ids, attention_mask=torch.ones_like(ids), **call)
    assert target.generate(ids, attention_mask=torch.ones_like(ids), **call, **drafts).equal(plain)
    assert last_metrics().num_draft_tokens > 0 and "steps" in last_metrics().seconds
    outputs = target.generate_batch(ids.tolist(), **call, **drafts)
    texts = {tuple(one.prompt_ids): one.generated_tokens for one in outputs.values()}
    assert [texts[tuple(row)] for row in ids.tolist()] == plain[:, 18:].tolist()


def test_whole_steps_accept_what_those_of_the_host_do(tmp_path: Path) -> None:
    target, assistant = make_target().cuda(), GemmaAssistant.from_pretrained(write_assistant(tmp_path)).cuda()
    ids, accepted = torch.randint(3, 60, (3, 18), generator=torch.Generator().manual_seed(3)).cuda(), []
    for cuda_graphs in (False, True):
        config = SpeculativeConfig(tree=DynamicTree(depth=4, top_k=3, num_nodes=10), cuda_graphs=cuda_graphs)
        options = {"max_new_tokens": 40, "do_sample": False, "speculative_config": config}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options)
        accepted.append([row[:-2] for row in last_metrics().accepted_per_step])
    assert accepted[0] == accepted[1] and sum(map(sum, accepted[0])) > 0
