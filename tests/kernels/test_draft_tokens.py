"""The kernels' draft tokens against the library's own drafting, and against the enumerated law of ordered draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, fit
from support.tables import ordered_draws

from hf_specdec.drafters.growth import best_tokens
from hf_specdec_kernels import Children, draft_tokens, draw_children
from hf_specdec_kernels.draft_tokens import exponential_noise_naive, naive


def test_best_tokens_are_the_librarys() -> None:
    logits = torch.randn(3, 4, 50)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    tokens, log_probabilities = draft_tokens(logits, 6, temperature=temperature)
    expected_tokens, expected = best_tokens(logits / temperature[:, None, None], 6)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probabilities, expected)


SCORES = 1.5 * torch.randn(5, generator=torch.Generator().manual_seed(1))
HEAT = 0.6


def drawn(count: int, seeds: torch.Tensor | None = None, **wrong: Any) -> Children:
    """Children of many rows with the same scores, at a temperature."""
    seeds = torch.empty(12_000, dtype=torch.long).random_() if seeds is None else seeds
    logits, heat = SCORES.expand(len(seeds), 1, -1), torch.full((len(seeds),), HEAT)
    return draw_children(logits, count, seeds, **{"temperature": heat, "with_best": True} | wrong)


def law_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The probability of every ordered draw."""
    law = torch.zeros([len(scores)] * count, dtype=torch.float64)
    orders, probabilities = ordered_draws(scores.double().softmax(-1).numpy(), count)
    for order, probability in zip(orders.tolist(), probabilities, strict=True):
        law[tuple(order)] = probability
    return law


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_have_the_law_of_ordered_draws(count: int) -> None:
    tokens, log_probabilities, best = drawn(count)
    assert fit(tokens[:, 0], law_of(SCORES / HEAT, count)).p_value > SIGNIFICANCE
    log_q = (SCORES / HEAT).log_softmax(-1)
    torch.testing.assert_close(log_probabilities[:, 0], log_q[tokens[:, 0]])
    torch.testing.assert_close(best[:, 0], log_q.topk(count).values.expand(len(best), -1))


def test_draws_of_queries_are_independent() -> None:
    """Nodes with the same q, in one level and in the next."""
    seeds = torch.empty(12_000, dtype=torch.long).random_()
    logits = SCORES[:3].expand(len(seeds), 2, -1)
    tokens = [draw_children(logits, 2, seeds, first_query=first).tokens for first in (0, 2)]
    law = law_of(SCORES[:3], 2)
    assert fit(tokens[0].flatten(1), law[:, :, None, None] * law).p_value > SIGNIFICANCE
    across = torch.cat([tokens[0][:, 1], tokens[1][:, 0]], dim=1)
    assert fit(across, law[:, :, None, None] * law).p_value > SIGNIFICANCE
    same = draw_children(logits, 2, seeds, first_query=1).tokens[:, 0]
    assert torch.equal(same, tokens[0][:, 1]), "the same number draws the same"


def test_first_draws_of_a_large_vocabulary() -> None:
    scores = 2 * torch.randn(1_000, generator=torch.Generator().manual_seed(4))
    tokens = draw_children(scores.expand(2, 1_500, -1), 1, torch.tensor([1, 2])).tokens
    assert fit(tokens.flatten(), scores.double().softmax(-1)).p_value > SIGNIFICANCE


def _with_replacement(keys: Any, log_q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.multinomial(log_q.exp().flatten(0, 1), count, replacement=True).view(*log_q.shape[:2], count)
    return tokens, log_q.gather(-1, tokens)


def _noise_too_loud(*args: Any) -> torch.Tensor:
    return exponential_noise_naive(*args) ** 1.2


def _noise_of_four_alike(*args: Any) -> torch.Tensor:
    noise = exponential_noise_naive(*args)
    return noise[..., torch.arange(noise.shape[-1]) // 4 * 4]


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("_first", _with_replacement),
        ("exponential_noise_naive", _noise_too_loud),
        ("exponential_noise_naive", _noise_of_four_alike),
        ("temperature", None),
        ("seeds", None),
    ],
)
def test_wrong_draws_are_found(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replacement; noise of a wrong scale, or shared; at another temperature; with seeds that come again."""
    if wrong is not None:
        monkeypatch.setattr(naive, name, wrong)
    options: dict[str, Any] = {"temperature": None} if name == "temperature" else {}
    seeds = torch.arange(12_000) % 500 if name == "seeds" else None
    tokens = drawn(2, seeds, **options).tokens
    assert fit(tokens[:, 0], law_of(SCORES / HEAT, 2)).p_value < SIGNIFICANCE
