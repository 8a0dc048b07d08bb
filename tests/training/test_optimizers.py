"""`MuonAndAdamW`: which optimizer trains what, and that schedules and checkpoints reach both."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import tiny_model
from support.random_blocks import HEADS, random_block_head
from torch import nn

from hf_specdec.training.optimizers import MuonAndAdamW


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")


def made(model: nn.Module) -> MuonAndAdamW:
    return MuonAndAdamW(model, lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        torch.manual_seed(number)
        sum((torch.randn_like(one) * one).sum() for one in model.parameters() if one.requires_grad).backward()
        optimizer.step()


def test_muon_trains_the_matrices_of_layers() -> None:
    head = random_block_head(**HEADS["vanilla"])
    muon, adamw = made(head).parts
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    by_muon = {names[id(one)] for group in muon.param_groups for one in group["params"]}
    by_adamw = {names[id(one)] for group in adamw.param_groups for one in group["params"]}
    assert by_muon | by_adamw == set(names.values()) and not by_muon & by_adamw
    assert "fc.weight" in by_muon and "layers.0.mlp.down_proj.weight" in by_muon
    assert all("proj" in name or name == "fc.weight" for name in by_muon)
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "norm.weight"} <= by_adamw


def test_adamw_trains_embeddings_and_lm_head() -> None:
    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        muon = {id(one) for group in made(model).parts[0].param_groups for one in group["params"]}
        assert id(model.lm_head.weight) not in muon and id(model.model.embed_tokens.weight) not in muon
        assert id(model.model.layers[0].mlp.up_proj.weight) in muon


def test_a_schedule_reaches_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = made(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 2)
    schedule.step()
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
    optimizer.param_groups[0]["lr"] = 0.1
    steps(model, optimizer, 1)
    assert not torch.equal(before["0.weight"], model[0].weight) and torch.equal(before["1.weight"], model[1].weight)


def test_a_checkpoint_continues_both() -> None:
    whole = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = made(whole)
    steps(whole, optimizer, 3)
    second = copy.deepcopy(whole)
    loaded = made(second)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, one in ((whole, optimizer), (second, loaded)):
        one.param_groups[1]["lr"] = 0.05
        steps(model, one, 2)
    assert all(torch.equal(values, second.state_dict()[name]) for name, values in whole.state_dict().items())
