"""
Drafting with the assistant of a tiny Gemma 4: every step drafts what the assistant makes of the text from scratch, and
the text is plain `generate`'s.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.device_steps import Steps
from support.gemma import logits_from_scratch, make_target, write_assistant
from support.graphs import install_stand_in
from support.heads import pads_of
from support.plain import greedy_text
from support.recording import RecordsPaths, assert_captured_drafts, assert_requests_as_plain, padded_prompts
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, GemmaAssistant, SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.drafters.gemma import CapturedGemma, GemmaDrafter
from hf_specdec.drafters.growth import LevelNodes
from hf_specdec.sequences import Rows
from hf_specdec.trees import DraftTree


TREE = TokenTree.parse("[(0,), (1,), (0,0), (0,1), (1,0), (0,0,0), (1,0,0)]")
DYNAMIC = DynamicTree(depth=4, top_k=3, num_nodes=10)


@cache
def the_pair(**changes: Any) -> tuple[PreTrainedModel, GemmaAssistant]:
    with TemporaryDirectory() as folder:
        assistant = GemmaAssistant.from_pretrained(write_assistant(Path(folder), **changes))
    return make_target(), assistant.eval()


class Recording(RecordsPaths, GemmaDrafter):
    def propose(self, sequences: Rows) -> DraftTree | None:
        self._rows = sequences
        return super().propose(sequences)

    def _begin(self, roots: torch.Tensor) -> None:
        super()._begin(roots)
        self.note_roots(self._rows, self._root_logits)

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        return self.note_level(nodes, super().run_level(nodes))


def assert_as_from_scratch(drafter: Recording, pads: list[int] | None = None) -> None:
    drafter.assert_as_from_scratch(partial(logits_from_scratch, *the_pair()), 2e-3, pads)


@pytest.mark.parametrize("tree", [TREE, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.some_cases(1)
def test_calls(tree: Any) -> None:
    target, assistant = the_pair()
    inputs, drafter = padded_prompts(), Recording(assistant)
    text = greedy_text(target, inputs, max_new_tokens=16, assistant_model=drafter, tree=tree)
    assert text.equal(greedy_text(target, inputs, max_new_tokens=16))
    assert last_metrics().num_accepted_tokens > 0
    assert_as_from_scratch(drafter, pads_of(inputs))


def test_captured_forwards_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant reads the memory that replays write."""
    pytest.importorskip("triton", reason="the kernels need triton")
    stand_in = install_stand_in(monkeypatch, with_kernel=True)
    target, assistant = the_pair()
    inputs, drafter = padded_prompts(), Recording(assistant)
    config = SpeculativeConfig(tree=TREE, cuda_graphs=True)
    text = greedy_text(target, inputs, max_new_tokens=16, assistant_model=drafter, speculative_config=config)
    assert text.equal(greedy_text(target, inputs, max_new_tokens=16))
    assert stand_in.replays > 0
    assert_as_from_scratch(drafter, pads_of(inputs))


def test_another_dtype() -> None:
    """The assistant runs in the target's, its buffers too."""
    _, assistant = the_pair()
    target, inputs = make_target().to(torch.bfloat16), {"input_ids": padded_prompts()["input_ids"][:1]}
    text = target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=assistant, tree="chain:3")
    assert last_metrics().num_drafts > 0 and text.shape[1] == 26


@pytest.mark.parametrize("mistake", ["window", "position"])
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, assistant = the_pair()
    inputs, drafter = padded_prompts(), Recording(assistant)
    if mistake == "window":
        monkeypatch.setattr(GemmaAssistant, "window", lambda self, kind: 6 if "sliding" in kind else None)
    else:
        monkeypatch.setattr(assistant.config, "position_of_feature", True)
    greedy_text(target, inputs, max_new_tokens=6, assistant_model=drafter, tree=TREE)
    with pytest.raises(AssertionError, match="not close"):
        assert_as_from_scratch(drafter, pads_of(inputs))


@pytest.mark.slow
def test_steps_without_drafts() -> None:
    """Until rows have ended; then the assistant goes on where the text is."""
    target, assistant = the_pair()
    inputs, drafter = padded_prompts(), Recording(assistant)
    plain = greedy_text(target, inputs, max_new_tokens=24)
    ends = {"eos_token_id": [int(plain[0, 22])], "pad_token_id": 0, "max_new_tokens": 24}
    config = SpeculativeConfig(tree=TREE, disable_by_batch_size=2)
    text = greedy_text(target, inputs, **ends, assistant_model=drafter, speculative_config=config)
    assert text.equal(greedy_text(target, inputs, **ends))
    assert_as_from_scratch(drafter, pads_of(inputs))


@pytest.mark.parametrize("tree", [TREE, "auto"], ids=["static", "auto"])
@pytest.mark.some_cases(1)
def test_requests_in_flight(tree: Any) -> None:
    """Prompts in chunks."""
    target, assistant = the_pair()
    drafter = Recording(assistant)
    assert_requests_as_plain(target, drafter, tree, 16)
    if tree is TREE:
        assert_as_from_scratch(drafter)


@pytest.mark.parametrize("tree", [TREE, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.some_cases(1)
def test_whole_steps(tree: Any, steps: Steps) -> None:
    """The text, and what the steps of the host accept."""
    target, assistant = the_pair()
    inputs, accepted = padded_prompts(), []
    plain = greedy_text(target, inputs, max_new_tokens=20)
    for cuda_graphs in (True, True, False):  # the second call by the engine of the first
        config = SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        text = greedy_text(target, inputs, max_new_tokens=20, assistant_model=assistant, speculative_config=config)
        assert text.equal(plain)
        accepted.append(last_metrics().accepted_per_step)
    assert steps.captures == 1 and steps.replays > 0
    assert accepted[0] == accepted[1] == accepted[2]
    assert sum(map(sum, accepted[0])) > 0


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.slow), 1], ids=["drafting", "waiting"])
def test_whole_steps_in_flight(limit: int | None, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is that of the text from scratch: after steps without drafts, and behind blocks of other texts."""
    target, assistant = the_pair()
    from_scratch = partial(logits_from_scratch, target, assistant)
    manager = assert_captured_drafts(monkeypatch, target, assistant, CapturedGemma, from_scratch, limit, turns=2)
    assert steps.replays > 0 and manager.state.num_prefix_hits > 40
