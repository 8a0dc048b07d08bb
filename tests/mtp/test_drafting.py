"""
Drafting with MTP modules of tiny checkpoints: what the modules compute is what the parts compute from which the
checkpoint was made; every step drafts what these would draft for the text from scratch; and the text is plain
`generate`'s.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.device_steps import Steps
from support.heads import pads_of
from support.mtp import KNOWN, Reference, load_target, write_checkpoint
from support.plain import greedy_text
from support.recording import RecordsPaths, assert_captured_drafts, assert_requests_as_plain, padded_prompts
from transformers import PreTrainedModel

from hf_specdec import DynamicTree, MtpHead, SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.drafters.features import drafting as drafting_of_requests
from hf_specdec.drafters.features import reading
from hf_specdec.drafters.growth import LevelNodes
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.drafters.several_mtp import CapturedSeveralMtp, SeveralMtpDrafter


TREE = TokenTree.parse("[(0,), (1,), (0,0), (0,1), (1,0), (0,0,0), (1,0,0), (0,0,0,0), (0,0,0,0,0)]")
DYNAMIC = DynamicTree(depth=5, top_k=3, num_nodes=12)
ONE_OF_EACH = [family for family in ("deepseek_v3", "qwen3_next", "glm4_moe", "mimo_v2_flash") if family in KNOWN]
"""With one module, in a target with states, with two, and with three that have windows."""


@cache
def the_pair(family: str) -> tuple[PreTrainedModel, MtpHead, list[Reference]]:
    with TemporaryDirectory() as folder:
        references = write_checkpoint(family, Path(folder))
        target = load_target(Path(folder))
        return target, MtpHead.from_target(target), references


class RecordingLogits(RecordsPaths):
    runs_in_graphs = False

    def begin_tree(self, states: Any, roots: torch.Tensor, depth: int) -> torch.Tensor:
        logits: torch.Tensor = super().begin_tree(states, roots, depth)  # type: ignore[misc]
        self.note_roots(self.sequences, logits)  # type: ignore[attr-defined]
        return logits

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        return self.note_level(nodes, super().run_level(nodes))  # type: ignore[misc]


class RecordingOne(RecordingLogits, MtpDrafter):
    runs_in_graphs = False


class RecordingSeveral(RecordingLogits, SeveralMtpDrafter):
    runs_in_graphs = False


def recording(head: MtpHead) -> Any:
    return (RecordingOne if head.config.num_modules == 1 else RecordingSeveral)(head)


@torch.no_grad()
def logits_from_scratch(target: PreTrainedModel, modules: list[Reference], text: list[int], path: list[int]) -> Any:
    """
    The modules' logits after a path of draft tokens below the last token of a text: those of module `depth mod n`. Row
    s of all modules is that of the token s + 1. A module reads the output of the one before in the row before, the
    first one a feature, or what a token was drafted from.
    """
    ids, first = torch.tensor([text + path]), len(text) - 2  # row of the text's last token
    embeddings = target.get_input_embeddings()(ids[:, 1:])
    features = target.get_decoder()(input_ids=ids[:, : len(text) - 1], use_cache=False)[0]
    for depth in range(len(path) + 1):
        end, outputs, states = first + depth + 1, [], features
        for number, module in enumerate(modules):
            if number > 0:
                states = outputs[-1][:, :-1]
            if states.shape[1] == 0:
                break
            outputs.append(module(states, embeddings[:, number:end]))
        last = outputs[depth % len(modules)][:, -1:]
        features = torch.cat([features, last], dim=1)
    return target.get_output_embeddings()(last)[0, 0]


def assert_as_from_scratch(family: str, drafter: RecordingLogits, pads: list[int] | None = None) -> None:
    """Compares the logits of the first and the last steps; `pads`: tokens of padding in every row."""
    target, _, modules = the_pair(family)
    drafter.assert_as_from_scratch(partial(logits_from_scratch, target, modules), 1e-4, pads)


@pytest.mark.parametrize("family", KNOWN)
def test_outputs_are_those_of_the_published_parts(family: str) -> None:
    target, head, references = the_pair(family)
    generator = torch.Generator().manual_seed(0)
    states, embeddings = (torch.randn(1, 20, head.config.hidden_size, generator=generator) for _ in range(2))
    positions = torch.arange(20)[None]
    for number, reference in enumerate(references):
        with torch.no_grad():
            output = head(features=states, inputs_embeds=embeddings, position_ids=positions, module_index=number)
            expected = reference(states, embeddings)
        torch.testing.assert_close(output.hidden_states, expected, atol=1e-5, rtol=1e-5)
    assert head.config.num_modules == len(references)


@pytest.mark.parametrize(
    "family, tree",
    [
        *(pytest.param(family, TREE, id=f"{family}-static") for family in KNOWN),
        *(pytest.param(family, DYNAMIC, id=f"{family}-dynamic") for family in ONE_OF_EACH),
    ],
)
@pytest.mark.some_cases(4)
def test_calls(family: str, tree: Any) -> None:
    """Of ragged rows with padding, one of them of two tokens."""
    target, head, _ = the_pair(family)
    inputs, drafter = padded_prompts(), recording(head)
    text = greedy_text(target, inputs, max_new_tokens=14, assistant_model=drafter, tree=tree)
    assert text.equal(greedy_text(target, inputs, max_new_tokens=14))
    if family in ONE_OF_EACH:
        assert_as_from_scratch(family, drafter, pads_of(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in ONE_OF_EACH if family in ("glm4_moe", "mimo_v2_flash")])
def test_several_modules_read_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a forward; and what waits while speculation is off, until rows have ended."""
    monkeypatch.setattr(reading, "LONGEST_FORWARD", 4)
    target, head, _ = the_pair(family)
    inputs, drafter = padded_prompts(), recording(head)
    plain = greedy_text(target, inputs, max_new_tokens=24)
    ends = {"eos_token_id": [int(plain[0, 21]), int(plain[1, 23])], "pad_token_id": 0, "max_new_tokens": 24}
    config = SpeculativeConfig(tree=TREE, disable_by_batch_size=2)
    text = greedy_text(target, inputs, **ends, assistant_model=drafter, speculative_config=config)
    assert text.equal(greedy_text(target, inputs, **ends))
    assert_as_from_scratch(family, drafter, pads_of(inputs))


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(1)
def test_requests_in_flight(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, which the head reads in pieces."""
    target, head, _ = the_pair(family)
    drafter = recording(head)
    monkeypatch.setattr(drafting_of_requests, "LONGEST_FORWARD", 4)
    assert_requests_as_plain(target, drafter, TREE, 14)
    assert_as_from_scratch(family, drafter)


@pytest.mark.parametrize("family, tree", [("hy_v3", TREE), ("hy_v3", DYNAMIC), ("mimo_v2_flash", DYNAMIC)])
@pytest.mark.some_cases(1)
def test_whole_steps(family: str, tree: Any, steps: Steps) -> None:
    """The text, and what the steps of the host accept, with one module and with three that have windows."""
    if family not in KNOWN:
        pytest.skip(f"this release of transformers has no {family}")
    target, head, _ = the_pair(family)
    inputs, accepted = padded_prompts(), []
    for cuda_graphs in (False, True):
        config = SpeculativeConfig(tree=tree, cuda_graphs=cuda_graphs)
        text = greedy_text(target, inputs, max_new_tokens=20, assistant_model=head, speculative_config=config)
        assert text.equal(greedy_text(target, inputs, max_new_tokens=20))
        accepted.append([row[:-2] for row in last_metrics().accepted_per_step])
    assert steps.replays > 0
    assert accepted[0] == accepted[1]
    assert sum(map(sum, accepted[0])) > 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1], ids=["drafting", "waiting"])
def test_whole_steps_of_several_modules_in_flight(
    limit: int | None, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Every draft is that of the text from scratch: after prompts in chunks, after steps without drafts, and behind
    blocks that others have read.
    """
    target, head, modules = the_pair("glm4_moe")
    from_scratch = partial(logits_from_scratch, target, modules)
    manager = assert_captured_drafts(monkeypatch, target, head, CapturedSeveralMtp, from_scratch, limit, turns=2)
    assert steps.replays > 0 and manager.state.num_prefix_hits > 40
