"""The statistic of the sampling tests: it is fair to exact samples, and finds what it says it finds."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from support.exact import MIN_EXPECTED, SIGNIFICANCE, combine, detectable_bias, fit, fit_counts


def _law(shape: tuple[int, ...], sharpness: float, seed: int = 0) -> np.ndarray:
    weights = np.exp(sharpness * np.random.default_rng(seed).standard_normal(shape))
    return weights / weights.sum()


def _counts(law: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    return rng.multinomial(samples, law.flatten()).reshape(law.shape)


@pytest.mark.parametrize("samples", [500, 5_000])
@pytest.mark.parametrize("shape", [(16,), (8, 8), (6, 6, 6, 6)])
def test_exact_samples_pass(shape: tuple[int, ...], samples: int):
    """
    They fall below a level no more often than it says. (Less often where rare strings are counted by themselves.)
    """
    law, rng = _law(shape, sharpness=1.5), np.random.default_rng(1)
    p_values = np.array([fit_counts(_counts(law, samples, rng), law).p_value for _ in range(1_000)])
    for level in (0.1, 0.01, 0.001):
        most = scipy.stats.binom.isf(1e-3, 1_000, level)
        assert (p_values < level).sum() <= most
    assert (p_values < 0.1).mean() > 0.03


@pytest.mark.parametrize("cells", [16, 140])
def test_the_stated_power(cells: int):
    """A bias in its least visible form, as large as is said to be found, is found in 99 of 100 experiments."""
    samples = 2_000
    law = np.full(cells, 1 / cells)
    size = detectable_bias(samples, cells)
    biased = law + np.where(np.arange(cells) % 2 == 0, 1, -1) * 2 * size / cells
    assert np.abs(biased - law).sum() / 2 == pytest.approx(size)
    rng = np.random.default_rng(2)
    found = [fit_counts(_counts(biased, samples, rng), law).p_value < SIGNIFICANCE for _ in range(1_000)]
    assert np.mean(found) > 0.98


def test_pooling_keeps_every_sample():
    law, rng = _law((6, 6, 6), sharpness=2.5), np.random.default_rng(3)
    found = fit_counts(_counts(law, 2_000, rng), law)
    assert 10 < found.cells < law.size
    assert found.samples == 2_000 and found.cells * MIN_EXPECTED <= 2_000
    assert found.total_variation < 3 * found.noise


def test_what_cannot_come_out():
    law = np.array([0.5, 0.5, 0.0])
    assert fit_counts(np.array([500, 499, 1]), law).p_value == 0.0
    assert fit_counts(np.array([500, 500, 0]), law).p_value > 0.1


def test_what_hardly_ever_comes_out():
    """Too rare for a cell, and yet not to be overlooked."""
    law = np.array([1 - 1e-6, 1e-6])
    assert fit_counts(np.array([2_000, 0]), law).p_value == 1.0
    assert fit_counts(np.array([1_999, 1]), law).p_value < 0.01
    assert fit_counts(np.array([1_995, 5]), law).p_value < 1e-10


def test_tokens_are_counted_in_their_places():
    law = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    texts = torch.tensor([[0, 0]] * 100 + [[0, 1]] * 200 + [[1, 0]] * 300 + [[1, 1]] * 400)
    assert fit(texts, law).statistic == pytest.approx(0.0)
    assert fit(texts.flip(1), law).p_value < 1e-6


def test_combined_fits_find_what_each_alone_does_not():
    law = np.full(4, 0.25)
    biased = np.array([0.28, 0.26, 0.24, 0.22])
    rng = np.random.default_rng(4)
    fits = [fit_counts(_counts(biased, 400, rng), law) for _ in range(40)]
    assert min(one.p_value for one in fits) > SIGNIFICANCE
    assert combine(fits).p_value < SIGNIFICANCE
    assert combine(fits).samples == 16_000
