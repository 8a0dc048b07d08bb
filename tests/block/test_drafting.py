"""Drafting with block heads: the references' own chains and trees, and what of them is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.goldens import trained_target
from support.heads import RecordingBlockDrafter, golden, trained_block_head

import hf_specdec
from hf_specdec import DraftTree, DynamicTree, TokenTree
from hf_specdec.drafters.growth import grow_from_positions


KINDS = ("dflash", "jetspec", "dspark", "dflash2", "peagle")
NODES = 15


def drafted(name: str, tree: Any, **options: Any) -> RecordingBlockDrafter:
    """The drafter after a greedy call on the golden prompt; its text is checked."""
    arrays, _ = golden(name)
    drafter = RecordingBlockDrafter(trained_block_head(name))
    ids = arrays["input_ids"]
    text = trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        tree=tree,
        max_new_tokens=64,
        do_sample=False,
        **options,
    )
    length = min(arrays["greedy_ids"].shape[1], text.shape[1])
    assert text[0, :length].tolist() == arrays["greedy_ids"][0, :length].tolist()
    return drafter


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.some_cases(2)
def test_the_references_own_chains(name: str) -> None:
    arrays, _ = golden(name)
    expected, accepted = arrays["spec_draft_tokens"], arrays["spec_accept_length"].tolist()
    drafter = drafted(name, TokenTree.chain(expected.shape[1]))
    assert [lengths[0] - 1 for lengths in drafter.lengths[: len(expected)]] == arrays["spec_prefix_len"].tolist()
    # The last chains here end where the text does.
    found = [draft.tokens[0].tolist() for draft in drafter.trees[: len(expected)]]
    assert found == [row[: len(mine)] for row, mine in zip(expected.tolist(), found, strict=True)]
    assert sum(len(mine) == expected.shape[1] for mine in found) >= len(found) - 3
    own = hf_specdec.last_metrics().accepted_per_step[0]
    assert own[: len(accepted) - 2] == accepted[:-2]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.some_cases(2)
def test_the_references_own_trees(name: str) -> None:
    """The best 15 nodes of all, whatever their depth: those of the reference's heap, and what of them is accepted."""
    arrays, _ = golden(name)
    depth = arrays["spec_draft_tokens"].shape[1]
    drafter = drafted(name, DynamicTree(depth=depth, top_k=NODES, num_nodes=NODES))
    steps = len(arrays["tree_tokens"])
    assert [lengths[0] - 1 for lengths in drafter.lengths[:steps]] == arrays["tree_prefix_len"].tolist()
    for step in range(steps - 2):  # the last ones end where the text does
        assert paths_of(*(arrays[f"tree_{part}"][step] for part in ("tokens", "parents"))) == paths_of(
            drafter.trees[step].tokens[0], drafter.trees[step].topology.parents[0, 1:]
        )
    own = hf_specdec.last_metrics().accepted_per_step[0]
    assert own[: steps - 2] == arrays["tree_accept_length"].tolist()[:-2]


class ByPosition(RecordingBlockDrafter):
    """Grows trees as if the children of a node did not depend on its token."""

    def grow(self, tree: Any, root_logits: torch.Tensor, depth: int, *sampling: Any) -> DraftTree:
        return grow_from_positions(tree, self.all_logits, depth)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_children_given_their_parent_are_accepted_more_often(name: str) -> None:
    """Than those of trees as large that grow from the positions' logits alone."""
    found = []
    for kind in (RecordingBlockDrafter, ByPosition):
        ids = golden(name)[0]["input_ids"]
        trained_target().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=kind(trained_block_head(name)),
            tree=DynamicTree(depth=6, top_k=NODES, num_nodes=NODES),
            max_new_tokens=150,
            do_sample=False,
        )
        found.append(hf_specdec.last_metrics().mean_acceptance_length)
    assert found[0] >= found[1] > 1.5


def paths_of(tokens: torch.Tensor, parents: torch.Tensor) -> set[tuple[int, ...]]:
    """The tokens on the path to every node but the root, which is node 0."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        if token >= 0:
            paths.append((*paths[parent], token))
    return set(paths[1:])
