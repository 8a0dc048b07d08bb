"""
Forwards replayed from graphs, with a stand-in for CUDA's: it runs the captured function again, on the graph's own
tensors, and writes into the tensors that the capture gave. What it shows is that nothing else is read from step to
step; `test_cuda.py` runs real ones.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.caches import assert_same_states
from support.goldens import trained_prompts, trained_target
from support.graphs import BY_ATTENTION, TREE, StandIn, graphed
from support.heads import trained_head
from support.hybrids import draft_of, hybrid
from support.models import FAMILIES, noisy_copy, prompts, tiny_model

import hf_specdec
from hf_specdec import graphs
from hf_specdec.attention import supports_switching
from hf_specdec.attention.kernel import first_slots_of
from hf_specdec.forwards.features import watch_features


DYNAMIC = hf_specdec.DynamicTree(depth=3, top_k=3, num_nodes=9)


CALLS = {"one row, static": (1, TREE), "three rows, dynamic": (3, DYNAMIC)}


@pytest.mark.parametrize(
    "family, batch_size, tree, stand_in",
    [
        # By the kernel, each family with one of the calls, and with masks with the other.
        pytest.param(family, *call, with_kernel, id=f"{family}-{name}, {'kernel' if with_kernel else 'masks'}")
        for place, family in enumerate(FAMILIES)
        for number, (name, call) in enumerate(CALLS.items())
        for with_kernel in [(place + number) % 2 == 1]
    ],
    indirect=["stand_in"],
)
@pytest.mark.some_cases(4)
def test_greedy_calls_of_a_draft_model(family: str, tree: Any, batch_size: int, stand_in: StandIn) -> None:
    """The same graphs serve prompts of other lengths, with other padding, past sliding windows."""
    target = tiny_model(family)
    if not supports_switching(target):
        pytest.skip("does not attend through the interface")
    draft = noisy_copy(target, 0.05)
    for length, seed in ((6, 1), (13, 2)):
        inputs = prompts(batch_size, length, padding=seed != 1, seed=seed)
        plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
        output = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=draft, **graphed(tree))
        assert torch.equal(output, plain)
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert stand_in.replays > 10 and stand_in.captures < 30
    assert (stand_in.attended > 0) is stand_in.has_kernel


@pytest.mark.parametrize("stand_in", [True], ids=["kernel"], indirect=True)
@pytest.mark.parametrize("batch_size, tree", [(1, TREE), (3, DYNAMIC)], ids=["one row, static", "three rows, dynamic"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "falcon_h1", "mamba2"])
@pytest.mark.some_cases(1)
def test_layers_with_states(family: str, batch_size: int, tree: Any, stand_in: StandIn) -> None:
    """A later call, whose layers have not run before its forward is replayed, returns the states of its own text."""
    target = hybrid(family)
    for length in (6, 13):
        inputs = prompts(batch_size, length, padding=batch_size > 1)
        call = inputs | {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
        plain = target.generate(**call)
        draft = draft_of(plain.sequences.tolist())
        found = target.generate(**call, assistant_model=draft, **graphed(tree))
        assert torch.equal(found.sequences, plain.sequences)
        assert_same_states(found.past_key_values, plain.past_key_values, atol=1e-3)
        assert hf_specdec.last_metrics().mean_acceptance_length > 1.5
    assert stand_in.captures > 2 and stand_in.replays > 10


@BY_ATTENTION
@pytest.mark.parametrize("batch_size, tree", [(1, TREE), (2, DYNAMIC)], ids=["one row, static", "two rows, dynamic"])
@pytest.mark.some_cases(2)
def test_heads(tree: Any, batch_size: int, stand_in: StandIn) -> None:
    """Features come from graphs as they come from hooks: the same drafts are accepted."""
    target, head = trained_target(), trained_head()
    prompt = torch.tensor([ids[:8] for ids in trained_prompts()["prompts"][:batch_size]])
    found = []
    for cuda_graphs in (False, True, True):
        config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        output = target.generate(
            prompt, max_new_tokens=18, do_sample=False, assistant_model=head, speculative_config=config
        )
        found.append((output.tolist(), hf_specdec.last_metrics().accepted_per_step))
    assert found[0] == found[1] == found[2] and stand_in.replays > 10
    assert hf_specdec.last_metrics().mean_acceptance_length > 1.5


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.some_cases(1)
def test_the_same_prompt_again_and_again(kind: str, stand_in: StandIn) -> None:
    """A forward that is replayed before any that is not finds its memory taken, and nobody takes it afterwards."""
    target, assistant = trained_target(), trained_head()
    prompt = torch.tensor([trained_prompts()["prompts"][0][:8]])
    if kind == "model":
        target, prompt = tiny_model(dtype=torch.float32), prompts(1, 8)["input_ids"]
        assistant = noisy_copy(target, 0.02)
    found = []
    for number, tree in enumerate((TREE, TREE, TREE, DYNAMIC, TREE)):
        for cuda_graphs in (False, True):
            config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
            output = target.generate(
                prompt, max_new_tokens=20, do_sample=False, assistant_model=assistant, speculative_config=config
            )
            found.append((output.tolist(), hf_specdec.last_metrics().accepted_per_step))
        assert found[-1] == found[-2], number
    assert stand_in.replays > 20


def test_sampling_with_a_seed(stand_in: StandIn) -> None:
    target = tiny_model(sharpness=1.5)
    draft = noisy_copy(target, 0.3)
    texts = []
    for cuda_graphs in (False, True):
        config = hf_specdec.SpeculativeConfig(tree=TREE, cuda_graphs=cuda_graphs)
        torch.manual_seed(5)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": 50, "speculative_config": config}
        texts.append(target.generate(**prompts(2, 9), **options, assistant_model=draft).tolist())
    assert texts[0] == texts[1] and stand_in.replays > 10


@BY_ATTENTION
@pytest.mark.some_cases(1)
def test_a_text_that_outgrows_the_store(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the cache has memory of its own, and no graphs."""
    monkeypatch.setattr("hf_specdec.generation.target.Target._last_capacity", lambda self, num_nodes: 20)
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    for batch_size in (1, 2):
        inputs = prompts(batch_size, 9)
        plain = target.generate(**inputs, max_new_tokens=60, do_sample=False)
        output = target.generate(**inputs, max_new_tokens=60, do_sample=False, assistant_model=draft, **graphed(TREE))
        assert torch.equal(output, plain)
    assert stand_in.replays > 0


@pytest.mark.slow
def test_two_threads_on_one_model(stand_in: StandIn) -> None:
    """The second finds the store lent, and goes without."""
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    inputs = [prompts(1, 9, seed=seed) for seed in range(4)]
    expected = [target.generate(**one, max_new_tokens=40, do_sample=False).tolist() for one in inputs]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        for _ in range(3):
            output = target.generate(
                **inputs[number], max_new_tokens=40, do_sample=False, assistant_model=draft, **graphed(TREE)
            )
            found[number] = found.get(number, []) + [output.tolist()]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == [expected[number]] * 3 for number in range(4))


def test_padding_that_is_not_on_the_left_has_masks() -> None:
    visible = torch.tensor([[False, True, True], [True, True, True]])
    assert first_slots_of(visible).tolist() == [1, 0]
    assert first_slots_of(torch.tensor([[False, True, False]])) is None


def test_inference_mode_before_and_after(stand_in: StandIn) -> None:
    """Tensors that were made in an inference mode cannot be written outside of one."""
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**prompts(1, 9), max_new_tokens=30, do_sample=False)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            output = target.generate(
                **prompts(1, 9), max_new_tokens=30, do_sample=False, assistant_model=draft, **graphed(TREE)
            )
        assert torch.equal(output, plain)
    assert len(graphs.stores._shelves[target].stores) == 2


def test_modules_of_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation has no weights whose place would tell; neither has a forward that somebody replaces."""
    target = tiny_model()
    before = graphs.fingerprint_of(target)
    assert graphs.fingerprint_of(target) == before
    mlp = target.model.layers[0].mlp
    mlp.act_fn = torch.nn.GELU()
    other = graphs.fingerprint_of(target)
    assert other != before
    monkeypatch.setattr(type(mlp), "forward", lambda module, states: states)
    assert graphs.fingerprint_of(target) not in (before, other)


def test_adapters_that_are_switched_off(stand_in: StandIn) -> None:
    """The graph of a model with an adapter is not that of the model without."""
    peft = pytest.importorskip("peft", reason="adapters need peft")
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    adapted = peft.get_peft_model(target, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    inner = adapted.get_base_model()
    with_adapter = graphs.fingerprint_of(inner)
    with adapted.disable_adapter():
        assert graphs.fingerprint_of(inner) != with_adapter
    assert graphs.fingerprint_of(inner) == with_adapter
    plain = adapted.generate(**prompts(1, 9), max_new_tokens=20, do_sample=False)
    options = {"max_new_tokens": 20, "do_sample": False, "assistant_model": draft, **graphed(TREE)}
    assert torch.equal(adapted.generate(**prompts(1, 9), **options), plain)


def test_hooks_that_transformers_leaves(stand_in: StandIn) -> None:
    """Whoever has asked for hidden states once has hooks that do nothing otherwise."""
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    target(**prompts(1, 9), output_hidden_states=True)
    assert any(module._forward_hooks for module in target.modules())
    for returns in (False, True):
        options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
        options["output_hidden_states"] = returns
        plain = target.generate(**prompts(1, 9), **options)
        output = target.generate(**prompts(1, 9), **options, assistant_model=draft, **graphed(TREE))
        assert torch.equal(output.sequences, plain.sequences)
        assert (output.hidden_states is None) is not returns


def test_heads_of_other_threads_watch_the_same_target(stand_in: StandIn) -> None:
    """Their hooks are ours, and no obstacle."""
    target, head = trained_target(), trained_head()
    with watch_features(target, [1, 2]):
        prompt = torch.tensor([trained_prompts()["prompts"][0][:8]])
        target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=head, **graphed(TREE))


@BY_ATTENTION
@pytest.mark.some_cases(1)
def test_soft_caps_are_left_out_where_sdpa_leaves_them_out(stand_in: StandIn) -> None:
    """transformers 5.17 lets Gemma 2 attend by "sdpa", which has no soft-capping."""
    target = tiny_model("gemma2", attn_logit_softcapping=0.05)
    draft = noisy_copy(target, 0.05)
    plain = target.generate(**prompts(1, 9), max_new_tokens=30, do_sample=False)
    output = target.generate(
        **prompts(1, 9), max_new_tokens=30, do_sample=False, assistant_model=draft, **graphed(TREE)
    )
    assert torch.equal(output, plain)
