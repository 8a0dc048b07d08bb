"""Classes in which texts once differed or calls crashed: each is exact now, or refused by name before a forward."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from hf_specdec.compat import NO_TREES
from hf_specdec.models.reasons import Reason

from .building import tiny_model
from .images import with_images
from .modes import PROMPT, ROWS, Outcome, Runner, prompts
from .registry import Pair, all_pairs


def pair_of(model_type: str) -> Pair:
    """The pair of an architecture, which old releases of transformers may lack."""
    pair = next((pair for pair in all_pairs() if pair.model_type == model_type), None)
    if pair is None:
        pytest.skip(f"this transformers has no {model_type}")
    return pair


@lru_cache(maxsize=4)
def runner_of(model_type: str) -> Runner:
    return Runner(tiny_model(pair_of(model_type)))


def assert_refused(outcome: Outcome, reason: str) -> None:
    assert outcome.kind == "refused", outcome
    assert reason in outcome.detail


@pytest.mark.parametrize("mode", ["tree", "padded batch", "generate_batch"])
@pytest.mark.parametrize("model_type", ["exaone4_5", "hyperclovax_vision_v2", "kosmos-2.5"])
@pytest.mark.some_cases(2)
def test_positions_that_generate_drops(model_type: str, mode: str) -> None:
    assert runner_of(model_type).outcome(mode).kind == "exact"


def test_masks_of_a_row() -> None:
    """XGLM's attention insists on a mask for every row."""
    runner = Runner(tiny_model(pair_of("xglm"), dtype=torch.float32))
    assert runner.outcome("padded batch").kind == runner.outcome("generate_batch").kind == "exact"


@pytest.mark.skipif("git" in NO_TREES, reason="refused")
def test_padding_behind_an_image() -> None:
    """GIT puts images before the padding of the prompt."""
    model = runner_of("git").model
    inputs = {rows: with_images(model, prompts(rows)) for rows in (1, ROWS)}
    assert Runner(model, inputs.__getitem__).outcome("padded batch").kind == "exact"
    assert_refused(runner_of("git").outcome("padded batch"), "masks other tokens")


@pytest.mark.parametrize(
    "model_type, mode, reason",
    [
        ("doge", "tree", "learned bias"),
        ("doge", "generate_batch", "learned bias"),
        ("roformer", "generate_batch", Reason.POSITIONS),
        ("idefics", "tree", Reason.CROSS_ATTENTION),
        ("kosmos-2", "generate_batch", Reason.MASK),
        ("deepseek_v4", "tree", Reason.SPARSE),
        ("rwkv", "tree", Reason.STATES),
    ],
)
def test_refusals(model_type: str, mode: str, reason: str) -> None:
    runner = runner_of(model_type)
    if model_type in ("idefics", "kosmos-2"):
        model = tiny_model(pair_of(model_type), dtype=torch.float32)
        runner = Runner(model, lambda rows: with_images(model, prompts(rows)))
    outcome = runner.outcome(mode)
    assert_refused(outcome, reason)
    assert model_type != "deepseek_v4" or "recurrent" not in outcome.detail


def test_cross_attention_of_an_inner_model() -> None:
    """BLIP's `generate` calls that of its text decoder, with the features of the image."""
    model = runner_of("blip").model
    inputs = with_images(model, prompts(1))
    assert Runner(model, lambda rows: inputs).outcome("n-grams").kind == "exact"


@pytest.mark.skipif("mllama_text_model" in NO_TREES, reason="refused")
def test_layers_that_attend_to_images() -> None:
    """Without an image they are left out."""
    model = tiny_model(Pair("mllama", "MllamaForConditionalGeneration"))
    assert {one.kind for one in Runner(model).outcomes(("padded batch", "generate_batch")).values()} == {"exact"}
    of_images = Runner(model, lambda rows: with_images(model, prompts(rows)))
    for mode in ("image, tree", "image, generate_batch"):
        assert_refused(of_images.outcome(mode), Reason.CROSS_ATTENTION)


def test_encoders_as_language_models() -> None:
    """Their prompts attend in both directions, which `generate` leaves to them."""
    runner = Runner(tiny_model(pair_of("bert"), sharpness=8.0, is_decoder=False))
    outcomes = runner.outcomes(("chain", "tree", "padded batch", "n-grams", "generate_batch"))
    assert {outcome.kind for outcome in outcomes.values()} == {"exact"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.some_cases(1)
def test_prompts_in_both_directions(implementation: str) -> None:
    """Eager attention has a causal mask for every prompt."""
    model = tiny_model(pair_of("paligemma"), seed=1, dtype=torch.float32)
    model.set_attn_implementation(implementation)
    outcomes = Runner(model).outcomes(("generate_batch", "generate_batch, n-grams"))
    assert {outcome.kind for outcome in outcomes.values()} == {"exact"}


@pytest.mark.skipif("moshi" in NO_TREES, reason="refused")
@pytest.mark.parametrize("window", [PROMPT, PROMPT // 2])
def test_prompts_that_are_read_without_a_window(window: int) -> None:
    """The text may come past it, or the prompt."""
    runner = Runner(tiny_model(pair_of("moshi"), sliding_window=window))
    assert runner.outcome("generate_batch").kind == runner.outcome("generate_batch, n-grams").kind == "exact"


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_TREES), reason="cannot be built with this release")
def test_diffusion() -> None:
    assert_refused(runner_of("diffusion_gemma").outcome("tree"), "diffusion")


@pytest.mark.parametrize("mode", ["tree", "generate_batch"])
def test_hybrids_with_attention_alone(mode: str) -> None:
    """What counts are the layers that exist, not the class."""
    attention = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    runner = Runner(tiny_model(pair_of("granitemoehybrid"), dtype=torch.float32, **attention))
    assert runner.outcome(mode).kind == "exact"
