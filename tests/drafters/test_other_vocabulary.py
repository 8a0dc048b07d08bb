"""Draft models of another tokenizer: in shared tokens with their q, and in texts; contexts, matches, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import limits, text_alone
from support.device_steps import install
from support.exact import SIGNIFICANCE, fit
from support.graphs import install_stand_in
from support.models import prompts, tiny_model
from support.other_vocabulary import (
    FEW_SHARED,
    MANY_SHARED,
    TARGET,
    call_of,
    context_of,
    draft_with_spaces,
    drafter_of,
    pieces_with_spaces,
)
from support.parity import IRREGULAR
from support.sampling import LENGTH, LIMITS, PADDED, PROMPT, TREE, expected_tokens, sampled_tokens, the_target
from support.tokenizer import tiny_tokenizer

import hf_specdec
from hf_specdec import DynamicTree, SpeculativeConfig
from hf_specdec.cache.blocks import BlockPool
from hf_specdec.drafters import DraftModelDrafter
from hf_specdec.drafters.other_vocabulary import (
    OtherVocabularyDrafting,
    SharedTokensDrafter,
    drafting,
)
from hf_specdec.forwards.tree_forward import TreeForward
from hf_specdec.graphs.forwards import CapturedForward
from hf_specdec.graphs.paged_forward import PagedForward


DYNAMIC = DynamicTree(depth=3, top_k=3, num_nodes=8)
ROWS = 1_000
both_kinds = pytest.mark.parametrize("pieces", [MANY_SHARED, FEW_SHARED], ids=["tokens", "texts"])


# ------------------------------------------------------------------------------------------------------- greedy texts


@both_kinds
@pytest.mark.parametrize("tree", [IRREGULAR, DYNAMIC, "auto"], ids=["static", "dynamic", "auto"])
@pytest.mark.some_cases(2)
def test_greedy_texts(pieces: tuple[str, ...], tree: Any) -> None:
    """Padded rows of a call, and the same as requests."""
    target, call = the_target(), call_of(pieces)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**PADDED, **options)
    text = target.generate(**PADDED, **options, **call, tree=tree)
    assert text.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0 or tree == "auto"
    texts = [row[mask.bool()].tolist() for row, mask in zip(*PADDED.values(), strict=True)]
    options["eos_token_id"] = -1
    outputs = list(target.generate_batch(texts, **options, **call, tree=tree).values())
    assert [output.generated_tokens for output in outputs] == plain[:, 4:].tolist()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_texts_of_a_tokenizer_with_spaces(batch_size: int) -> None:
    target, inputs = tiny_model(), prompts(batch_size, 12, padding=True)
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    text = target.generate(
        **inputs,
        max_new_tokens=30,
        do_sample=False,
        assistant_model=draft_with_spaces(),
        tokenizer=tiny_tokenizer(),
        assistant_tokenizer=pieces_with_spaces(),
        tree=[(rank,) for rank in range(8)] + [(0, 0), (1, 0)],
    )
    assert text.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@both_kinds
@pytest.mark.parametrize("run", ["generate", "generate_batch"])
@pytest.mark.some_cases(2)
def test_rows_draft_together(run: str, pieces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts take as many forwards of the draft as the one among them that takes most."""
    forward, depths = TreeForward.__call__, []
    target, call = the_target(), call_of(pieces)

    def counted(self: TreeForward, *args: Any, **options: Any) -> Any:
        if self.model is call["assistant_model"]:
            depths.append(len(args[0]))
        return forward(self, *args, **options)

    monkeypatch.setattr(TreeForward, "__call__", counted)
    options: dict[str, Any] = {"tree": "chain:2", "max_new_tokens": 8, "do_sample": False}

    def num_forwards(texts: list[list[int]]) -> int:
        depths.clear()
        if run == "generate":
            target.generate(torch.tensor(texts), **call, **options, eos_token_id=None)
        else:
            target.generate_batch(texts, **call, **options, eos_token_id=-1)
        assert max(depths) == len(texts)
        return len(depths)

    texts = [[5, 5, 3, 7], [1, 6, 6, 4], [5, 3, 7, 4]]
    assert num_forwards(texts) == max(num_forwards([text]) for text in texts)


def draft_counts(**options: Any) -> list[tuple[int, int]]:
    """Draft tokens of two requests, and how many of them were accepted. Their texts are the target's own."""
    prompts: list[list[int]] = [[5, 5, 3, 7], [1, 6, 6, 4]]
    options = {"max_new_tokens": 12, "eos_token_id": -1} | options
    outputs = the_target().generate_batch(
        prompts,
        **call_of(MANY_SHARED),
        **options,
        do_sample=False,
        tree="chain:2",
        continuous_batching_config=limits(),
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == text_alone(the_target(), prompt, **options)
    counts = [output.speculation for output in outputs.values()]
    return [(one.num_draft_tokens, one.num_accepted_tokens) for one in counts]


def test_a_request_without_blocks_for_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not drafted for while another one has them."""
    usual = draft_counts()
    monkeypatch.setattr(drafting, "BlockPool", lambda num_blocks, block_size: BlockPool(4, block_size))
    scarce = draft_counts()
    assert 0 < sum(drafted for drafted, _ in scarce) < sum(drafted for drafted, _ in usual), (usual, scarce)


def test_spoiled_requests_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `wipe` the draft has nothing of a request, and proposes as before."""
    usual, propose = draft_counts(), OtherVocabularyDrafting.propose

    def wiping(self: OtherVocabularyDrafting, requests: list[Any], asked: Any) -> Any:
        for request in requests:
            self.wipe(request)
            for layer in self._of_texts.cache.layers if request in self._texts else ():
                assert not layer.keys[self._texts[request].table.blocks].any()
        return propose(self, requests, asked)

    monkeypatch.setattr(OtherVocabularyDrafting, "propose", wiping)
    assert draft_counts() == usual


@both_kinds
@pytest.mark.some_cases(1)
def test_forwards_of_the_draft_are_captured(pieces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a draft model of the target's vocabulary: forward by forward, in both calls."""
    stand_in = install_stand_in(monkeypatch, with_kernel=True, counts=False)
    target, call = copy.deepcopy(the_target()).float(), call_of(pieces)
    draft = call["assistant_model"] = copy.deepcopy(call["assistant_model"]).float()
    captured: list[Any] = []
    for kind in (CapturedForward, PagedForward):
        make = kind.__init__

        def noted(self: Any, forward: TreeForward, *args: Any, make: Any = make) -> None:
            captured.append(forward.model)
            make(self, forward, *args)

        monkeypatch.setattr(kind, "__init__", noted)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=True)
    plain = target.generate(**PADDED, **options, eos_token_id=None)
    text = target.generate(**PADDED, **options, **call, speculative_config=config, eos_token_id=None)
    assert text.tolist() == plain.tolist() and draft in captured
    captured.clear()
    texts = [row[mask.bool()].tolist() for row, mask in zip(*PADDED.values(), strict=True)]
    outputs = target.generate_batch(texts, **options, **call, speculative_config=config, eos_token_id=-1)
    assert [output.generated_tokens for output in outputs.values()] == plain[:, 4:].tolist() and draft in captured
    assert stand_in.replays > 10


@both_kinds
def test_calls_with_graphs_draft_on_the_host(pieces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    steps = install(monkeypatch, with_kernel=True)
    target, call = copy.deepcopy(the_target()).float(), call_of(pieces)
    call["assistant_model"] = copy.deepcopy(call["assistant_model"]).float()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    config = SpeculativeConfig(tree=IRREGULAR, cuda_graphs=True)
    plain = target.generate(**PROMPT, **options)
    text = target.generate(**PROMPT, **options, **call, speculative_config=config)
    assert text.tolist() == plain.tolist() and steps.replays == 0
    outputs = target.generate_batch([PROMPT["input_ids"][0].tolist()], **options, **call, speculative_config=config)
    assert next(iter(outputs.values())).generated_tokens == plain[0, 4:].tolist() and steps.replays == 0


def test_end_tokens_end_texts() -> None:
    """The draft proposes the target's end token where it has its own; nothing follows one that was accepted."""
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "top_k": 0, "eos_token_id": 2}
    torch.manual_seed(0)
    ids = {name: values.expand(60, -1) for name, values in PROMPT.items()}
    text = the_target().generate(**ids, **options, pad_token_id=6, **call_of(MANY_SHARED), tree=TREE)
    ended = [row[row.index(2, 4) + 1 :] for row in text.tolist() if 2 in row[4:]]
    assert ended and {token for rest in ended for token in rest} == {6}


# ------------------------------------------------------------------------------------------------------- sampled texts


METHODS = {
    "tokens, rejection": (MANY_SHARED, SpeculativeConfig(tree=TREE)),
    "tokens, budgets": (MANY_SHARED, SpeculativeConfig(tree=LIMITS, draft_sampling="sample")),
    "tokens, target": (MANY_SHARED, SpeculativeConfig(tree=TREE, draft_sampling="greedy")),
    "texts": (FEW_SHARED, SpeculativeConfig(tree=TREE)),
}


def p_value(method: str, rows: int = ROWS, **options: Any) -> float:
    """How well texts of `generate` fit the enumerated distribution."""
    pieces, config = METHODS[method]
    new = sampled_tokens(the_target(), drafter_of(pieces), config, rows, **options)
    return fit(new, expected_tokens("top-k" if options else "plain")).p_value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.some_cases(2)
def test_the_distribution(method: str) -> None:
    assert p_value(method) > SIGNIFICANCE


def test_the_distribution_with_a_warper() -> None:
    assert p_value("tokens, rejection", top_k=5) > SIGNIFICANCE


@both_kinds
def test_the_distribution_of_requests(pieces: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    rows = 150
    outputs = the_target().generate_batch(
        [PROMPT["input_ids"][0].tolist()] * rows,
        **call_of(pieces),
        tree="[(0,), (1,), (0,0)]",
        continuous_batching_config=limits(3000, max_requests_per_batch=rows, max_batch_tokens=4 * rows),
        max_new_tokens=LENGTH + 1,
        do_sample=True,
        top_k=0,
        eos_token_id=-1,
    )
    new = torch.tensor([output.generated_tokens[:LENGTH] for output in outputs.values()])
    assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0
    assert fit(new, expected_tokens("plain")).p_value > SIGNIFICANCE


def test_a_seed_gives_one_text_with_any_trees() -> None:
    """Where random numbers belong to positions, the draft draws with those of the target's tokens."""
    texts = []
    for tree in ("[(0,)]", IRREGULAR):
        output = the_target().generate_batch(
            [[5, 5, 3, 7]], **call_of(MANY_SHARED), tree=tree, max_new_tokens=16, do_sample=True, seed=3, top_k=0
        )
        texts.append(next(iter(output.values())).generated_tokens)
    assert texts[0] == texts[1]


def test_q_over_all_tokens_of_the_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """q as it was before tokens that are not shared left it: their share is at a token that nobody proposes."""
    propose, run_level = SharedTokensDrafter.propose, DraftModelDrafter.run_level

    def unnormalised(self: SharedTokensDrafter, *args: Any) -> Any:
        levels: list[torch.Tensor] = []

        def kept(self: Any, nodes: Any) -> torch.Tensor:
            levels.append(run_level(self, nodes))
            return levels[-1]

        monkeypatch.setattr(DraftModelDrafter, "run_level", kept)
        draft = propose(self, *args)
        if draft is None or draft.scores is None:
            return draft
        q = torch.cat([self.root_logits[:, None], *levels], dim=1).float().softmax(dim=-1)
        shared = q[..., self.translation.draft_tokens]
        lost = (1 - shared.sum(dim=-1, keepdim=True)).clamp(min=0)
        vocabulary = torch.cat([draft.vocabulary, torch.tensor([TARGET.index("d")])])
        return replace(draft, scores=torch.cat([shared, lost], dim=-1).log(), vocabulary=vocabulary)

    monkeypatch.setattr(SharedTokensDrafter, "propose", unnormalised)
    assert p_value("tokens, rejection") < 1e-6


@pytest.mark.slow
def test_a_context_with_a_drawn_child_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """q of the root's children from a text that is encoded anew with one of them."""
    propose, known = SharedTokensDrafter.propose, {}

    def with_child(self: SharedTokensDrafter, sequences: Any) -> Any:
        draft = propose(self, sequences)
        if draft is None or draft.scores is None:
            return draft
        scores = draft.scores.clone()
        for row in range(sequences.batch_size):
            text = tuple(context_of(self.translation, [*sequences.tokens(row, 0), int(draft.tokens[row, 0])]))
            if text not in known:
                with torch.no_grad():
                    known[text] = self.model(torch.tensor([text])).logits[0, -2, self.translation.draft_tokens]
            scores[row, 0] = known[text]
        return replace(draft, scores=scores)

    monkeypatch.setattr(SharedTokensDrafter, "propose", with_child)
    assert p_value("tokens, rejection") < 1e-6
