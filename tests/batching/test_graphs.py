"""
Forwards over requests in flight by graphs, with a stand-in for CUDA's; `test_cuda.py` runs real ones. Texts and counts
are those without.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from support.batches import accepted, limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import StandIn, install_stand_in
from support.heads import trained_head
from support.models import FAMILIES, noisy_copy, tiny_model
from support.parity import IRREGULAR
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, graphs, kernels
from hf_specdec.attention import supports_switching
from hf_specdec.cache import blocks, paged_cache
from hf_specdec.graphs import paged_forward
from hf_specdec.trees import draft_tree


pytestmark = pytest.mark.filterwarnings("error:.*could not be captured")

DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=9)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """With the attention kernel in its plain version, which reads block tables."""
    return install_stand_in(monkeypatch, with_kernel=True)


def both(model: Any, assistant: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """The texts of a batch with graphs, which are those without; and what `of_draft` says of them, too."""
    found = []
    tree, of_draft = options.pop("tree", IRREGULAR), options.pop("of_draft", accepted)
    for cuda_graphs in (False, "auto"):
        config = SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        outputs = model.generate_batch(prompts, assistant_model=assistant, speculative_config=config, **options)
        assert all(output.error is None for output in outputs.values())
        found.append([(output.generated_tokens, of_draft(output)) for output in outputs.values()])
    assert found[0] == found[1]
    return [tokens for tokens, _ in found[1]]


def len_of_text(output: Any) -> int:
    return len(output.generated_tokens)


@pytest.mark.parametrize(
    "tree", [pytest.param(IRREGULAR, id="static"), pytest.param(DYNAMIC, id="dynamic", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(2)
def test_families(family: str, tree: Any, stand_in: StandIn) -> None:
    """Rows come and go, past sliding windows; the same graphs serve batches of several sizes."""
    model = tiny_model(family, dtype=torch.float32)
    if not supports_switching(model):
        pytest.skip("does not attend through transformers' interface, and so runs without graphs")
    config = limits()
    prompts = ragged_prompts((9, 1, 30, 17))
    texts = both(model, noisy_copy(model), prompts, tree=tree, max_new_tokens=13, continuous_batching_config=config)
    assert texts == [text_alone(model, prompt, max_new_tokens=13) for prompt in prompts]
    assert stand_in.replays > 10 and 0 < stand_in.captures < 40 and stand_in.attended > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "ngram", "draft"])
def test_drafters(kind: str, stand_in: StandIn) -> None:
    target = trained_target()
    assistant = {"head": trained_head, "ngram": NgramDraft, "draft": lambda: noisy_copy(target, 0.02)}[kind]()
    for num_blocks in (200, 30):  # with too few, requests lose theirs, and are read again
        both(
            target,
            assistant,
            trained_prompts()["prompts"][:5],
            max_new_tokens=16,
            continuous_batching_config=limits(num_blocks),
            # Without room for its tree a row falls behind, and a head catches up in a step without one.
            of_draft=accepted if num_blocks > 30 else len_of_text,
        )
    assert stand_in.replays > 20


@pytest.mark.slow
def test_rows_of_others_are_left_alone(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows that are nobody's wrote to a block of somebody's, texts would change: the tests would see it."""
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 7, 8, 9))
    draft = noisy_copy(target)
    both(target, draft, prompts, max_new_tokens=24, continuous_batching_config=limits())
    for module in (paged_forward, paged_cache):
        monkeypatch.setattr(module, "WASTE_BLOCK", blocks.NUM_RESERVED + 2)
    with pytest.raises(AssertionError):
        both(target, draft, prompts, max_new_tokens=24, continuous_batching_config=limits())


def test_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch, with_kernel=True)

    def fails(run: Any, device: torch.device, pool: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setitem(graphs.RECORDERS, "cpu", fails)
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 9))
    with pytest.warns(UserWarning, match="LlamaForCausalLM could not be captured in a CUDA graph, and runs without"):
        both(target, NgramDraft(), prompts, max_new_tokens=24, continuous_batching_config=limits())


class NotesOperators(TorchDispatchMode):
    """Notes which of our operators run: on CUDA each would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hf_specdec_kernels":
            self.ran.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.some_cases(1)
def test_without_kernels(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device without Triton: no graphs, and no operator runs, which would launch a kernel."""
    found = install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels.kernels_are_installed.cache_clear()
    draft_tree._of_tree.cache_clear()  # of other tests
    try:
        target = tiny_model(dtype=torch.float32)
        with NotesOperators() as operators:
            both(
                target,
                noisy_copy(target, 0.05),
                ragged_prompts((9, 1, 30, 17)),
                max_new_tokens=12,
                continuous_batching_config=limits(),
                tree=tree,
            )
    finally:
        kernels.kernels_are_installed.cache_clear()
    assert found.captures == 0 and not operators.ran


def test_weights_that_moved_are_captured_anew(stand_in: StandIn) -> None:
    """A manager that is stopped and started again."""
    target, prompt = tiny_model(dtype=torch.float32), ragged_prompts((9,))[0]
    manager = target.init_continuous_batching(assistant_model=NgramDraft(), continuous_batching_config=limits())
    for _ in range(2):
        with manager:
            name = manager.add_request(prompt, max_new_tokens=24)
            assert manager.get_result(name, timeout=60).generated_tokens == text_alone(
                target, prompt, max_new_tokens=24
            )
        other = tiny_model(seed=5, dtype=torch.float32)
        for parameter, source in zip(target.parameters(), other.parameters(), strict=True):
            parameter.data = source.data.clone()


def test_hooks_of_a_user_between_two_sessions(stand_in: StandIn) -> None:
    """A replay would pass them by: they see every forward, and when they are gone there are graphs again."""
    target, prompt = tiny_model(dtype=torch.float32), ragged_prompts((9,))[0]
    config = SpeculativeConfig(disable_by_batch_size=0)
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft(), speculative_config=config, continuous_batching_config=limits()
    )

    def replays() -> int:
        before = stand_in.replays
        with manager:
            manager.get_result(manager.add_request(prompt, max_new_tokens=24), timeout=60)
        return stand_in.replays - before

    seen: list[int] = []
    assert replays() > 15
    handle = target.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert replays() == 0 and len(seen) == 24
    handle.remove()
    assert replays() > 15


def test_demanding_graphs_where_there_are_none() -> None:
    target = tiny_model()
    config = SpeculativeConfig(cuda_graphs=True)
    with pytest.raises(ValueError, match="`cuda_graphs=True`: LlamaForCausalLM runs on cpu"):
        target.init_continuous_batching(assistant_model=NgramDraft(), speculative_config=config)


def test_graphs_are_used_without_drafts_too(stand_in: StandIn) -> None:
    """A step while speculation is off is one replay."""
    target, prompts = tiny_model(dtype=torch.float32), ragged_prompts((5, 6, 7))
    config = SpeculativeConfig(tree=IRREGULAR, disable_by_batch_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = target.generate_batch(
            prompts,
            assistant_model=NgramDraft(),
            speculative_config=config,
            max_new_tokens=30,
            continuous_batching_config=limits(),
        )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(target, prompt, max_new_tokens=30)
    assert stand_in.replays > 15 and stand_in.captures <= 6
