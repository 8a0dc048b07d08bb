"""MTP modules against numbers of references (tests/goldens): hidden states, logits, and the drafts of every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from support.goldens import TINY_TARGET
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_specdec import MtpHead
from hf_specdec.compat import CACHE
from hf_specdec.drafters import ObservedDrafter, as_drafter


GOLDENS = pytest.mark.parametrize("golden", ["qwen3_5_mtp", "deepseek_v3_mtp"])


@cache
def the_pair(golden: str) -> tuple[PreTrainedModel, MtpHead, dict[str, torch.Tensor]]:
    """Target, head and expected arrays; no test may change them."""
    folder = TINY_TARGET.parent / golden
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    return target, MtpHead.from_target(target), load_file(folder / "golden.safetensors")


@torch.no_grad()
def rows_and_chain(golden: str) -> dict[str, torch.Tensor]:
    """What the head makes of the prompt's features, and of the chain after them."""
    target, head, expected = the_pair(golden)
    embed, cache = target.get_input_embeddings(), DynamicCache()
    length = expected["feature"].shape[1]
    output = head(
        features=expected["feature"],
        inputs_embeds=embed(expected["head_input_ids"]),
        position_ids=torch.arange(length)[None],
        lm_head=target.lm_head,
        use_cache=True,
        **{CACHE: cache},
    )
    found = {"head_hidden": output.hidden_states, "head_logits": output.logits}
    chain, states = [], output.hidden_states[:, -1:]
    for place, token in enumerate(expected["chain_tokens"][0]):
        chain.append(
            head(
                hidden_states=states,
                inputs_embeds=embed(token[None, None]),
                position_ids=torch.tensor([[length + place]]),
                lm_head=target.lm_head,
                use_cache=True,
                **{CACHE: cache},
            )
        )
        states = chain[-1].hidden_states
    found["chain_hidden"] = torch.cat([one.hidden_states[0] for one in chain])
    found["chain_logits"] = torch.cat([one.logits[0] for one in chain])
    return found


def largest_difference(golden: str) -> float:
    expected = the_pair(golden)[2]
    return max(float((array - expected[name]).abs().max()) for name, array in rows_and_chain(golden).items())


@GOLDENS
def test_hidden_states_and_logits(golden: str) -> None:
    assert largest_difference(golden) < 1e-5


@GOLDENS
def test_every_step_drafts_what_the_reference_drafts(golden: str) -> None:
    target, head, expected = the_pair(golden)
    steps: list[tuple[list[int], int]] = []
    drafter = ObservedDrafter(
        as_drafter(head), lambda tree, paths: steps.append((tree.tokens_list[0], len(paths[0] or ())))
    )
    inputs, new = expected["input_ids"], expected["output_ids"].shape[1] - expected["input_ids"].shape[1]
    output = target.generate(inputs, max_new_tokens=new, do_sample=False, assistant_model=drafter, tree="chain:3")
    assert output.equal(expected["greedy_ids"])
    assert [tokens for tokens, _ in steps] == expected["step_draft_tokens"].tolist()
    assert [number for _, number in steps] == expected["step_accept_length"].tolist()


def hidden_state_first(monkeypatch: pytest.MonkeyPatch, head: MtpHead) -> None:
    monkeypatch.setattr(head.mtp[0], "hidden_first", True)


def no_last_norm(monkeypatch: pytest.MonkeyPatch, head: MtpHead) -> None:
    monkeypatch.setitem(head.mtp[0].block._modules, "norm", nn.Identity())


def embeddings_without_their_norm(monkeypatch: pytest.MonkeyPatch, head: MtpHead) -> None:
    monkeypatch.setitem(head.mtp[0]._modules, "enorm", nn.Identity())


@GOLDENS
@pytest.mark.parametrize("mistake", [hidden_state_first, no_last_norm, embeddings_without_their_norm])
def test_mistakes_are_seen(golden: str, mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch, the_pair(golden)[1])
    assert largest_difference(golden) > 0.1
