"""Trees from pairs of tokens, against a search over the whole vocabulary, level by level."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch

from hf_specdec import DraftTree, DynamicTree, TokenTree
from hf_specdec.block import BlockConfig, BlockHead
from hf_specdec.drafters.block import BlockDrafter
from hf_specdec.drafters.growth import grow_from_pairs, pairs, pairs_of


LEVELS, SIZE = 4, 12
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_rank": 6},
    "gated": {"markov_rank": 6, "markov_type": "gated"},
    "selector": {"selector_rank": 6, "selector_top_k": 9},
}
IRREGULAR = TokenTree([(0,), (1,), (3,), (0, 0), (1, 2), (3, 1), (1, 2, 0), (1, 2, 1), (3, 1, 0), (1, 2, 1, 2)])


def head_of(kind: str, target: int = 70, draft: int = 50) -> BlockHead:
    layers = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 8}
    layers |= {"hidden_size": SIZE, "vocab_size": target, "num_hidden_layers": 1}
    config = BlockConfig(text_config=layers, mask_token_id=1, aux_layer_ids=[1], draft_vocab_size=draft, **KINDS[kind])
    torch.manual_seed(0)
    head = BlockHead(config).eval()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.7)
    return head


def inputs_of(head: BlockHead, rows: int = 3) -> tuple[torch.Tensor, ...]:
    """Logits, states, roots and the target's numbers of the draft's tokens."""
    draft, target = head.config.num_draft_tokens, head.config.vocab_size
    ids = torch.randperm(target)[:draft].sort().values
    return 2 * torch.randn(rows, LEVELS, draft), torch.randn(rows, LEVELS, SIZE), torch.tensor([[3], [8], [20]]), ids


def children(head: BlockHead, inputs: tuple[torch.Tensor, ...], row: int, path: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities after a path, by the head's own method."""
    logits, states, roots, ids = inputs
    level, parent = len(path), roots[row, 0] if not path else ids[path[-1]]
    here = slice(level, level + 1)
    own = head.conditional_logits(logits[row, None, here], states[row, None, here], parent[None, None], None)[0]
    return own[0, 0].float().log_softmax(dim=-1)


def best_paths(head: BlockHead, inputs: tuple[torch.Tensor, ...], row: int, tree: DynamicTree) -> set[tuple[int, ...]]:
    """The best paths of all, with up to `top_k` children for every node: the first ones out of a heap."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[tuple[int, ...]] = []
    while len(found) <= tree.num_nodes:
        cost, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < tree.depth:
            scores, tokens = children(head, inputs, row, path).topk(tree.top_k)
            for score, token in zip(scores.tolist(), tokens.tolist(), strict=True):
                heapq.heappush(heap, (cost - score, (*path, token)))
    return set(found[1:])


def paths_of(draft: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    parents = draft.topology.parents.expand(len(draft.tokens), -1)[row, 1:]
    for token, parent in zip(draft.tokens[row].tolist(), parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_paths_of_all(kind: str) -> None:
    head, tree = head_of(kind), DynamicTree(depth=LEVELS, top_k=5, num_nodes=17)
    inputs = inputs_of(head)
    draft = grow_from_pairs(tree, pairs_of(head, *inputs, tree), LEVELS)
    wrong = grow_from_pairs(tree, pairs_of(head, *inputs[:3], torch.arange(50), tree), LEVELS)  # the draft's numbers
    for row in range(3):
        expected = best_paths(head, inputs, row, tree)
        assert set(paths_of(draft, row)) == expected
        assert set(paths_of(wrong, row)) != expected


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_static_trees(kind: str) -> None:
    head = head_of(kind)
    inputs = inputs_of(head)
    draft = grow_from_pairs(IRREGULAR, pairs_of(head, *inputs, IRREGULAR), LEVELS)
    for row in range(3):
        names: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for ranks, path in zip(IRREGULAR.paths, paths_of(draft, row), strict=True):
            order = children(head, inputs, row, names[ranks[:-1]]).argsort(descending=True)
            names[ranks] = (*names[ranks[:-1]], int(order[ranks[-1]]))
            assert names[ranks] == path


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 3])
def test_fewer_levels(depth: int) -> None:
    """Than the tree has: `depth` of them can be used."""
    head, tree = head_of("vanilla"), DynamicTree(depth=LEVELS, top_k=3, num_nodes=9)
    logits, states, *others = inputs_of(head)
    draft = grow_from_pairs(tree, pairs_of(head, logits[:, :depth], states[:, :depth], *others, tree), depth)
    assert max(map(len, paths_of(draft, 0))) <= depth
    assert len(set(paths_of(draft, 0))) == min(9, sum(3**level for level in range(1, depth + 1)))


@torch.no_grad()
def test_tokens_that_are_no_candidates() -> None:
    """They count with the logits that they have by themselves; probabilities of the candidates are close to right."""
    head = head_of("vanilla", target=900, draft=700)
    logits, states, roots, _ = inputs_of(head)
    logits = 2 * logits
    head.markov_head.markov_w2.weight.data *= 0.1
    lists = pairs_of(head, logits, states, roots, None, DynamicTree(depth=LEVELS, top_k=9, num_nodes=20))
    assert lists.tokens.shape == (3, LEVELS, 512, 9)
    assert (lists.log_q.exp().sum(dim=3) < 1).all()
    for rank in (0, 5):
        parents = lists.tokens[:, :-1, 0, rank]
        exact = head.conditional_logits(logits[:, 1:], states[:, 1:], parents)[0].log_softmax(dim=-1)
        of_list = lists.following[:, :-1, 0, rank, None, None].expand(-1, -1, 1, 9)
        found, tokens = (part[:, 1:].gather(2, of_list)[:, :, 0] for part in (lists.log_q, lists.tokens))
        torch.testing.assert_close(found, exact.gather(2, tokens), atol=0.05, rtol=0)


@torch.no_grad()
def test_lists_need_no_root_logits() -> None:
    """A tree from pairs costs no logits over the vocabulary given the root; drawn trees need them."""
    head, tree = head_of("vanilla"), DynamicTree(depth=LEVELS, top_k=3, num_nodes=9)
    logits, states, roots, _ = inputs_of(head)
    drafter: Any = object.__new__(BlockDrafter)
    drafter.head, drafter.all_logits, drafter.states = head, logits, states
    drafter._roots, drafter._level, drafter._carried = roots, 0, None
    asked: list[int] = []
    head.markov_head.markov_w2.register_forward_hook(lambda *_: asked.append(1))
    drafter.grow(tree, logits[:, 0], LEVELS)
    assert not asked
    drawn = drafter.grow(tree, logits[:, 0], LEVELS, lambda scores: scores.float())
    assert asked
    expected = head.conditional_logits(logits[:, :1], states[:, :1], roots)[0]
    torch.testing.assert_close(drawn.scores[:, :1], expected)


@torch.no_grad()
def test_more_children_than_candidates() -> None:
    head = head_of("selector")
    with pytest.raises(ValueError, match="10 children.*9 tokens"):
        pairs_of(head, *inputs_of(head), TokenTree([(rank,) for rank in range(10)]))


@torch.no_grad()
def test_many_rows_have_fewer_candidates() -> None:
    """The table of pairs stays small; with few rows small vocabularies are paired whole."""
    head = head_of("vanilla", target=900, draft=700)
    for rows, expected in ((1, 512), (16, 512), (60, 256), (1000, 64)):
        logits, states = torch.randn(rows, LEVELS, 700), torch.randn(rows, LEVELS, SIZE)
        roots = torch.zeros(rows, 1, dtype=torch.long)
        if rows < 1000:
            found = pairs_of(head, logits, states, roots, None, DynamicTree(depth=LEVELS, top_k=2, num_nodes=3))
            assert found.tokens.shape == (rows, LEVELS, expected, 2)
        assert pairs._num_candidates(rows, LEVELS) == expected


def test_heads_whose_whole_path_counts() -> None:
    layers = {"hidden_size": SIZE, "num_attention_heads": 2, "head_dim": 6, "vocab_size": 30, "num_hidden_layers": 1}
    config = BlockConfig(text_config=layers, mask_token_id=1, aux_layer_ids=[1], markov_rank=6, markov_type="rnn")
    assert not BlockHead(config).pairs_tokens
    config = BlockConfig(text_config=layers, mask_token_id=1, aux_layer_ids=[1])
    assert not BlockHead(config).pairs_tokens
