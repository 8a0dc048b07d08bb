"""The kernels' draft tokens against the library's own drafting, and against the enumerated law of ordered draws."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support.exact import SIGNIFICANCE, fit
from support.tables import ordered_draws

from hf_specdec.drafters.growth import best_tokens
from hf_specdec_kernels import draft_tokens


def test_best_tokens_are_the_librarys() -> None:
    logits = torch.randn(3, 4, 50)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    tokens, log_probabilities = draft_tokens(logits, 6, temperature=temperature)
    expected_tokens, expected = best_tokens(logits / temperature[:, None, None], 6)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probabilities, expected)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_have_the_law_of_ordered_draws(count: int) -> None:
    vocab, samples = 5, 12_000
    scores = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    logits = scores.expand(samples, 1, -1).contiguous()
    tokens, log_probabilities = draft_tokens(logits, count, noise=torch.empty_like(logits).exponential_())
    law = torch.zeros([vocab] * count, dtype=torch.float64)
    drawn, probabilities = ordered_draws(scores.double().softmax(-1).numpy(), count)
    for order, probability in zip(drawn.tolist(), probabilities, strict=True):
        law[tuple(order)] = probability
    assert len(drawn) == len(list(permutations(range(vocab), count)))
    assert fit(tokens[:, 0], law).p_value > SIGNIFICANCE
    torch.testing.assert_close(log_probabilities[:, 0], scores.log_softmax(-1)[tokens[:, 0]])


def test_the_right_noise_matters() -> None:
    """Normal noise in place of the logarithm of exponential noise: found."""
    scores = torch.tensor([1.0, 0.0, -1.0])
    logits = scores.expand(12_000, 1, -1).contiguous()
    tokens, _ = draft_tokens(logits, 1, noise=torch.randn_like(logits).exp())
    assert fit(tokens[:, 0], scores.double().softmax(-1)).p_value < SIGNIFICANCE
