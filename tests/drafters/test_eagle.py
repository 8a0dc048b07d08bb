"""
Drafting with EAGLE heads: the references' own trees and acceptance; and whatever the rows, the batches and the steps
without drafts, the trees that a head would propose for that text from scratch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.goldens import trained_prompts, trained_target
from support.heads import (
    GOLDENS,
    WIDE,
    RecordingDrafter,
    assert_drafts_as_from_scratch,
    golden,
    pads_of,
    tiny_head,
    trained_head,
)
from support.models import prompts, tiny_model
from support.parity import assert_same_text, plain_text

import hf_specdec
from hf_specdec import DynamicTree, TokenTree


EAGLE3 = GOLDENS / "safeailab_eagle3"


# ------------------------------------------------------------------------------------------------------------- goldens


@pytest.mark.parametrize("name", ["safeailab_eagle1", "safeailab_eagle3"])
def test_the_references_own_trees(name: str) -> None:
    """Every dynamic tree of the reference's run, node by node, what of it is accepted, and the output."""
    arrays, about = golden(name)
    drafter = RecordingDrafter(trained_head(name))
    # SafeAILab counts the root, and one level less.
    tree = DynamicTree(depth=about["settings"]["depth"] + 1, top_k=4, num_nodes=about["settings"]["total_token"] - 1)
    ids = arrays["input_ids"]
    text = trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        tree=tree,
        max_new_tokens=64,
        do_sample=False,
    )
    steps = len(arrays["eagenerate_accept_length"])
    for step in range(steps):
        draft = drafter.trees[step]
        assert draft.tokens[0].tolist() == arrays["step_draft_tokens"][step, 1:].tolist()
        assert draft.topology.parents[0, 1:].tolist() == arrays["step_parents"][step, 1:].tolist()
        assert draft.topology.depths[0].tolist() == arrays["step_position_ids"][step].tolist()
    accepted = hf_specdec.last_metrics().accepted_per_step[0]
    assert accepted[:steps] == arrays["eagenerate_accept_length"].tolist() == about["results"]["accepted_drafts"]
    length = arrays["eagenerate_ids"].shape[1]
    assert text[0, :length].tolist() == arrays["eagenerate_ids"][0].tolist()
    assert text[0, : arrays["greedy_ids"].shape[1]].tolist() == arrays["greedy_ids"][0].tolist()


@pytest.mark.parametrize(
    "name, options",
    [
        ("speculators_eagle3", {}),
        ("specforge_eagle3", {}),
        ("modelopt_eagle3", {}),
        ("modelopt_eagle3", {"norm_hidden_twice": False}),
        ("modelopt_eagle3_yarn", {}),
        ("modelopt_eagle3_yarn", {"norm_hidden_twice": False}),
    ],
)
@pytest.mark.some_cases(3)
def test_the_references_own_chains(name: str, options: dict[str, Any]) -> None:
    """Every chain of 4 that the references draft along the text, and what is accepted."""
    arrays, _ = golden(name)
    suffix = "_singlenorm" if options else ""
    drafter = RecordingDrafter(trained_head(name, **options))
    ids = arrays["input_ids"]
    trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        tree=TokenTree.chain(4),
        max_new_tokens=64,
        do_sample=False,
    )
    steps = len(arrays["spec_accept_length" + suffix])
    found = [draft.tokens[0].tolist() for draft in drafter.trees[:steps]]
    assert found == arrays["spec_draft_tokens" + suffix].tolist()
    # A length counts the root here, the references' does not.
    assert [lengths[0] - 1 for lengths in drafter.lengths[:steps]] == arrays["spec_prefix_len" + suffix].tolist()
    accepted = hf_specdec.last_metrics().accepted_per_step[0]
    assert accepted[:steps] == arrays["spec_accept_length" + suffix].tolist()


# ------------------------------------------------------------------------------------- the same trees as from scratch


HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "draft vocabulary": {"draft_vocab_size": 40},
    "eagle1": {"eagle_version": 1},
    "eagle1, bias": {"eagle_version": 1, "fc_bias": True},
    "last hidden state": {"num_aux_features": 0, "aux_layer_ids": None, "has_fc": False},
    "two features": {"aux_layer_ids": [1, 2]},
    "own embeddings": {"has_embeddings": True},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "norm before fc": {"norm_before_fc": True, "norm_hidden_twice": True},
    "two layers": {"layers": {"num_hidden_layers": 2}},
    "qwen3": {"layers": {"model_type": "qwen3"}},
    "qwen2": {"layers": {"model_type": "qwen2"}},
    "window": {"layers": {"sliding_window": 6, "layer_types": ["sliding_attention"]}},
    "yarn": {
        "layers": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    },
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.some_cases(2)
def test_every_step_drafts_as_from_scratch(kind: str) -> None:
    """Over a ragged batch with padding: what is in the head's cache is what the text alone would put there."""
    target = tiny_model("llama", seed=1)
    drafter = RecordingDrafter(tiny_head(target, **HEADS[kind]))
    inputs = prompts(3, 9, padding=True)
    text = target.generate(**inputs, assistant_model=drafter, tree=WIDE, do_sample=False, max_new_tokens=20)
    assert text.tolist() == plain_text(target, inputs, max_new_tokens=20).tolist()
    metrics = hf_specdec.last_metrics()
    assert len({tuple(row) for row in metrics.accepted_per_step}) > 1, "the batch is not ragged"
    assert metrics.num_accepted_tokens > 3
    assert_drafts_as_from_scratch(drafter, target, text, pads_of(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("prefill_chunk_size", [None, 4])
def test_the_order_of_steps_does_not_matter(prefill_chunk_size: int | None) -> None:
    """A batch accepts, row by row, what each row accepts alone."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:3])
    tree = DynamicTree(depth=4, top_k=3, num_nodes=10)
    options = {"max_new_tokens": 40, "prefill_chunk_size": prefill_chunk_size}
    alone = []
    for row in ids:
        inputs = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
        assert_same_text(target, inputs, head, tree, **options)
        alone.append(hf_specdec.last_metrics().accepted_per_step[0])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert assert_same_text(target, inputs, head, tree, **options).accepted_per_step == alone


def test_catches_up_after_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few waiting rows allowed and with many, the trees behind a pause are those of a call without one."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([trained_prompts()["prompts"][0][:12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tree = TokenTree.from_branching((2, 2))

    class Pausing(RecordingDrafter):
        def propose(self, sequences):
            return None if 20 <= sequences.lengths[0] < 40 else super().propose(sequences)

    never, pausing = RecordingDrafter(head), Pausing(head)
    text = target.generate(**inputs, assistant_model=never, tree=tree, do_sample=False, max_new_tokens=60)
    monkeypatch.setattr("hf_specdec.drafters.features.reading.LONGEST_FORWARD", 5)
    monkeypatch.setattr("hf_specdec.drafters.features.reading.MOST_PENDING", 7)
    drafted = {lengths[0]: draft.tokens for draft, lengths in zip(never.trees, never.lengths, strict=True)}
    paused = target.generate(**inputs, assistant_model=pausing, tree=tree, do_sample=False, max_new_tokens=60)
    assert paused.tolist() == text.tolist()
    compared = [
        torch.equal(draft.tokens, drafted[lengths[0]])
        for draft, lengths in zip(pausing.trees, pausing.lengths, strict=True)
        if lengths[0] >= 40 and lengths[0] in drafted
    ]
    assert len(compared) > 3 and all(compared)
    assert not any(20 <= lengths[0] < 40 for lengths in pausing.lengths)
