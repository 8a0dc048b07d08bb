"""
Walks in Triton against plain PyTorch. Both use the same random numbers and must agree in every row: float32 and
float64 differ only where a number is within 1e-6 of a boundary, which no seed here meets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from selection import fast
from walk_cases import Case, draft_arguments, filter_arguments, tree_arguments, uniforms

from hf_specdec_kernels import Walks, rejection_walk
from hf_specdec_kernels.rejection_sampling import triton as launching
from hf_specdec_kernels.rejection_sampling.naive import (
    chosen_walk_naive,
    greedy_walk_naive,
    rejection_walk_naive,
    target_walk_naive,
)
from hf_specdec_kernels.rejection_sampling.triton import launch_chosen_walk, launch_rejection_walk, launch_target_walk
from hf_specdec_kernels.rejection_sampling.triton_walks import SIZES_OF_TREES, rejection_walk_kernel


CASES = {
    "usual": Case(),
    "root alone": Case(nodes=1),
    "one shared tree": Case(own_trees=False),
    "two tokens": Case(vocab=2),
    "several blocks": Case(vocab=150, batch=4, sharpness=4.0),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "void nodes": Case(void=True),
    "end tokens": Case(ends=True),
    "resting rows": Case(resting=True),
    "not all the way down": Case(max_depth=1),
    "ties": Case(ties=True),
}
FILTERED = {
    "temperature": Case(temperature=True),
    "top-k": Case(top_k=True, batch=8),
    "top-p": Case(top_p=True, batch=8),
    "all filters": Case(temperature=True, top_k=True, top_p=True, batch=8),
    "all filters, bfloat16": Case(temperature=True, top_k=True, top_p=True, dtype=torch.bfloat16, batch=8),
    "all filters, ties": Case(temperature=True, top_k=True, top_p=True, ties=True, vocab=40, batch=4),
    "all filters, several blocks": Case(top_k=True, top_p=True, ties=True, vocab=150, batch=3, nodes=5),
}
DRAFTED = {
    "close": Case(distance=0.1),
    "far": Case(distance=3.0),
    "identical": Case(distance=0.0),
    "small draft vocabulary": Case(draft_vocab=6),
    "small support": Case(support=2),
    "one token": Case(support=1),
    "wide": Case(nodes=20, vocab=6),
    "distributions in another order": Case(indexed=True),
    "everything": Case(
        batch=10,
        draft_vocab=7,
        void=True,
        temperature=True,
        top_k=True,
        top_p=True,
        ends=True,
        resting=True,
        indexed=True,
    ),
}


def room(case: Case, arguments: dict, device: torch.device) -> Walks:
    shapes = ((case.batch, arguments["max_depth"] + 1), (case.batch,), (case.batch,))
    return Walks(*(torch.full(shape, -7, dtype=torch.int64, device=device) for shape in shapes))


def arguments_of(case: Case, device: torch.device) -> dict:
    """The arguments of `rejection_walk_naive`, at random."""
    tree = tree_arguments(case, device)
    drafted = draft_arguments(case, device, tree)
    return drafted | tree | filter_arguments(case, device) | {"uniforms": uniforms(case, device)}


def compare(launch: Callable, naive: Callable, case: Case, arguments: dict, device: torch.device) -> Walks:
    """The walks of a launch, which are those of plain PyTorch."""
    found = room(case, arguments, device)
    absent = dict.fromkeys(inspect.signature(launch).parameters.keys() - arguments.keys())
    launch(**absent | arguments | found._asdict())
    assert_same(found, naive(**arguments))
    return found


def assert_same(found: Walks, expected: Walks) -> None:
    for name, one, other in zip(Walks._fields, found, expected, strict=True):
        assert torch.equal(one, other), (name, one, other)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Sets a block size that needs several blocks per row, and switches the preparing kernel off."""
    monkeypatch.setattr("hf_specdec_kernels.rejection_sampling.triton.LARGEST_BLOCK", 64)
    monkeypatch.setattr("hf_specdec_kernels.rejection_sampling.triton.PREPARED_NODES", 0)


GREEDY = CASES | {"ties in several blocks": Case(ties=True, vocab=200, batch=4, sharpness=0.7)}


@pytest.mark.parametrize("name", fast(GREEDY, ("usual", "end tokens", "ties in several blocks")))
def test_greedy(name: str, device: torch.device) -> None:
    case = GREEDY[name]
    found = compare(launch_target_walk, greedy_walk_naive, case, tree_arguments(case, device), device)
    assert case.nodes == 1 or (found.accepted > 0).any()


CHOSEN = ("usual", "root alone", "one shared tree", "void nodes", "end tokens", "resting rows", "not all the way down")


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(name: str, device: torch.device) -> None:
    case = CASES[name]
    arguments = tree_arguments(case, device)
    chosen = arguments.pop("logits").argmax(-1)
    found = compare(launch_chosen_walk, chosen_walk_naive, case, {"chosen": chosen} | arguments, device)
    assert case.nodes == 1 or (found.accepted > 0).any()


@pytest.mark.parametrize("name", fast(CASES | FILTERED, ("usual", "end tokens", "all filters, several blocks")))
def test_target(name: str, device: torch.device) -> None:
    case = (CASES | FILTERED)[name]
    arguments = tree_arguments(case, device) | filter_arguments(case, device)
    arguments["uniforms"] = uniforms(case, device)
    found = compare(launch_target_walk, target_walk_naive, case, arguments, device)
    assert case.nodes == 1 or (found.accepted > 0).any()


REJECTED = CASES | DRAFTED | {name: FILTERED[name] for name in ("temperature", "all filters, ties")}
FAST = ("usual", "several blocks", "bfloat16", "small support", "all filters, ties", "everything")


@pytest.mark.parametrize("name", fast(REJECTED, FAST))
def test_rejection(name: str, device: torch.device) -> None:
    case = REJECTED[name]
    found = compare(launch_rejection_walk, rejection_walk_naive, case, arguments_of(case, device), device)
    assert case.nodes == 1 or (found.accepted > 0).any()


PREPARED = {
    "root alone": Case(nodes=1),
    "resting rows, void nodes": Case(batch=4, resting=True, void=True),
    "all filters, bfloat16": replace(FILTERED["all filters, bfloat16"], batch=4, nodes=6),
    "everything": replace(DRAFTED["everything"], batch=3, nodes=5),
}


@pytest.mark.parametrize("name", fast(PREPARED, ("everything",)))
def test_sums_of_all_nodes_beforehand(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec_kernels.rejection_sampling.triton.PREPARED_NODES", 100)
    case = PREPARED[name]
    arguments = arguments_of(case, device)
    compare(launch_rejection_walk, rejection_walk_naive, case, arguments, device)
    of_target = {name: value for name, value in arguments.items() if not name.startswith("draft_")}
    compare(launch_target_walk, target_walk_naive, case, of_target, device)


FEW = Case(batch=3, nodes=4, vocab=12, dtype=torch.bfloat16, top_k=True, distance=2.0, max_depth=2)
FEW_KEPT = {"own vocabulary": FEW, "draft vocabulary, tempered": replace(FEW, draft_vocab=7, temperature=True)}


@pytest.mark.parametrize("kept", fast([2, 4, 16], [4]))
@pytest.mark.parametrize("name", fast(FEW_KEPT, ["draft vocabulary, tempered"]))
def test_few_kept_tokens(name: str, kept: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which filters keep no more than `kept` tokens walk in registers, others do not."""
    for constant, value in {"PREPARED_NODES": 100, "BINS": 256, "KEPT": kept}.items():
        monkeypatch.setattr(launching, constant, value)
    case = FEW_KEPT[name]
    arguments = arguments_of(case, device)
    found = compare(launch_rejection_walk, rejection_walk_naive, case, arguments, device)
    assert len(set(found.accepted.tolist())) > 1
    of_target = {name: value for name, value in arguments.items() if not name.startswith("draft_")}
    compare(launch_target_walk, target_walk_naive, case, of_target, device)


def test_a_draft_that_float32_cannot_hold(device: torch.device) -> None:
    """q is 1, e^-800, e^-801: once the first child is refused, the second must pass with 0.5 / 0.73, not always."""
    ratio = 0.5 * (1 + torch.tensor(-1.0).exp().item())
    second = torch.tensor([ratio - 1e-3, ratio + 1e-3], dtype=torch.float64)
    arguments = {
        "logits": torch.tensor([-torch.inf, 0.0, 0.0], device=device).expand(2, 3, -1).contiguous(),
        "draft_logits": torch.tensor([0.0, -800.0, -801.0], device=device).expand(2, 3, -1).contiguous(),
        "tokens": torch.tensor([[-1, 0, 1]], device=device).repeat(2, 1),
        "parents": torch.zeros(1, 3, dtype=torch.long, device=device),
        "uniforms": torch.stack([torch.full((2,), 0.5), torch.full((2,), 0.5), second], dim=1).double().to(device),
        "max_depth": 1,
    }
    found = compare(launch_rejection_walk, rejection_walk_naive, Case(batch=2), arguments, device)
    assert found.accepted.tolist() == [1, 0]


@pytest.mark.parametrize("children", [1, 2])
def test_a_refusal_that_leaves_nothing(children: int, device: torch.device) -> None:
    """
    With p equal to q and the number 1, which refuses, the residual is empty and p is kept. (Both are 1/64 everywhere:
    other values may be rounded in different ways on a GPU, where p and q are computed in passes of their own.)
    """
    logits = torch.full((9, children + 1, 64), 1.5, device=device)
    arguments = {
        "logits": logits,
        "draft_logits": logits.clone(),
        "tokens": torch.tensor([[-1, 4, 60][: children + 1]], device=device).repeat(9, 1),
        "parents": torch.zeros(1, children + 1, dtype=torch.long, device=device),
        "uniforms": torch.ones(9, children + 1, dtype=torch.float64, device=device),
        "max_depth": 1,
    }
    arguments["uniforms"][:, 0] = torch.linspace(0.05, 0.95, 9)
    found = compare(launch_rejection_walk, rejection_walk_naive, Case(batch=9), arguments, device)
    assert len(set(found.next_tokens.tolist())) > 3 if children == 1 else set(found.next_tokens.tolist()) == {4}


@pytest.mark.slow
@pytest.mark.parametrize("walk", ["rejection", pytest.param("target", marks=pytest.mark.gpu)])
def test_output_is_distributed_as_p(walk: str, device: torch.device) -> None:
    """
    Chi-square test of the first token of many rows with three children each. It finds a bias of total variation 0.2 in
    400 samples (the interpreter is slow), and a bias of 0.02 in 40,000.
    """
    samples, vocab, count = 40_000 if device.type == "cuda" else 400, 16, 3
    p, q = torch.tensor([[1.5], [2.5]]) * torch.randn(2, vocab, generator=torch.Generator().manual_seed(3))
    noise = torch.empty(samples, vocab).exponential_().log()
    drawn = (q - noise).topk(count, dim=-1).indices
    arguments = {
        "logits": p.expand(samples, count + 1, -1).contiguous(),
        "tokens": torch.nn.functional.pad(drawn, (1, 0), value=-1),
        "parents": torch.zeros(1, count + 1, dtype=torch.long),
        "uniforms": torch.rand(samples, count + 1, dtype=torch.float64),
    }
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()} | {"max_depth": 1}
    found = room(Case(batch=samples), arguments, device)
    filters = dict.fromkeys(("temperature", "top_k", "top_p", "end_tokens", "active"))
    if walk == "target":
        launch_target_walk(**arguments, **filters, **found._asdict())
    else:
        draft = dict.fromkeys(("draft_index", "draft_columns", "draft_temperature"))
        draft["draft_logits"] = q.expand(samples, 1, -1).contiguous().to(device)
        launch_rejection_walk(**arguments, **draft, **filters, **found._asdict())
    first = arguments["tokens"].gather(1, found.path[:, 1:])[:, 0]
    tokens = torch.where(found.accepted > 0, first, found.next_tokens).cpu()
    assert (found.accepted > 0).any() and (found.accepted == 0).any()
    expected = samples * p.double().softmax(-1).numpy()
    observed = torch.bincount(tokens, minlength=vocab).numpy()
    rare = expected < 5
    cells = np.stack([np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)])
    assert scipy.stats.chisquare(*cells[:, cells[1] > 0]).pvalue > 1e-4


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["usual", "all filters", "small draft vocabulary", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [16, 8])
def test_large_vocabularies(
    name: str, dtype: torch.dtype, batch: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    case = replace(
        (CASES | FILTERED | DRAFTED)[name], dtype=dtype, batch=batch, nodes=17, vocab=128_256, sharpness=3.0
    )
    case = replace(case, draft_vocab=32_000 if case.draft_vocab else None)
    arguments = arguments_of(case, device)
    found = room(case, arguments, device)
    launch_rejection_walk(**arguments, **found._asdict())
    expected = rejection_walk_naive(**arguments)
    # Rounding of float32 sums over a large vocabulary may change one draw in ten thousand.
    agree = (found.path == expected.path).all(dim=1) & (found.next_tokens == expected.next_tokens)
    assert agree.sum() >= case.batch - 1


@pytest.mark.gpu
def test_replay_of_a_graph_with_other_numbers(device: torch.device) -> None:
    case = Case(batch=32, temperature=True, top_k=True, top_p=True)
    arguments = arguments_of(case, device)
    found = rejection_walk(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rejection_walk(**arguments, out=found)
    for _ in range(3):
        arguments["uniforms"].copy_(uniforms(case, device))
        graph.replay()
        assert_same(found, rejection_walk_naive(**arguments))


def test_trees_of_all_usual_sizes_share_kernels() -> None:
    """
    Constants are equal for trees of usual sizes, and arguments that differ are not specialised, because compiling a
    kernel takes seconds.
    """
    compiled = set()
    for num_nodes, depth in ((1, 0), (2, 1), (9, 4), (17, 15), (64, 8)):
        tokens, one = torch.zeros(300, num_nodes, dtype=torch.long), torch.ones(300)
        logits = torch.empty(300, num_nodes, 1000, device="meta")
        told = launching._target(logits, tokens, tokens[:1], one, one.int(), one, one.bool())
        told |= launching._walk(tokens.double(), depth, None)
        differs = {name: value for name, value in told.items() if isinstance(value, int) and not name.isupper()}
        fixed = {name: differs.pop(name) for name in ("num_warps", "vocab", "logits_stride_b", "logits_stride_n")}
        assert set(differs) <= set(SIZES_OF_TREES) <= set(rejection_walk_kernel.arg_names)
        compiled.add(tuple((name, value) for name, value in told.items() if name.isupper()) + (fixed["num_warps"],))
    assert len(compiled) == 1
