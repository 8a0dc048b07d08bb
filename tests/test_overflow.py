"""
Draft tokens behind which the target's numbers overflow, and which plain `generate` never forwards. A mask hides their
keys from the other nodes, but not 0 · NaN: texts must be plain `generate`'s all the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import assert_nothing_left, limits, text_alone
from support.device_steps import Steps, install
from support.goldens import trained_target
from support.graphs import install_stand_in
from support.heads import trained_head
from support.hybrids import draft_of, hybrid
from support.models import prompts, tiny_model
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.verification import DraftBackoff


TREE = "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"


def poisoned_pair(
    attn_implementation: str = "sdpa", has_states: bool = False
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """
    A target with a token that it never writes, behind which everything is NaN, and a draft that proposes this token
    wherever it proposes the one that texts are full of.
    """
    if has_states:
        target = copy.deepcopy(hybrid("qwen3_5_text"))
    else:
        target = tiny_model(dtype=torch.float32, tie_word_embeddings=False, attn_implementation=attn_implementation)
    text = target.generate(**prompts(3, 9), max_new_tokens=40, do_sample=False)
    frequent = int(text[:, 9:].flatten().mode().values)
    poison = next(token for token in range(10, 60) if token not in text)
    draft = draft_of(text.tolist()) if has_states else copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight[poison] = draft.lm_head.weight[frequent] * 1.001
        target.lm_head.weight[poison] = 0.0
        target.get_input_embeddings().weight[poison] = torch.nan
    return target, draft


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.some_cases(2)
def test_greedy_texts(batch_size: int, attn_implementation: str) -> None:
    target, draft = poisoned_pair(attn_implementation)
    call = prompts(batch_size, 9, padding=batch_size > 1) | {"max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, assistant_model=draft, tree=TREE), plain)
    assert hf_specdec.last_metrics().num_accepted_tokens > 2


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.some_cases(1)
def test_heads_go_on(in_flight: bool) -> None:
    """They read features of the target, of which those of a spoiled step are NaN."""
    target, head, prompt = copy.deepcopy(trained_target()).float(), trained_head().float(), [3, 4, 8]
    text = text_alone(target, prompt, max_new_tokens=40)
    poison = max(set(text) - set(prompt), key=text.count)
    target.get_input_embeddings().weight.data[poison] = torch.nan
    options = {"max_new_tokens": 40, "do_sample": False, "suppress_tokens": [poison]}
    plain = text_alone(target, prompt, **options)
    ids = torch.tensor([prompt])
    if in_flight:
        [output] = target.generate_batch([prompt], assistant_model=head, tree=TREE, **options).values()
        assert output.generated_tokens == plain and output.speculation.num_accepted_tokens > 5
    else:
        ours = target.generate(ids, **options, assistant_model=head, tree=TREE)
        assert ours[0, 3:].tolist() == plain and hf_specdec.last_metrics().num_accepted_tokens > 5


def test_sampled_texts_go_on() -> None:
    target, draft = poisoned_pair()
    call = prompts(2, 9) | {"max_new_tokens": 40, "do_sample": True, "top_k": 3}
    torch.manual_seed(0)
    text = target.generate(**call, assistant_model=draft, tree=TREE)
    assert text.shape == (2, 49) and not target(text).logits.isnan().any()


@pytest.mark.parametrize("kind, batch_size", [("greedy", 1), ("greedy", 3), ("sampled", 3), ("states", 3)])
@pytest.mark.some_cases(1)
def test_steps_on_the_device(kind: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes on without them, and without drafts."""
    pytest.importorskip("triton", reason="the kernels need triton")
    target, draft = poisoned_pair(has_states=kind == "states")
    call = prompts(batch_size, 9) | {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    if kind == "sampled":
        call |= {"do_sample": True, "temperature": 1e-7, "top_k": 0}
    plain = target.generate(**call)
    steps: Steps = install(monkeypatch, with_kernel=True)
    assert torch.equal(target.generate(**call, assistant_model=draft, tree=TREE), plain)
    assert steps.replays > 0


@pytest.mark.parametrize("on_device, has_states", [(False, False), (True, False), (True, True)])
@pytest.mark.some_cases(1)
def test_requests_in_flight(on_device: bool, has_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = poisoned_pair(has_states=has_states)
    inputs = [row.tolist() for row in prompts(3, 9)["input_ids"]]
    texts = [text_alone(target, prompt, max_new_tokens=40) for prompt in inputs]
    if on_device:
        pytest.importorskip("triton", reason="the kernels need triton")
        install_stand_in(monkeypatch, with_kernel=True)
    manager = target.init_continuous_batching(assistant_model=draft, tree=TREE, continuous_batching_config=limits())
    with manager:
        names = [manager.add_request(prompt, max_new_tokens=40) for prompt in inputs]
        outputs = [manager.get_result(name, timeout=60) for name in names]
    assert [output.error for output in outputs] == [None] * 3
    assert [output.generated_tokens for output in outputs] == texts
    assert manager.engine.metrics.num_accepted_tokens > 5
    assert_nothing_left(manager)


def test_nothing_is_left_in_blocks() -> None:
    """Neither by the target nor by a draft that overflows, too."""
    target, draft = poisoned_pair()
    draft.set_input_embeddings(copy.deepcopy(target.get_input_embeddings()))
    inputs = [row.tolist() for row in prompts(3, 9)["input_ids"]]
    manager = target.init_continuous_batching(assistant_model=draft, tree=TREE, continuous_batching_config=limits())
    with manager:
        names = [manager.add_request(prompt, max_new_tokens=40) for prompt in inputs]
        outputs = [manager.get_result(name, timeout=60) for name in names]
    assert [output.generated_tokens for output in outputs] == [
        text_alone(target, prompt, max_new_tokens=40) for prompt in inputs
    ]
    for cache in (manager.engine.target.cache, manager.engine.drafting.cache):
        blocks = sorted(cache.clean_blocks)
        assert len(blocks) > 6
        assert not any(states[blocks].isnan().any() for layer in cache.layers for states in (layer.keys, layer.values))


def test_nothing_is_left_in_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Features of a request that fails in the middle of its text lie where those of later requests will. (The host drops
    them, but a step on the device has written them before it knows.)
    """
    pytest.importorskip("triton", reason="the kernels need triton")
    install_stand_in(monkeypatch, with_kernel=True)
    target, head = copy.deepcopy(trained_target()).float(), trained_head().float()
    text = text_alone(target, [3, 4, 8], max_new_tokens=12)
    poison = next(token for token in text[3:] if token not in [3, 4, 8, *text[:3]])
    target.set_output_embeddings(copy.deepcopy(target.get_output_embeddings()))
    with torch.no_grad():
        target.get_input_embeddings().weight = torch.nn.Parameter(target.get_input_embeddings().weight.clone())
        target.get_input_embeddings().weight[poison] = torch.nan
    # Speculation is off, so that features wait.
    config = hf_specdec.SpeculativeConfig(tree=TREE, disable_by_batch_size=0)
    manager = target.init_continuous_batching(
        assistant_model=head, speculative_config=config, continuous_batching_config=limits()
    )
    with manager:
        for _ in range(2):  # the device's steps begin with the second
            name = manager.add_request([3, 4, 8], max_new_tokens=12)
            assert "NaN" in (manager.get_result(name, timeout=60).error or "")
        features = manager.engine.drafting.features
        assert features.held.isnan().any()
        name = manager.add_request([4, 8, 3], max_new_tokens=2)
        assert manager.get_result(name, timeout=60).error is None
        assert not features.held.isnan().any()


class Poisoner(hf_specdec.Drafter):
    """Proposes one token again and again."""

    def __init__(self, token: int):
        self.token = token

    def propose(self, sequences: Any) -> hf_specdec.DraftTree:
        tokens = torch.full((sequences.batch_size, 1), self.token)
        return hf_specdec.DraftTree(tokens, hf_specdec.Topology.of_tree(hf_specdec.TokenTree.chain(1), "cpu"))


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_draft_that_never_learns_costs_little(in_flight: bool) -> None:
    """Its steps become rare, and count as drafts that were refused."""
    target, _ = poisoned_pair()
    poison = int(target.get_input_embeddings().weight.isnan().any(dim=1).nonzero())
    call, forwards = prompts(1, 9) | {"max_new_tokens": 60, "do_sample": False}, []
    plain = target.generate(**call)[0, 9:].tolist()
    handle = target.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    if in_flight:
        prompt, options = call["input_ids"][0].tolist(), {"max_new_tokens": 60, "do_sample": False}
        [output] = target.generate_batch([prompt], assistant_model=Poisoner(poison), tree=TREE, **options).values()
        text, metrics = output.generated_tokens, output.speculation
    else:
        text = target.generate(**call, assistant_model=Poisoner(poison), tree=TREE)[0, 9:].tolist()
        metrics = hf_specdec.last_metrics()
    handle.remove()
    assert text == plain and metrics.num_accepted_tokens == 0
    assert 4 < metrics.num_drafts <= len(forwards) - 60 < 10


def test_a_target_that_is_broken_fails_as_ever() -> None:
    """NaN of the text's own tokens is not taken for a draft's."""
    target, draft = poisoned_pair()
    target.lm_head.weight.data[7] = torch.nan
    call = prompts(1, 9) | {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**call)
    assert torch.equal(target.generate(**call, assistant_model=draft, tree=TREE), plain)
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**call | {"do_sample": True}, assistant_model=draft, tree=TREE)
    manager = target.init_continuous_batching(assistant_model=draft, tree=TREE, continuous_batching_config=limits())
    with manager:
        name = manager.add_request(prompts(1, 9)["input_ids"][0].tolist(), max_new_tokens=8)
        assert "NaN" in manager.get_result(name, timeout=60).error


def test_rests_become_longer_as_long_as_nothing_else_comes() -> None:
    rest, spoiled = DraftBackoff(), [True, True, True, False, True, True, *[True] * 4]
    lengths = []
    for is_spoiled in spoiled:
        length = 0
        while rest.takes_step():
            length += 1
        lengths.append(length)
        if is_spoiled:
            rest.begin()
    assert lengths == [0, 1, 2, 4, 0, 1, 2, 4, 8, 16]
