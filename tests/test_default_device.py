"""A default device that is not the models': all that the library makes says where it lies."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import limits, ragged_prompts, text_alone
from support.goldens import trained_prompts, trained_target
from support.graphs import install_stand_in
from support.heads import tiny_head, trained_head
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from torch.utils._device import _device_constructors

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, TokenTree
from hf_specdec.training.blocks import BlockObjective
from hf_specdec.training.data import Text
from hf_specdec.training.heads import new_head, new_head_config
from hf_specdec.training.kinds.block import new_block_config, new_block_head
from hf_specdec.training.packing import Collator, Rows, ids_and_masks
from hf_specdec.training.reading import TargetReader, supports_packing
from hf_specdec.training.scripts import ScriptPart
from hf_specdec.training.self_generate import Sampling, Writer
from hf_specdec.training.vocabulary import choose_vocabulary, count_tokens, offsets


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors whose device nobody names hold no values."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


TARGET = tiny_model(dtype=torch.float32)
DRAFTS: dict[str, Any] = {
    "draft": (noisy_copy(TARGET, 0.05), IRREGULAR),
    "head": (tiny_head(TARGET, draft_vocab_size=30), DynamicTree(depth=4, top_k=3, num_nodes=9)),
    "n-grams": (NgramDraft(), TokenTree.chain(4)),
    "auto": (noisy_copy(TARGET, 0.05), "auto"),
}


# Every two of a draft, sampling and captures come together.
CALLS = [
    (draft, captured != bool(place % 2), captured) for place, draft in enumerate(DRAFTS) for captured in (False, True)
]


@pytest.mark.parametrize("draft, sampled, captured", CALLS)
@pytest.mark.some_cases(2)
def test_texts(draft: str, sampled: bool, captured: bool, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if captured:
        pytest.importorskip("triton", reason="the kernels need triton")
        install_stand_in(monkeypatch, with_kernel=True)
    assistant, tree = DRAFTS[draft]
    call = prompts(3, 9, padding=True) | {"do_sample": sampled, "max_new_tokens": 12, "eos_token_id": [7, 60]}
    batch, ends = ragged_prompts((9, 5, 2)), {"max_new_tokens": 10, "eos_token_id": 7}
    expected = TARGET.generate(**call)
    of_batch = [text_alone(TARGET, prompt, **ends) for prompt in batch]
    request.getfixturevalue("elsewhere")
    text = TARGET.generate(**call, assistant_model=assistant, tree=tree)
    assert text.device.type == "cpu" and (sampled or text.tolist() == expected.tolist())
    outputs = TARGET.generate_batch(
        batch, assistant_model=assistant, tree=tree, continuous_batching_config=limits(), do_sample=sampled, **ends
    )
    assert all(output.error is None for output in outputs.values())
    assert sampled or [output.generated_tokens for output in outputs.values()] == of_batch


def test_training_pieces(request: pytest.FixtureRequest) -> None:
    """What is made of texts, what is read off the target, what it writes, and a head to begin with."""
    target, given = copy.deepcopy(trained_target()), trained_prompts()["prompts"][:3]
    head, texts = trained_head(), [Text(list(range(5, 5 + length)), [(1, length)]) for length in (9, 6)]
    request.getfixturevalue("elsewhere")
    jobs = [(index, [ScriptPart(tuple(prompt), "text", frozenset({2}))]) for index, prompt in enumerate(given)]
    for share in (0.0, 1.0):
        assert len(list(Writer(target, 40, 2, sampling=Sampling(greedy_share=share)).write(jobs))) == 3
    rows = Rows(texts, 16, packed=True)
    batch = Collator(0, 16)([rows[0]])
    masked, everywhere = count_tokens(ids_and_masks(texts), target.config.vocab_size)
    chosen = choose_vocabulary(masked, everywhere, 8, always=[2])
    assert supports_packing(target)
    reading = TargetReader(target, [0, 1], chosen, packed=True)(batch["input_ids"], batch["position_ids"])
    made = [reading.features, reading.logits, offsets(chosen), *batch.values()]
    begun = new_head(target, new_head_config(target, draft_vocab_size=8), chosen)
    made += [*begun.parameters(), *begun.buffers(), *head.parameters()]
    config = new_block_config(target, block_size=3, mask_token_id=3, markov_rank=2, draft_vocab_size=8)
    block = new_block_head(target, config, chosen)
    reader = TargetReader(target, block.config.aux_boundaries(8), chosen, packed=True, all_logits=True)
    for trains in (True, False):
        objective = BlockObjective(block).train(trains)
        made += objective(reader(batch["input_ids"], batch["position_ids"]), **batch).values()
    assert {tensor.device.type for tensor in made} == {"cpu"}


CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
SOURCES = sorted(Path(hf_specdec.__file__).parent.rglob("*.py"))


def unnamed_devices(source: str) -> list[str]:
    """Calls of constructors of tensors that name no device; buffers and parameters lie where a module does."""
    tree, buffers = ast.parse(source), set()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        if call.func.attr in ("register_buffer", "Parameter"):
            buffers |= {id(node) for node in ast.walk(call)}
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if id(call) not in buffers
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in CONSTRUCTORS
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def test_constructors_name_a_device() -> None:
    found = {str(path): unnamed_devices(path.read_text()) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert unnamed_devices("torch.zeros(3)\ntorch.zeros(3, device=d)\nx.zeros(3)") == ["line 1: torch.zeros(3)"]
