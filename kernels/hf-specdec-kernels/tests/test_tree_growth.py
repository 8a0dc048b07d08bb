"""Growth of trees in Triton against plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_specdec_kernels import ChosenNodes, best_paths, choose_nodes, tree_ancestors
from hf_specdec_kernels.tree_growth.triton import launch_best_paths, launch_choose_nodes, launch_tree_ancestors


def arguments(batch: int, levels: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 1000, (batch, levels, ranks))
    log_q = (3 * torch.randn(batch, levels, 2 * ranks)).log_softmax(dim=-1).sort(descending=True).values[..., :ranks]
    return tokens.to(device), log_q.contiguous().to(device)


def by_kernel(
    tokens: torch.Tensor, log_q: torch.Tensor, num_nodes: int, following: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    nodes = torch.full((len(tokens), num_nodes), 77, device=tokens.device)
    parents = torch.full((len(tokens), num_nodes + 1), 77, device=tokens.device)
    launch_best_paths(tokens, log_q, num_nodes, following, nodes, parents)
    return nodes.cpu(), parents.cpu()


@pytest.mark.parametrize(
    "sizes, num_nodes", [((3, 5, 4), 15), ((1, 1, 6), 6), ((2, 7, 1), 7), ((2, 15, 16), 63), ((1, 1, 1), 1)]
)
def test_against_naive(sizes: tuple[int, int, int], num_nodes: int, device: torch.device) -> None:
    tokens, log_q = arguments(*sizes, device)
    expected = best_paths(tokens.cpu(), log_q.cpu(), num_nodes)
    for found, wanted in zip(by_kernel(tokens, log_q, num_nodes), expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_paths_are_the_best_of_all(device: torch.device) -> None:
    tokens, log_q = arguments(1, 4, 3, device)
    log_q[0, 2] = log_q[0, 1]  # equals too
    nodes, parents = by_kernel(tokens, log_q, 12)
    paths, sums = [()], []
    for token, parent in zip(nodes[0].tolist(), parents[0, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
        sums.append(sum(float(log_q[0, at][tokens[0, at] == one][0]) for at, one in enumerate(paths[-1])))
    everything = [
        sum(float(log_q[0, at, rank]) for at, rank in enumerate(path))
        for depth in range(1, 5)
        for path in itertools.product(range(3), repeat=depth)
    ]
    torch.testing.assert_close(torch.tensor(sums), torch.tensor(sorted(everything, reverse=True)[:12]))
    assert len(set(paths)) == 13


def lists_of(
    batch: int, levels: int, lists: int, ranks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, log-probabilities and the lists of the children, which differ from the ranks and the tokens."""
    tokens, log_q = arguments(batch * lists, levels, ranks, device)
    tokens, log_q = (part.view(batch, lists, levels, ranks).transpose(1, 2).contiguous() for part in (tokens, log_q))
    return tokens, log_q, torch.randint(0, lists, tokens.shape).to(device)


@pytest.mark.parametrize("sizes, num_nodes", [((2, 4, 3, 2), 9), ((3, 1, 2, 4), 4), ((2, 9, 33, 5), 40)])
def test_lists_against_naive(sizes: tuple[int, int, int, int], num_nodes: int, device: torch.device) -> None:
    tokens, log_q, following = lists_of(*sizes, device)
    expected = best_paths(tokens.cpu(), log_q.cpu(), num_nodes, following.cpu())
    for found, wanted in zip(by_kernel(tokens, log_q, num_nodes, following), expected, strict=True):
        assert torch.equal(found, wanted)


def test_paths_through_lists_are_the_best_of_all(device: torch.device) -> None:
    """Found among all paths, each of whose tokens names the list that the next one is of."""
    tokens, log_q, following = lists_of(1, 4, 5, 3, device)
    tokens = torch.arange(tokens.numel(), device=device).view(tokens.shape)  # each entry by a name of its own
    nodes, parents = by_kernel(tokens, log_q, 12, following)
    paths = [()]
    for token, parent in zip(nodes[0].tolist(), parents[0, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    everything = {}
    for depth in range(1, 5):
        for ranks in itertools.product(range(3), repeat=depth):
            of_list, path, total = 0, [], 0.0
            for level, rank in enumerate(ranks):
                entry = 0, level, of_list, rank
                path, total = [*path, int(tokens[entry])], total + float(log_q[entry])
                of_list = int(following[entry])
            everything[tuple(path)] = total
    best = sorted(everything, key=lambda path: everything[path], reverse=True)[:12]
    assert set(paths[1:]) == set(best)


def test_without_numbers_and_with_too_few_paths(device: torch.device) -> None:
    """A parent comes before its children whatever the scores are."""
    tokens, log_q = arguments(4, 2, 2, device)
    log_q[0], log_q[1, 0], log_q[2, :, 1] = torch.nan, torch.nan, -torch.inf
    nodes, parents = by_kernel(tokens, log_q, 9)
    assert ((parents[:, 1:] < torch.arange(1, 10)) & (parents[:, 1:] >= 0)).all()
    assert torch.isin(nodes, tokens.cpu()).all()
    for found, wanted in zip((nodes, parents), best_paths(tokens.cpu(), log_q.cpu(), 9), strict=True):
        assert torch.equal(found[3, :6], wanted[3, :6])


@pytest.mark.parametrize("above, ranks, nodes, count", [(1, 1, 1, 1), (3, 4, 6, 3), (5, 7, 20, 35), (16, 16, 224, 16)])
def test_chosen_nodes(above: int, ranks: int, nodes: int, count: int, device: torch.device) -> None:
    """Equals keep their order; NaN comes last, and so does what is impossible."""
    tokens, log_q = arguments(3, above, ranks, device)
    path, ancestors = -torch.rand(3, above, device=device), torch.rand(3, above, nodes, device=device) < 0.4
    log_q[1], path[1], log_q[2, 0, 0] = -1.0, -2.0, torch.nan
    expected = choose_nodes(tokens.cpu(), log_q.cpu(), path.cpu(), ancestors.cpu(), count)
    found = ChosenNodes(*(torch.empty_like(tensor, device=device) for tensor in expected))
    launch_choose_nodes(tokens, log_q, path, ancestors, count, *found)
    for name, ours, theirs in zip(ChosenNodes._fields, found, expected, strict=True):
        assert torch.allclose(ours.cpu().double(), theirs.double(), rtol=0, atol=0, equal_nan=True), name


@pytest.mark.parametrize("nodes", [1, 2, 64, 100])
def test_ancestors(nodes: int, device: torch.device) -> None:
    parents = (torch.rand(3, nodes) * torch.arange(nodes)).long()
    expected = tree_ancestors(parents, nodes)
    depths = torch.full_like(parents, 77).to(device)
    ancestors = torch.ones(3, nodes, nodes, dtype=torch.bool, device=device)
    launch_tree_ancestors(parents.to(device), nodes, depths, ancestors)
    assert torch.equal(depths.cpu(), expected[0]) and torch.equal(ancestors.cpu(), expected[1])
    assert int(expected[0].max()) < nodes and expected[1].diagonal(dim1=1, dim2=2).all()
