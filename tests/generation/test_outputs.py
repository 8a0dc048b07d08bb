"""What comes back besides the text: scores, states, several sequences per prompt, streams, metrics."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.calls import RecordingStreamer, is_ragged
from support.models import VOCAB, noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculationMetrics, SpeculativeConfig, TokenTree


PROMPT = 9
NEW_TOKENS = 18
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # scores are float32, as in plain `generate`
Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", seed=5, attention_sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target, noise=0.3)


def both(
    model: PreTrainedModel, draft: Any, inputs: Inputs, tree: Any = IRREGULAR, **options: Any
) -> tuple[GenerateDecoderOnlyOutput, GenerateDecoderOnlyOutput]:
    """The outputs of a speculative call and of the plain one, with equal text."""
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS} | options
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant_model=draft, tree=tree)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.speculation.num_accepted_tokens > 0
    if len(inputs["input_ids"]) > 1:
        assert is_ragged(ours.speculation)
    return ours, plain


def assert_close(mine: Any, theirs: Any, where: str = "") -> None:
    """Equal structure, shapes and dtypes all the way down, and values but for rounding."""
    assert type(mine) is type(theirs), where
    if isinstance(theirs, tuple):
        assert len(mine) == len(theirs), where
        for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(one, other, f"{where}[{place}]")
    elif theirs is not None:
        torch.testing.assert_close(mine, theirs, **CLOSE, msg=lambda text: f"{where}: {text}")


# --------------------------------------------------------------------------------------------------- scores and states


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("processed", [False, True])
def test_scores_and_logits(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, processed: bool) -> None:
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3} if processed else {}
    ours, plain = both(target, draft, prompts(batch_size, PROMPT), output_scores=True, output_logits=True, **options)
    assert len(plain.scores) == NEW_TOKENS
    assert_close(ours.scores, plain.scores, "scores")
    assert_close(ours.logits, plain.logits, "logits")
    assert_close(ours.hidden_states, None, "hidden_states")
    scores_differ = any(not torch.equal(*pair) for pair in zip(plain.scores, plain.logits, strict=True))
    assert scores_differ == processed


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_hidden_states(family: str, batch_size: int) -> None:
    model = tiny_model(family, seed=5, attention_sharpness=3.0)
    inputs = prompts(batch_size, PROMPT)
    ours, plain = both(model, noisy_copy(model, noise=0.3), inputs, output_hidden_states=True)
    assert len(plain.hidden_states) == NEW_TOKENS
    assert plain.hidden_states[0][0].shape[:2] == (batch_size, PROMPT)
    assert_close(ours.hidden_states, plain.hidden_states, "hidden_states")
    assert ours.attentions is None and ours.scores is None


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_attentions(family: str, batch_size: int) -> None:
    """Weights over the committed tokens alone, as if there were no tree; Mistral's over a window (12) of them."""
    model = tiny_model(family, seed=5, attn_implementation="eager", attention_sharpness=3.0)
    ours, plain = both(model, noisy_copy(model, noise=0.3), prompts(batch_size, PROMPT), output_attentions=True)
    assert plain.attentions[1][0].shape == (batch_size, 4, 1, PROMPT + 1)
    assert plain.attentions[-1][0].shape[3] == (PROMPT + NEW_TOKENS - 1 if family == "llama" else 12)
    assert_close(ours.attentions, plain.attentions, "attentions")


def test_attentions_of_a_prompt_behind_a_cache() -> None:
    model = tiny_model("gemma3_text", seed=5, attn_implementation="eager", attention_sharpness=3.0)
    inputs = prompts(1, 20)
    outputs = []
    for options in ({}, {"assistant_model": noisy_copy(model, noise=0.3), "tree": IRREGULAR}):
        cache = DynamicCache(config=model.config)
        model(inputs["input_ids"][:, :15], past_key_values=cache)
        outputs.append(
            model.generate(
                **inputs,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
                output_attentions=True,
                **options,
            )
        )
    plain, ours = outputs
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert {weights.shape[3] for weights in plain.attentions[0]} == {11 + 5, 20}
    assert_close(ours.attentions, plain.attentions, "attentions")


def test_everything_at_once_for_a_padded_batch() -> None:
    model = tiny_model("llama", seed=5, attn_implementation="eager", attention_sharpness=3.0)
    inputs = prompts(2, PROMPT, padding=True)
    names = ("scores", "logits", "hidden_states", "attentions")
    ours, plain = both(model, noisy_copy(model, 0.3), inputs, **{f"output_{name}": True for name in names})
    # What padding attends to is nobody's business.
    visible = inputs["attention_mask"].bool()
    for name in ("scores", "logits"):
        assert_close(getattr(ours, name), getattr(plain, name), name)
    assert_close(ours.hidden_states[1:], plain.hidden_states[1:], "hidden_states")
    assert_close(ours.attentions[1:], plain.attentions[1:], "attentions")
    for mine, theirs in zip(ours.hidden_states[0], plain.hidden_states[0], strict=True):
        assert_close(mine[visible], theirs[visible])
    for mine, theirs in zip(ours.attentions[0], plain.attentions[0], strict=True):
        assert_close(mine.transpose(1, 2)[visible], theirs.transpose(1, 2)[visible])


def test_rows_that_end_early(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """A finished row has zeros for its padding; all else is plain `generate`'s."""
    inputs = prompts(3, PROMPT)
    text = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    end = next(token for token in text[0, PROMPT + 3 :].tolist() if token not in text[1, PROMPT:])
    ours, plain = both(target, draft, inputs, eos_token_id=end, output_scores=True, output_hidden_states=True)
    ended = plain.sequences[:, PROMPT:] == 0
    assert ended[0].any() and not ended[1].any()
    for column, padding in enumerate(ended.T):
        assert_close(ours.scores[column][~padding], plain.scores[column][~padding])
        assert not ours.scores[column][padding].any()
        for mine, theirs in zip(ours.hidden_states[column], plain.hidden_states[column], strict=True):
            assert mine.shape == theirs.shape
            assert_close(mine[~padding], theirs[~padding])
            assert not mine[padding].any()


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_transition_scores(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, normalize: bool) -> None:
    ours, plain = both(target, draft, prompts(batch_size, PROMPT), output_scores=True)
    mine, theirs = (
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=normalize)
        for out in (ours, plain)
    )
    assert mine.shape == (batch_size, NEW_TOKENS)
    assert_close(mine, theirs)


def test_the_output_is_transformers_own_and_more(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    ours, plain = both(target, draft, prompts(1, PROMPT))
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert isinstance(ours, hf_specdec.SpeculativeGenerateOutput)
    assert set(ours.keys()) - {"speculation"} == set(plain.keys())
    assert ours.speculation is hf_specdec.last_metrics()
    assert not hasattr(plain, "speculation")


# -------------------------------------------------------------------------------------------------- several per prompt


def test_several_sequences_of_a_greedy_call(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """All would be equal: transformers refuses them, with a draft as without."""
    inputs = prompts(2, PROMPT, padding=True)
    for options in ({}, {"assistant_model": draft, "tree": IRREGULAR}):
        with pytest.raises(ValueError, match="num_return_sequences"):
            target.generate(**inputs, do_sample=False, num_return_sequences=2, max_new_tokens=3, **options)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("config", [{}, {"verification": "target"}, {"draft_sampling": "greedy"}], ids=str)
def test_several_sequences_of_a_sampling_call(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, config: dict[str, str]
) -> None:
    inputs = prompts(batch_size, PROMPT, padding=True)
    out = target.generate(
        **inputs,
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=NEW_TOKENS,
        assistant_model=draft,
        speculative_config=SpeculativeConfig(tree=TokenTree.from_branching((2, 2)), **config),
    )
    assert out.shape == (3 * batch_size, PROMPT + NEW_TOKENS)
    assert out[:, :PROMPT].tolist() == inputs["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in out[:3].tolist()}) == 3, "the sequences of a prompt are drawn independently"
    metrics = hf_specdec.last_metrics()
    assert metrics.num_accepted_tokens > 0
    assert len(metrics.accepted_per_step) == 3 * batch_size


def test_several_sequences_of_an_all_but_greedy_call(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Row by row what a greedy call gives: sampling among the single best token."""
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    out = target.generate(
        **inputs,
        do_sample=True,
        top_k=1,
        num_return_sequences=2,
        max_new_tokens=NEW_TOKENS,
        assistant_model=draft,
        tree=IRREGULAR.replace("(2,), ", "").replace("(2, 0), ", ""),
    )
    assert out.tolist() == expected.repeat_interleave(2, dim=0).tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


# --------------------------------------------------------------------------------------------- ways to give the prompt


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside input_ids"])
def test_inputs_embeds(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, beside: bool) -> None:
    """Embeddings that belong to no tokens; beside `input_ids` the draft has a prompt of its own."""
    inputs = prompts(batch_size, PROMPT, padding=batch_size > 1)
    embeds = target.get_input_embeddings()(inputs["input_ids"].flip(1)).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    if beside:
        given["input_ids"] = inputs["input_ids"]
    plain = target.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert plain.shape[1] == NEW_TOKENS + (PROMPT if beside else 0)
    assert_same_text(target, given, draft, expected=plain, max_new_tokens=NEW_TOKENS)
    from_tokens = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert plain[:, -NEW_TOKENS:].tolist() != from_tokens[:, -NEW_TOKENS:].tolist()


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_prefill_chunk_size(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, chunk: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=True)
    widths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        metrics = assert_same_text(
            target,
            inputs,
            draft,
            expected=plain_text(target, inputs, max_new_tokens=NEW_TOKENS),
            max_new_tokens=NEW_TOKENS,
            prefill_chunk_size=chunk,
        )
    finally:
        hook.remove()
    chunks = [min(chunk, PROMPT - start) for start in range(0, PROMPT, chunk)]
    prefill = widths[1 + NEW_TOKENS - 1 :][: len(chunks)]  # behind the plain call's prefill and steps
    assert prefill == chunks
    assert metrics.num_drafts > 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_token_types(batch_size: int) -> None:
    """GPT-2 adds an embedding for the type of a token; new ones are of the last one's type."""
    model = tiny_model("gpt2", seed=4, attention_sharpness=3.0)
    inputs = prompts(batch_size, PROMPT, padding=True)
    types = torch.randint(0, 61, (batch_size, PROMPT))
    untyped = plain_text(model, inputs, max_new_tokens=NEW_TOKENS)
    expected = plain_text(model, inputs | {"token_type_ids": types}, max_new_tokens=NEW_TOKENS)
    assert expected.tolist() != untyped.tolist()
    tree = TokenTree.from_branching((12, 3))  # wide, for a draft that gets no types
    assert_same_text(
        model, inputs | {"token_type_ids": types}, model, tree, expected=expected, max_new_tokens=NEW_TOKENS
    )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_prompts_of_one_token(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int) -> None:
    for assistant in (draft, NgramDraft(min_ngram=1)):
        assert_same_text(target, prompts(batch_size, 1), assistant, max_new_tokens=30)


def test_masks_with_holes(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Padding on the right, and in the middle."""
    inputs = prompts(2, PROMPT)
    inputs["attention_mask"][0, 7:] = 0
    inputs["attention_mask"][1, 3:5] = 0
    unmasked = plain_text(target, {"input_ids": inputs["input_ids"]}, max_new_tokens=NEW_TOKENS)
    for kind in (torch.long, torch.bool, torch.float32):
        given = inputs | {"attention_mask": inputs["attention_mask"].to(kind)}
        expected = plain_text(target, given, max_new_tokens=NEW_TOKENS)
        assert expected.tolist() != unmasked.tolist()
        assert_same_text(target, given, draft, expected=expected, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize(
    "positions", [torch.arange(PROMPT)[None] + 30, torch.stack([torch.arange(PROMPT), 2 * torch.arange(PROMPT)])]
)
def test_given_positions(target: PreTrainedModel, draft: PreTrainedModel, positions: torch.Tensor) -> None:
    """Positions that do not count the tokens: those of the tree go on from the last."""
    assert_same_text(target, prompts(2, PROMPT) | {"position_ids": positions}, draft, max_new_tokens=NEW_TOKENS)


def test_calls_in_inference_mode(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """What a first call leaves behind for later ones does not hinder them outside."""
    for tree in ("[(0,), (2,), (2, 1), (2, 1, 0)]", DynamicTree(depth=3, top_k=2, num_nodes=5)):
        with torch.inference_mode():
            assert_same_text(target, prompts(2, PROMPT), draft, tree, max_new_tokens=NEW_TOKENS)
        assert_same_text(target, prompts(2, PROMPT), draft, tree, max_new_tokens=NEW_TOKENS)


def test_no_prompt_at_all(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """`generate()` starts from the token that begins a text."""
    plain = target.generate(max_new_tokens=NEW_TOKENS, do_sample=False, bos_token_id=1)
    out = target.generate(
        max_new_tokens=NEW_TOKENS, do_sample=False, bos_token_id=1, assistant_model=draft, tree=IRREGULAR
    )
    assert out.tolist() == plain.tolist()
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


# --------------------------------------------------------------------------------------------------- ways to configure


@pytest.mark.parametrize(
    "speculation",
    [
        {"tree": IRREGULAR},
        {"tree": DynamicTree(depth=3, top_k=2, num_nodes=6)},
        {"speculative_config": SpeculativeConfig(tree=IRREGULAR)},
    ],
    ids=str,
)
def test_generation_config_objects(
    target: PreTrainedModel, draft: PreTrainedModel, speculation: dict[str, Any], tmp_path: Any
) -> None:
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **speculation)
    config.save_pretrained(tmp_path)
    for given in (config, GenerationConfig.from_pretrained(tmp_path)):
        before = given.to_dict()
        text = target.generate(**inputs, generation_config=given, assistant_model=draft)
        assert text.tolist() == expected.tolist()
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
        assert given.to_dict() == before


def test_the_models_own_generation_config(draft: PreTrainedModel) -> None:
    model = tiny_model("llama", seed=5, attention_sharpness=3.0)
    inputs = prompts(1, PROMPT)
    expected = plain_text(model, inputs, max_new_tokens=NEW_TOKENS)
    model.generation_config.tree = IRREGULAR
    model.generation_config.max_new_tokens = NEW_TOKENS
    out = model.generate(**inputs, do_sample=False, assistant_model=draft)
    assert out.tolist() == expected.tolist()
    assert max(map(max, hf_specdec.last_metrics().accepted_per_step)) <= 4
    with pytest.raises(ValueError, match="`tree`=.*without a draft"):
        model.generate(**inputs, do_sample=False)


def test_a_call_does_not_mark_the_model(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    before = target.generation_config.to_dict(), draft.generation_config.to_dict()
    assert_same_text(target, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
    assert (target.generation_config.to_dict(), draft.generation_config.to_dict()) == before
    assert target.generation_config.tree is None


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("extra", [1, 2, 3, 7, 18])
def test_max_length(target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, extra: int) -> None:
    inputs = prompts(batch_size, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)[:, : PROMPT + extra]
    for assistant in (draft, target, NgramDraft()):
        text = target.generate(
            **inputs, max_length=PROMPT + extra, do_sample=False, assistant_model=assistant, tree=IRREGULAR
        )
        assert text.tolist() == expected.tolist()


def test_positions_up_to_the_models_last() -> None:
    """A tree near the last position that the models know: no node may lie beyond it."""
    model = tiny_model("gpt2", seed=0, attention_sharpness=3.0, max_position_embeddings=32)
    for batch_size in (1, 3):
        inputs = prompts(batch_size, PROMPT, padding=True)
        for assistant in (model, noisy_copy(model, 0.05), noisy_copy(model, 0.2), NgramDraft(min_ngram=1)):
            metrics = assert_same_text(model, inputs, assistant, max_length=32)
            assert metrics.num_drafts > 0


def test_a_draft_that_knows_fewer_positions() -> None:
    target = tiny_model("llama", seed=5, attention_sharpness=3.0)
    draft = tiny_model("gpt2", seed=4, attention_sharpness=3.0, max_position_embeddings=16)
    inputs = prompts(2, PROMPT, padding=True)
    expected = plain_text(target, inputs, max_new_tokens=40)
    out = target.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=draft, tree=IRREGULAR)
    assert out.tolist() == expected.tolist()


# ----------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("assistant", ["draft", "self", "ngram"])
def test_streaming(target: PreTrainedModel, draft: PreTrainedModel, assistant: str) -> None:
    """The streamer gets the very calls of plain `generate`: the prompt, then token by token, then the end."""
    inputs = prompts(1, PROMPT)
    plain, ours = RecordingStreamer(), RecordingStreamer()
    target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=plain)
    assistant_model = {"draft": draft, "self": target, "ngram": NgramDraft(min_ngram=1)}[assistant]
    target.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        streamer=ours,
        assistant_model=assistant_model,
        tree=IRREGULAR,
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert ours.log == plain.log
    assert len(ours.log) == 1 + NEW_TOKENS + 1


# ------------------------------------------------------------------------------------------------------------- metrics

RUNS = {
    "chain": (TokenTree.chain(3), {}),
    "irregular": (TokenTree.parse(IRREGULAR), {}),
    "dynamic": (DynamicTree(depth=3, top_k=3, num_nodes=9), {}),
    "drawn": (TokenTree.from_branching((3, 2, 1)), {"do_sample": True}),
    "drawn, dynamic": (DynamicTree(depth=3, top_k=3, num_nodes=9), {"do_sample": True}),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_agree_with_the_text(
    target: PreTrainedModel, draft: PreTrainedModel, batch_size: int, run: str
) -> None:
    tree, options = RUNS[run]
    out = target.generate(
        **prompts(batch_size, PROMPT, padding=True),
        max_new_tokens=NEW_TOKENS,
        assistant_model=draft,
        tree=tree,
        **{"do_sample": False} | options,
    )
    metrics = hf_specdec.last_metrics()
    assert len(metrics.accepted_per_step) == batch_size
    for row in metrics.accepted_per_step:
        # The first token comes from the prefill; each step gives what it accepted, and one more.
        assert 1 + sum(accepted + 1 for accepted in row) == out.shape[1] - PROMPT == NEW_TOKENS
        assert max(row) <= tree.depth
    steps = [accepted for row in metrics.accepted_per_step for accepted in row]
    assert metrics.num_drafts == len(steps)
    assert 0 < metrics.num_accepted_tokens == sum(steps) <= metrics.num_draft_tokens
    assert metrics.num_draft_tokens <= metrics.num_drafts * tree.num_nodes
    assert metrics.mean_acceptance_length == pytest.approx(1 + sum(steps) / len(steps))
    assert metrics.draft_acceptance_rate == pytest.approx(sum(steps) / metrics.num_draft_tokens)
    shares = [sum(accepted >= depth for accepted in steps) / len(steps) for depth in range(1, max(steps) + 1)]
    assert metrics.acceptance_per_position == pytest.approx(shares)
    assert sum(metrics.acceptance_per_position) == pytest.approx(metrics.mean_acceptance_length - 1)
    assert set(metrics.seconds) == {"prefill", "propose", "score", "accept", "commit"}
    assert min(metrics.seconds.values()) > 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_of_texts_that_end(target: PreTrainedModel, batch_size: int) -> None:
    """What is accepted behind an end is not part of the text, and does not count."""
    inputs = prompts(batch_size, PROMPT)
    text = plain_text(target, inputs, max_new_tokens=NEW_TOKENS)
    for place in range(2, 9):
        end = int(text[0, PROMPT + place])
        out = target.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=end,
            assistant_model=target,
            tree=TokenTree.chain(4),
        )
        metrics = hf_specdec.last_metrics()
        for row, steps in zip(out[:, PROMPT:].tolist(), metrics.accepted_per_step, strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            tokens = 1 + sum(accepted + 1 for accepted in steps)
            # A step that ends in an accepted end token has no token of its own.
            assert tokens - length in (0, 1)
            assert tokens == length or (end in row and steps[-1] > 0)
        assert metrics.num_accepted_tokens == sum(map(sum, metrics.accepted_per_step))


def test_metrics_without_drafts(target: PreTrainedModel) -> None:
    out = target.generate(
        **prompts(2, PROMPT),
        max_new_tokens=6,
        do_sample=False,
        assistant_model=target,
        speculative_config=SpeculativeConfig(tree="[(0,)]", disable_by_batch_size=1),
    )
    metrics = hf_specdec.last_metrics()
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (0, 0, 0)
    assert metrics.accepted_per_step == [[0] * 5] * 2
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.draft_acceptance_rate == 0.0
    assert metrics.acceptance_per_position == []
    assert out.shape[1] == PROMPT + 6


def test_last_metrics_are_those_of_the_thread(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    assert_same_text(target, prompts(1, PROMPT), draft, max_new_tokens=NEW_TOKENS)
    mine = hf_specdec.last_metrics()
    seen: list[SpeculationMetrics | None] = []

    def another_thread() -> None:
        seen.append(hf_specdec.last_metrics())
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, do_sample=False)  # a plain call does not count
        seen.append(hf_specdec.last_metrics())
        target.generate(**prompts(1, PROMPT), max_new_tokens=4, do_sample=False, assistant_model=draft, tree="[(0,)]")
        seen.append(hf_specdec.last_metrics())

    thread = threading.Thread(target=another_thread)
    thread.start()
    thread.join()
    assert seen[:2] == [None, None]
    assert isinstance(seen[2], SpeculationMetrics)
    assert hf_specdec.last_metrics() is mine


def test_tokens_of_the_whole_vocabulary_can_be_drafted(target: PreTrainedModel) -> None:
    """The largest rank there is: every token is a child, so every draft is right."""
    tree = TokenTree.from_branching((VOCAB,))
    metrics = assert_same_text(target, prompts(2, PROMPT), tiny_model("llama", seed=9), tree, max_new_tokens=11)
    assert metrics.accepted_per_step == [[1] * 5] * 2


def test_a_streamer_that_writes_into_its_tokens(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """The text stays as it is, as in plain `generate`."""

    class Overwrites(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            value.fill_(0)

        def end(self) -> None:
            pass

    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    call = {"max_new_tokens": 12, "do_sample": False}
    text = target.generate(**inputs, **call, assistant_model=draft, tree="[(0,), (0, 0)]", streamer=Overwrites())
    assert torch.equal(text, target.generate(**inputs, **call))
