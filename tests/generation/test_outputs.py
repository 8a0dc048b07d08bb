"""What comes back besides the text: scores, states, several sequences per prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.calls import is_ragged
from support.models import noisy_copy, prompts, tiny_model
from support.parity import IRREGULAR, plain_text
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_specdec
from hf_specdec import SpeculativeConfig, TokenTree


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


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.some_cases(3)
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
@pytest.mark.some_cases(3)
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
