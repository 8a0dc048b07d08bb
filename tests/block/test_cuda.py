"""Block heads on a GPU: real CUDA graphs, compiled forwards, and samples of whole steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import limits, text_alone
from support.exact import SIGNIFICANCE, fit
from support.goldens import trained_prompts, trained_target
from support.heads import BLOCK_KINDS, tiny_block_head, trained_block_head
from support.models import prompts, tiny_model
from support.sampling import METHODS, a_block_head, expected_tokens, sampled_tokens, the_target

import hf_specdec
from hf_specdec import DynamicTree, SpeculativeConfig, TokenTree
from hf_specdec.trees.candidate_choice import CandidateChoice
from hf_specdec.trees.candidate_ways import CandidateWays


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GOLDENS = ("dflash", "jetspec", "dspark", "dflash2", "peagle")
DYNAMIC = DynamicTree(depth=4, top_k=8, num_nodes=15)


@pytest.mark.parametrize("tree", [DYNAMIC, TokenTree.chain(4), "auto"], ids=["dynamic", "chain", "auto"])
@pytest.mark.parametrize("name", GOLDENS)
def test_trained_heads(name: str, tree: Any) -> None:
    """The text of plain `generate`, in steps that run whole, and what the host's steps accept."""
    target, head = copy.deepcopy(trained_target()).cuda(), trained_block_head(name).cuda()
    ids = torch.tensor([trained_prompts()["prompts"][0]], device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 60, "do_sample": False}
    plain, found = target.generate(ids, **options), []
    for cuda_graphs in (False, True):
        config = SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        text = target.generate(ids, **options, assistant_model=head, speculative_config=config)
        metrics = hf_specdec.last_metrics()
        assert text.equal(plain)
        assert ("steps" in metrics.seconds) is cuda_graphs
        found.append([row[:-2] for row in metrics.accepted_per_step])
    assert tree == "auto" or found[0] == found[1]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_batches_and_requests(kind: str) -> None:
    target = tiny_model("llama", seed=1, dtype=torch.float32).cuda()
    head = tiny_block_head(target, **BLOCK_KINDS[kind]).cuda()
    inputs = {name: value.cuda() for name, value in prompts(3, 9, padding=True).items()}
    options = {"max_new_tokens": 24, "do_sample": False}
    text = target.generate(**inputs, **options, assistant_model=head, tree=DynamicTree(depth=3, top_k=4, num_nodes=9))
    assert "steps" in hf_specdec.last_metrics().seconds
    assert text.equal(target.generate(**inputs, **options))
    ragged = [[5, 6, 7], [8] * 20, [9, 10]]
    drafting = {"assistant_model": head, "tree": TokenTree.chain(3), "continuous_batching_config": limits()}
    results = target.generate_batch(ragged, **options, **drafting).values()
    texts = {tuple(one.prompt_ids): one.generated_tokens for one in results}
    assert [texts[tuple(ids)] for ids in ragged] == [text_alone(target, ids, max_new_tokens=24) for ids in ragged]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_compiled_steps(name: str) -> None:
    target, head = copy.deepcopy(trained_target()).cuda(), trained_block_head(name).cuda()
    ids = torch.tensor([trained_prompts()["prompts"][0]], device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 60, "do_sample": False}
    config = SpeculativeConfig(tree=DYNAMIC, compile=True)
    text = target.generate(ids, **options, assistant_model=head, speculative_config=config)
    assert "steps" in hf_specdec.last_metrics().seconds
    assert text.equal(target.generate(ids, **options))


@pytest.mark.parametrize("method", ["target, best tokens", "rejection, irregular", "rejection, budgets"])
@pytest.mark.parametrize("kind", ["dflash", "markov", "rnn", "dflash2"])
def test_samples_of_whole_steps(kind: str, method: str) -> None:
    target, head = copy.deepcopy(the_target()).float().cuda(), copy.deepcopy(a_block_head(kind)).float().cuda()
    tokens = sampled_tokens(target, head, METHODS[method], 8_000)
    assert "steps" in hf_specdec.last_metrics().seconds
    found = fit(tokens.cpu(), expected_tokens("plain"))
    assert found.p_value > SIGNIFICANCE, found


@pytest.mark.parametrize("draws", [True, False])
def test_samples_of_shaped_trees(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes chosen by the head's confidence, filled with drawn tokens or with the best ones."""
    tree = TokenTree.parse("[(0,), (1,), (0,0), (0,1)]")
    monkeypatch.setattr(CandidateChoice, "_chosen", lambda choice: tree)
    monkeypatch.setattr(CandidateWays, "begin_step", lambda ways, tree: setattr(ways, "takes_best", not draws))
    target = copy.deepcopy(the_target()).float().cuda()
    fields = {"has_confidence_head": True, "confidence_with_markov": True}
    head = tiny_block_head(the_target(), **BLOCK_KINDS["markov"], **fields).float().cuda()
    tokens = sampled_tokens(target, head, SpeculativeConfig(tree="auto"), 8_000)
    found = fit(tokens.cpu(), expected_tokens("plain"))
    assert found.p_value > SIGNIFICANCE, found
