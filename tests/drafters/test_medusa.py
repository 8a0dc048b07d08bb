"""Drafting with Medusa heads: the reference's logits, trees and acceptance, and what `generate` offers beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.models import FAMILIES, VOCAB, prompts, tiny_model
from support.parity import assert_same_text, plain_text

import hf_specdec
from hf_specdec import DynamicTree, MedusaConfig, MedusaHeads, SpeculativeConfig, TokenTree
from hf_specdec.drafters import MedusaDrafter


FOLDER = TINY_TARGET.parent / "medusa"


@pytest.fixture(scope="module")
def arrays() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "golden.safetensors")


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    return MedusaHeads.from_pretrained(FOLDER)


def tiny_heads(target, num_layers: int = 1) -> MedusaHeads:
    config = MedusaConfig(
        hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size, num_heads=3, num_layers=num_layers
    )
    torch.manual_seed(0)
    heads = MedusaHeads(config).to(target.dtype)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(5.0)
    return heads


# ------------------------------------------------------------------------------------------------------------- goldens


def test_logits(arrays: dict[str, torch.Tensor], heads: MedusaHeads) -> None:
    assert heads.config.num_heads == 5 and heads.config.num_layers == 1
    with torch.no_grad():
        logits = heads(arrays["last_hidden_postnorm"])
    torch.testing.assert_close(logits, arrays["medusa_logits"], atol=1e-4, rtol=0)


def test_the_references_own_trees(arrays: dict[str, torch.Tensor], heads: MedusaHeads) -> None:
    """Every tree of the reference's run, what of it is accepted, and the output."""
    trees = []

    class Recording(MedusaDrafter):
        def propose(self, sequences):
            draft = super().propose(sequences)
            trees.append((sequences.tokens(0, sequences.lengths[0] - 1), draft))
            return draft

    tree = TokenTree([[rank for rank in path if rank >= 0] for path in arrays["tree_choices_sorted"].tolist()])
    ids = arrays["input_ids"]
    text = trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=Recording(heads),
        tree=tree,
        max_new_tokens=64,
        do_sample=False,
    )
    steps = len(arrays["medusa_accept_length"])
    for (root, draft), expected in zip(trees, arrays["step_tree_candidates"].tolist(), strict=False):
        assert root + draft.tokens[0].tolist() == expected
    accepted = hf_specdec.last_metrics().accepted_per_step[0]
    assert accepted[:steps] == arrays["medusa_accept_length"].tolist()
    length = arrays["medusa_generate_ids"].shape[1]
    assert text[0, :length].tolist() == arrays["medusa_generate_ids"][0].tolist()


# ------------------------------------------------------------------------------------------------- in `generate` calls


@pytest.mark.parametrize("tree", [None, "[(0,), (3,), (0, 1), (3, 0), (0, 1, 0)]", TokenTree.chain(5)])
@pytest.mark.some_cases(1)
def test_rows_of_a_batch(heads: MedusaHeads, tree, default_trees: None) -> None:
    """Each row accepts what it accepts alone."""
    target = trained_target()
    ids = torch.tensor([prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:3])
    alone = []
    for row in ids:
        inputs = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
        assert_same_text(target, inputs, heads, tree, max_new_tokens=40)
        alone.append(hf_specdec.last_metrics().accepted_per_step[0])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert assert_same_text(target, inputs, heads, tree, max_new_tokens=40).accepted_per_step == alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(2)
def test_targets_of_every_family(family: str) -> None:
    target, inputs = tiny_model(family), prompts(3, 15, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=16)
    for tree in (TokenTree.from_branching((16, 4)), DynamicTree(depth=3, top_k=8, num_nodes=30)):
        assert_same_text(target, inputs, tiny_heads(target, 2), tree, expected=expected, max_new_tokens=16)


def test_disabled_by_load(heads: MedusaHeads) -> None:
    target = trained_target()
    ids = torch.tensor([prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:3])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    end = int(plain_text(target, inputs, max_new_tokens=40)[0, 20])
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": end, "pad_token_id": 0}
    config = SpeculativeConfig(disable_by_batch_size=2)
    ours = target.generate(**inputs, assistant_model=heads, speculative_config=config, **options)
    assert ours.tolist() == target.generate(**inputs, **options).tolist()


# ------------------------------------------------------------------------------------------------------------ loading


def test_saved_and_read_again(heads: MedusaHeads, arrays: dict[str, torch.Tensor], tmp_path: Path) -> None:
    heads.save_pretrained(tmp_path)
    again = MedusaHeads.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(arrays["last_hidden_postnorm"]), heads(arrays["last_hidden_postnorm"]))


def test_safetensors_and_prefixed_names(arrays: dict[str, torch.Tensor], heads: MedusaHeads, tmp_path: Path) -> None:
    weights = torch.load(FOLDER / "medusa_lm_head.pt", weights_only=True)
    weights = {f"medusa_head.{key}": tensor.contiguous() for key, tensor in weights.items()}
    save_file(weights, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    again = MedusaHeads.from_pretrained(tmp_path)
    assert again.config.num_heads == 5
    with torch.no_grad():
        assert torch.equal(again(arrays["last_hidden_postnorm"]), heads(arrays["last_hidden_postnorm"]))


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda weights: weights.pop("2.0.linear.bias"), "`heads.2.blocks.0.bias` is missing"),
        (lambda weights: weights.pop("0.1.weight"), "no `0.1.weight`"),
        (lambda weights: weights.update({"7.9.nothing": torch.zeros(1)}), "`7.9.nothing` is unknown"),
        (
            lambda weights: weights.update({"1.1.weight": torch.zeros(512, 32)}),
            "lm_head.weight` must be 512×64",
        ),
    ],
)
def test_damaged(change, match: str, tmp_path: Path) -> None:
    weights = torch.load(FOLDER / "medusa_lm_head.pt", weights_only=True)
    change(weights)
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=match):
        MedusaHeads.from_pretrained(tmp_path)


def test_refusals(heads: MedusaHeads) -> None:
    target = tiny_model("llama")
    inputs = prompts(1, 5)
    with pytest.raises(ValueError, match=f"vocabulary of 512.*is {VOCAB}"):
        target.generate(**inputs, assistant_model=heads)
    with pytest.raises(ValueError, match="4 levels deep, but MedusaDrafter proposes only 3"):
        target.generate(**inputs, assistant_model=tiny_heads(target), tree=TokenTree.chain(4))
    with pytest.raises(ValueError, match="4 levels deep, but MedusaDrafter proposes only 3"):
        schedule = [(0, TokenTree.chain(2)), (20, TokenTree.chain(4))]
        target.generate(**inputs, assistant_model=tiny_heads(target), tree=schedule)
    with pytest.raises(ValueError, match="no probabilities to draw from"):
        config = SpeculativeConfig(draft_sampling="sample")
        target.generate(**inputs, assistant_model=tiny_heads(target), speculative_config=config, do_sample=True)
