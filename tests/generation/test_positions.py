"""Texts that come to the last position which the target knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.batches import limits
from support.device_steps import install
from support.exact import enumerate_tokens, fit, sample_tokens
from support.heads import tiny_head
from support.models import VOCAB, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR
from support.sampling import PROMPT as FOUR_TOKENS
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree
from hf_specdec.models.positions import num_positions
from hf_specdec.sequences import Sequences
from hf_specdec.trees import DraftTree, Topology


POSITIONS, PROMPT = 16, 12
CHAIN = "[(0,), (0, 0), (0, 0, 0)]"
TABLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "tie_word_embeddings": False},
    "biogpt": {"tie_word_embeddings": False},
    "gptj": {},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}
"""Families with a table of positions: learned, learned behind two rows of no position, and of sines."""
DRAFTS = ["n-grams", "n-grams in a chain", "longer draft", "rotary draft", "head", "reckless"]


class Reckless(NgramDraft):
    """A user's drafter that does not ask how much room there is."""

    def propose(self, sequences: Sequences) -> DraftTree:
        tokens = torch.full((sequences.batch_size, 7), 5)
        return DraftTree(tokens, Topology.of_tree(TokenTree.chain(7), tokens.device))


class Columns(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append([])


def target_of(family: str, **overrides: Any) -> PreTrainedModel:
    values = {"max_position_embeddings": POSITIONS, "n_positions": POSITIONS} | TABLES.get(family, {}) | overrides
    return tiny_model(family, seed=1, attention_sharpness=3.0, dtype=torch.float32, **values)


def drafting(name: str, target: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `generate` for a draft that knows more positions than the target."""
    if name.startswith("n-grams"):
        return {"assistant_model": NgramDraft()} | ({"tree": CHAIN} if "chain" in name else {})
    if name == "reckless":
        return {"assistant_model": Reckless(), "tree": TokenTree.chain(7)}
    if name == "head":
        head = tiny_head(target, eagle_version=1)
        return {"assistant_model": head, "tree": DynamicTree(depth=4, top_k=2, num_nodes=6)}
    if name == "rotary draft":
        return {"assistant_model": tiny_model(dtype=torch.float32), "tree": IRREGULAR}
    return {"assistant_model": tiny_model("gpt2", dtype=torch.float32), "tree": CHAIN}


def outcome(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> tuple[Any, list[list[int]], Any]:
    """What a greedy call raises, streams and returns."""
    streamer = Columns()
    try:
        text = model.generate(**inputs, streamer=streamer, do_sample=False, **options)
    except Exception as error:
        return type(error), streamer.given, None
    return None, streamer.given, text.tolist()


def assert_same_outcome(model: PreTrainedModel, inputs: dict[str, Any], draft: dict[str, Any], **options: Any) -> Any:
    """Asserts that a speculative call ends as the plain one does. Returns what both raise."""
    plain = outcome(model, inputs, **options)
    assert outcome(model, inputs, **draft, **options) == plain
    return plain[0]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.some_cases(4)
def test_trees_end_at_the_last_position(family: str, draft: str) -> None:
    """An end token, a criterion of one's own, or no end before the table's, where plain `generate` fails too."""
    target, inputs = target_of(family), prompts(1, PROMPT)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=POSITIONS + 1 - PROMPT)
    own = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] >= POSITIONS])])
    speculates = drafting(draft, target)
    for options in ({"eos_token_id": int(text[0, 14])}, {"stopping_criteria": own}, {"max_new_tokens": 5}):
        error = assert_same_outcome(target, inputs, speculates, **({"max_new_tokens": 20} | options))
        assert error is None
    assert assert_same_outcome(target, inputs, speculates, max_new_tokens=20) in (IndexError, RuntimeError)


@pytest.mark.parametrize("length", range(13, 20))
def test_prompts_near_the_last_position(length: int) -> None:
    """Of a prompt longer than the table not even the first token is there."""
    target = target_of("gpt2")
    for draft in ("n-grams", "longer draft"):
        error = assert_same_outcome(target, prompts(1, length), drafting(draft, target), max_new_tokens=8)
        assert error is IndexError


def batch_outcomes(target: PreTrainedModel, speculates: dict[str, Any], **options: Any) -> set[Any]:
    """What calls with batches of ragged prompts raise, each with other end tokens: as plain ones do."""
    inputs = prompts(3, PROMPT, padding=True)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=POSITIONS + 1 - PROMPT)
    ends = [text[:, 14].tolist(), text[:1, 13].tolist(), text[1:, 12].tolist(), [VOCAB + 1]]
    return {
        assert_same_outcome(target, inputs, speculates, max_new_tokens=20, eos_token_id=end, **options) for end in ends
    }


@pytest.mark.parametrize("draft", ["n-grams", "itself", "noisy", "longer draft", "head"])
def test_batches_that_come_to_the_last_position(draft: str) -> None:
    """
    Rows run ahead of others, and wait. Plain `generate` goes on with rows that have ended: it fails with their
    positions, too, where a row with more padding has not ended.
    """
    target = target_of("gpt2")
    models = {"itself": target, "noisy": noisy_copy(target, 0.1)}
    speculates = {"assistant_model": models[draft], "tree": IRREGULAR} if draft in models else drafting(draft, target)
    assert batch_outcomes(target, speculates) == {None, IndexError}


def test_given_positions() -> None:
    """Positions need not be slots."""
    target, positions = target_of("gpt2"), torch.arange(5, 10)[None]
    inputs = prompts(1, 5) | {"position_ids": positions}
    speculates = {"assistant_model": noisy_copy(target, 0.1), "tree": IRREGULAR}
    assert assert_same_outcome(target, inputs, speculates, max_length=12) is None
    assert assert_same_outcome(target, inputs, speculates, max_length=13) is IndexError
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


def test_rotary_embeddings_have_no_last_position() -> None:
    """A perfect draft fills every tree, past what the target's config says, but not past what its own says."""
    target = target_of("llama")
    perfect = copy.deepcopy(target)
    perfect.config.max_position_embeddings = 1000
    for draft, depth in ((perfect, 3), (NgramDraft(), 0)):
        inputs, speculates = prompts(1, PROMPT), {"assistant_model": draft, "tree": CHAIN}
        assert assert_same_outcome(target, inputs, speculates, max_new_tokens=29) is None
        assert hf_specdec.last_metrics().accepted_per_step == [[depth] * 7] or not depth


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model of a user's own, whose rotary embedding takes no positions past those of the config."""
    target = target_of("llama")
    rotary = target.model.rotary_emb
    forward = rotary.forward

    def refuses(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if int(position_ids.max()) >= POSITIONS:
            raise ValueError(f"no position {int(position_ids.max())}")
        return forward(x, position_ids)

    monkeypatch.setattr(rotary, "forward", refuses)
    return target


@pytest.mark.parametrize("draft", ["n-grams", "longer draft", "head"])
@pytest.mark.some_cases(1)
def test_rotary_embeddings_that_refuse_more(refusing: PreTrainedModel, draft: str) -> None:
    speculates, inputs = drafting(draft, refusing), prompts(1, PROMPT)
    end = int(refusing.generate(**inputs, do_sample=False, max_new_tokens=3)[0, 14])
    assert assert_same_outcome(refusing, inputs, speculates, max_new_tokens=20, eos_token_id=end) is None
    assert assert_same_outcome(refusing, inputs, speculates, max_new_tokens=20) is ValueError
    assert batch_outcomes(refusing, speculates) == {None, ValueError}
    outputs = refusing.generate_batch(
        inputs["input_ids"].tolist(),
        **speculates,
        max_new_tokens=20,
        eos_token_id=end,
        do_sample=False,
        continuous_batching_config=limits(),
    )
    (output,) = outputs.values()
    assert output.error is None and output.generated_tokens[-1] == end


def test_a_draft_that_refuses_more(refusing: PreTrainedModel) -> None:
    target, inputs = tiny_model(seed=1, dtype=torch.float32), prompts(1, PROMPT)
    speculates = {"assistant_model": refusing, "tree": CHAIN}
    assert assert_same_outcome(target, inputs, speculates, max_new_tokens=20) is None
    outputs = target.generate_batch(inputs["input_ids"].tolist(), **speculates, max_new_tokens=20, do_sample=False)
    (output,) = outputs.values()
    assert output.error is None and len(output.generated_tokens) == 20


def test_requests_as_long_as_the_table() -> None:
    """The last token is not forwarded: one more than the table has rows is still a text."""
    target, inputs = target_of("gpt2"), prompts(1, PROMPT)
    text = target.generate(**inputs, do_sample=False, max_new_tokens=POSITIONS + 1 - PROMPT)[0, PROMPT:].tolist()
    options = {"assistant_model": NgramDraft(), "do_sample": False}
    outputs = target.generate_batch(inputs["input_ids"].tolist(), max_new_tokens=len(text), **options)
    assert [output.generated_tokens for output in outputs.values()] == [text]


@pytest.mark.parametrize("draft", ["n-grams", "longer draft", "head", "itself"])
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.some_cases(3)
def test_requests_that_go_past_the_table(family: str, draft: str) -> None:
    """Each ends as alone in plain `generate`, with the tokens that its streamer has had; the others go on."""
    target = target_of(family)
    speculates = {"assistant_model": target, "tree": CHAIN} if draft == "itself" else drafting(draft, target)
    texts = prompts(5, PROMPT)["input_ids"].tolist()
    texts = [text[:length] for text, length in zip(texts, (12, 4, 16, 9, 15), strict=True)]
    room = POSITIONS + 1 - len(texts[0])
    end = int(target.generate(torch.tensor([texts[0]]), do_sample=False, max_new_tokens=room)[0, 14])
    options = {"max_new_tokens": 20, "eos_token_id": end}
    errors = []
    with target.init_continuous_batching(**speculates, continuous_batching_config=limits()) as manager:
        names = [manager.add_request(text, do_sample=False, **options) for text in texts]
        for text, name in zip(texts, names, strict=True):
            error, streamed, _ = outcome(target, {"input_ids": torch.tensor([text])}, **options)
            output = manager.get_result(name, timeout=60)
            assert output.generated_tokens == [token for column in streamed[1:] for token in column]
            assert (output.error is None) == (error is None)
            assert error is None or output.error.startswith("IndexError: the target knows 16 positions")
            errors.append(error)
        assert None in errors and set(errors) != {None}
        with pytest.raises(ValueError, match="`input_ids`: the prompt of 17 tokens is longer than the 16 positions"):
            manager.add_request([5] * 17, max_new_tokens=1)


def test_a_rotary_embedding_by_the_name_of_a_table() -> None:
    target = target_of("llama")
    target.model.pos_emb = target.model.rotary_emb
    assert num_positions(target) is None


def test_a_table_that_has_more_positions_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the text goes on as the plain one, without drafts."""
    target = tiny_model("gpt2", dtype=torch.float32)
    monkeypatch.setattr("hf_specdec.generation.target.num_positions", lambda model: POSITIONS)
    speculates = {"assistant_model": noisy_copy(target, 0.1), "tree": IRREGULAR}
    for padding in (False, True):
        inputs = prompts(2, PROMPT, padding=padding)
        assert assert_same_outcome(target, inputs, speculates, max_new_tokens=20) is None
        assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("draft", ["noisy", "longer draft", "head"])
@pytest.mark.some_cases(1)
def test_captured_steps(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their nodes, catch-up rows and resting rows have positions that the table has."""
    pytest.importorskip("triton", reason="the kernels need triton")
    steps, target = install(monkeypatch, with_kernel=True), target_of("gpt2")
    speculates = {"assistant_model": noisy_copy(target, 0.1), "tree": IRREGULAR}
    if draft != "noisy":
        speculates = drafting(draft, target)
    assert batch_outcomes(target, speculates) == {None, IndexError}
    inputs = prompts(1, PROMPT)
    end = int(target.generate(**inputs, do_sample=False, max_new_tokens=3)[0, 14])
    assert assert_same_outcome(target, inputs, speculates, max_new_tokens=20, eos_token_id=end) is None
    assert assert_same_outcome(target, inputs, speculates, max_new_tokens=20) is IndexError
    assert steps.replays > 0


def test_sampled_texts_that_end_there() -> None:
    """They follow p: what is cut off depends on the depth alone, not on what was drawn."""
    sizes = {"vocab_size": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "max_position_embeddings": 7}
    target = tiny_model("gpt2", sharpness=20.0, **sizes)
    draft = noisy_copy(target, 0.4)
    tree = "[(0,), (1,), (0,0), (1,0), (0,0,0), (0,0,0,0)]"
    config = SpeculativeConfig(tree=tree, verification="rejection")
    tokens = sample_tokens(target, FOUR_TOKENS, 2_000, 4, assistant_model=draft, speculative_config=config)
    assert fit(tokens[0], enumerate_tokens(target, FOUR_TOKENS, 4)).p_value > 1e-4
