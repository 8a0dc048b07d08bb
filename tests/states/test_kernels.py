"""States by the kernels: here by their plain versions, and once in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.graphs import install_stand_in
from support.hybrids import Oracle, hybrid, padded
from support.interpreted import run_interpreted

import hf_specdec
from hf_specdec.batching.limits import Limits
from hf_specdec.forwards import tree_forward
from hf_specdec.states import KernelForward
from hf_specdec.states.served import obstacle_to_kernels


SERVED = ("qwen3_5_text", "kimi_linear", "lfm2", "bamba", "jamba", "mamba2")


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of every forward by the kernels, whose plain versions run on the CPU."""
    install_stand_in(monkeypatch, with_kernel=True)
    found: list[int] = []
    end = KernelForward.end

    def counted(self: KernelForward) -> None:
        found.append(self.topology.num_queries)
        end(self)

    monkeypatch.setattr(KernelForward, "end", counted)
    return found


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.some_cases(2)
def test_calls(family: str, forwards: list[int]) -> None:
    model, inputs = hybrid(family), padded(3, seed=3)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()
    config = hf_specdec.SpeculativeConfig(tree=Oracle.default_tree, cuda_graphs=False)
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=24,
        assistant_model=Oracle(expected, 3),
        speculative_config=config,
    )
    assert found.tolist() == expected
    assert len(set(forwards)) > 3 and hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("family", ("qwen3_5_text", "jamba"))
@pytest.mark.some_cases(1)
def test_requests_in_flight(family: str, forwards: list[int]) -> None:
    """Slots are given to other requests, and blocks taken away."""
    model = hybrid(family)
    prompts = [torch.randint(3, 60, (length,)).tolist() for length in (5, 30, 1, 12, 2)]
    whole = [model.generate(torch.tensor([one]), do_sample=False, max_new_tokens=16)[0].tolist() for one in prompts]
    for limits in ({"max_requests": 2}, {"num_blocks": 12, "block_size": 4}):
        outputs = model.generate_batch(
            prompts,
            assistant_model=Oracle(whole, 1),
            tree=Oracle.default_tree,
            max_new_tokens=16,
            continuous_batching_config=Limits(**limits),
        )
        assert [output.prompt_ids + output.generated_tokens for output in outputs.values()] == whole
    assert forwards


@pytest.mark.parametrize("family", ("qwen3_5_text", "jamba", "mamba2"))
def test_trees_too_large_for_them(family: str, forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by the kernels and by torch take turns; each finds the states that the other has left."""
    monkeypatch.setattr(tree_forward, "MOST_NODES", 8)
    model, inputs = hybrid(family), padded(2, seed=4)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()
    config = hf_specdec.SpeculativeConfig(tree=Oracle.default_tree, cuda_graphs=False)  # which run forwards more often
    found = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=24,
        assistant_model=Oracle(expected, 1, rests=0.2),
        speculative_config=config,
    )
    assert found.tolist() == expected
    assert 0 < len(forwards) < len(hf_specdec.last_metrics().accepted_per_step[0])


def test_what_they_do_not_compute() -> None:
    assert obstacle_to_kernels(hybrid("qwen3_5_text")) == "has states, for which there are no kernels on cpu"


def test_scans_that_they_do_not_compute(forwards: list[int]) -> None:
    """Zamba scans its heads one by one; nor do kernels take float64."""
    reason = obstacle_to_kernels(hybrid("zamba"))
    assert reason is not None and "at layer 0 that the kernels do not compute" in reason
    assert "do not take torch.float64" in str(obstacle_to_kernels(hybrid("qwen3_5_text"), torch.float64))


IN_TRITON = """
import importlib, sys
from types import SimpleNamespace
sys.path[:0] = sys.argv[1:]
import pytest
import hf_specdec, hf_specdec_kernels
from support.graphs import install_stand_in
from support.hybrids import Oracle, hybrid, padded
from support.models import noisy_copy

used = set()

def counted(name, launch):
    def run(*arguments):
        used.add(name)
        launch(*arguments)
    return run

for package in ("tree_conv", "tree_delta_rule", "tree_ssd"):
    triton = importlib.import_module(f"hf_specdec_kernels.{package}.triton")
    launches = {name.removeprefix("launch_"): one for name, one in vars(triton).items() if name.startswith("launch_")}
    ops = SimpleNamespace(**{name: counted(name, launch) for name, launch in launches.items()})
    sys.modules[f"hf_specdec_kernels.{package}"].ops = ops
for family in ("qwen3_5_text", "mamba2"):
    model, inputs = hybrid(family), padded(2, seed=3)
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options).sequences.tolist()
    config = hf_specdec.SpeculativeConfig(tree=Oracle.default_tree, cuda_graphs=False)
    used.clear()
    with pytest.MonkeyPatch.context() as patch:
        install_stand_in(patch, with_kernel=True)
        drafter = Oracle(expected, 3, rests=0.2)
        found = model.generate(**inputs, **options, assistant_model=drafter, speculative_config=config)
    assert found.sequences.tolist() == expected
    with pytest.MonkeyPatch.context() as patch:
        install_stand_in(patch, with_kernel=True)
        drafter = noisy_copy(model, 0.03)
        config = hf_specdec.SpeculativeConfig(tree="[(0,), (1,), (0, 0), (0, 0, 0)]", cuda_graphs=True)
        found = model.generate(**inputs, **options, assistant_model=drafter, speculative_config=config)
    assert found.sequences.tolist() == expected and hf_specdec.last_metrics().num_accepted_tokens > 0
    print(family, *sorted(used))
"""


@pytest.mark.slow
def test_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    assert run_interpreted(IN_TRITON)[:2] == [
        "qwen3_5_text commit_conv commit_delta_rule tree_conv tree_delta_rule",
        "mamba2 commit_conv commit_ssd tree_conv tree_ssd",
    ]
