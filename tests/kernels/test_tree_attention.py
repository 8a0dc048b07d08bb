"""The kernels' tree attention inside `generate`, in place of the plain one: texts stay those of plain `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import StandIn, install_stand_in
from support.interpreted import run_interpreted
from support.models import LATENT, UNEQUAL, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.generation.static_batch import StaticBatch


TREES = (IRREGULAR, hf_specdec.DynamicTree(depth=3, top_k=3, num_nodes=9))

# So low a cap that it matters to a random model.
_LOW_CAP: dict[str, Any] = {"attn_logit_softcapping": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "gemma2": ("gemma2", _LOW_CAP | {"attn_implementation": "eager"}),
    # Before 5.23 this is sdpa, which leaves the cap out, else eager.
    "gemma2, its default": ("gemma2", _LOW_CAP),
    "gemma3_text": ("gemma3_text", {}),
    "mistral": ("mistral", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": LATENT["deepseek_v3"],
    "gemma4, large heads": (UNEQUAL["gemma4"][0], UNEQUAL["gemma4"][1] | {"global_head_dim": 520}),
} | UNEQUAL


# Seeds whose texts vary.
SEEDS = {"llama": 1, "gemma2": 3, "gemma3_text": 3, "mistral": 1, "gpt_oss": 1, "deepseek_v3": 2}


def model_of(name: str) -> PreTrainedModel:
    family, values = MODELS[name]
    return tiny_model(family, SEEDS.get(family, 0), dtype=torch.float32, attention_sharpness=3.0, **values)


def assert_same_text_by_graphs(
    target: PreTrainedModel, inputs: dict[str, Any], tree: Any, expected: torch.Tensor
) -> None:
    """Greedy text with a draft model and graphs beside that of plain `generate`."""
    config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=True)
    options = {"tree": None, "speculative_config": config, "max_length": expected.shape[1]}
    assert_same_text(target, inputs, noisy_copy(target, noise=0.05), expected=expected, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The kernel's plain version, in forwards that are replayed."""
    monkeypatch.setattr(StaticBatch, "obstacle", lambda call: "not here")  # has tests of its own
    return install_stand_in(monkeypatch, with_kernel=True)


@pytest.mark.parametrize("batch_size, tree", [(1, TREES[0]), (3, TREES[1])], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some_cases(3)
def test_texts_are_those_of_plain_generate(name: str, batch_size: int, tree: Any, stand_in: StandIn) -> None:
    """Past windows of 12 tokens."""
    target, inputs = model_of(name), prompts(batch_size, 9, padding=batch_size > 1)
    assert_same_text_by_graphs(target, inputs, tree, plain_text(target, inputs, max_new_tokens=18))
    assert stand_in.attended > 10 and stand_in.replays > 2


@pytest.mark.parametrize("mistake", ["window", "first_slots", "softcap", "sinks"])
@pytest.mark.some_cases(1)
def test_options_matter(mistake: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option the texts differ: the models above do need it."""
    target = model_of({"window": "mistral", "first_slots": "llama", "softcap": "gemma2", "sinks": "gpt_oss"}[mistake])
    package = sys.modules["hf_specdec_kernels.tree_attention"]
    right = package.unchecked
    monkeypatch.setattr(package, "unchecked", lambda *args, **kwargs: right(*args, **{**kwargs, mistake: None}))
    inputs = prompts(3, 20, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=30)
    with pytest.raises(AssertionError):
        assert_same_text_by_graphs(target, inputs, IRREGULAR, expected)
    assert stand_in.attended > 0


def test_attention_weights(stand_in: StandIn) -> None:
    """The kernel writes none: a call that asks for them attends as the model does."""
    target = model_of("gpt_oss")
    options = {"max_new_tokens": 8, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    inputs, draft = prompts(1, 9), noisy_copy(target, noise=0.05)
    plain = target.generate(**inputs, **options)
    config = hf_specdec.SpeculativeConfig(tree=IRREGULAR)
    output = target.generate(**inputs, **options, assistant_model=draft, speculative_config=config)
    assert len(output.attentions) == len(plain.attentions)
    for of_token, expected in zip(output.attentions[1:], plain.attentions[1:], strict=True):
        torch.testing.assert_close(of_token[-1], expected[-1])


IN_TRITON = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
from hf_specdec_kernels.tree_attention import triton
operator = sys.modules["hf_specdec_kernels.tree_attention"].operator
from test_tree_attention import assert_same_text_by_graphs, install_stand_in, model_of, pytest
from support.models import prompts

def in_triton(*arguments):
    triton.launch_tree_attention(*arguments)
    sinks, _, _, softcap = arguments[-6:-2]
    used.append((sinks is not None, softcap))

operator.register_kernel("cpu", in_triton)
for name in ("gpt_oss", "gemma2", "mimo_v2_flash"):
    used = []
    target = model_of(name)
    with pytest.MonkeyPatch.context() as patch:
        install_stand_in(patch, with_kernel=True, dispatches=True)
        expected = target.generate(**prompts(1, 9), max_new_tokens=8, do_sample=False)
        assert_same_text_by_graphs(target, prompts(1, 9), "[(0,), (1,), (0, 0)]", expected)
    print(name, sorted(set(used), key=str))
"""


@pytest.mark.slow
def test_in_tritons_interpreter() -> None:
    """Sinks and soft caps reach the kernel itself."""
    pytest.importorskip("triton", reason="the kernels need triton")
    assert run_interpreted(IN_TRITON, Path(__file__).parent)[:3] == [
        "gpt_oss [(True, None)]",
        "gemma2 [(False, 0.3)]",
        "mimo_v2_flash [(False, None), (True, None)]",
    ]
