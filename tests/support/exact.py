"""
Distributions of generated text: enumerated exactly, sampled cheaply, and a test of one against the other.

The test is Pearson's chi-square over whole token strings. Rare strings are pooled with those that differ from them in
the last token only, what is still rare with those that differ in the last two, and so on. Its power is known: a bias
of total variation d (over the pooled strings) in N samples has a noncentrality of at least 4·N·d², whatever its form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList


SIGNIFICANCE = 1e-4
"""p-values below are failures. Seeds are fixed, so that a test passes always or never on one kind of machine."""

MIN_EXPECTED = 5.0


class FrequencyPenalty(LogitsProcessor):
    """Lowers the score of a token by `strength` for each time it stands in the text so far: a user's own processor."""

    def __init__(self, strength: float = 1.0):
        self.strength = strength

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.strength * counts


class StopAt(StoppingCriteria):
    """Ends all texts of a batch at `length` tokens, while trees may reach past it."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


# ----------------------------------------------------------------------------------------------- texts of a real model


@torch.no_grad()
def enumerate_tokens(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    length: int,
    vocab: int | None = None,
    **generate_kwargs: Any,
) -> torch.Tensor:
    """
    The joint distribution of the next `length` tokens of one prompt (`[1, tokens]`), `[vocab] * length` float64.

    Every prefix is given to plain `generate` as a prompt of its own, for one token: its processed scores are the
    distribution after that prefix, by definition of what `generate` does. (So options that count from the end of the
    prompt, such as `min_new_tokens`, are not for this function.) With `vocab`, only the first so many tokens count.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    others = {name: values for name, values in inputs.items() if name not in ("input_ids", "attention_mask")}
    vocab = model.config.get_text_config(decoder=True).vocab_size if vocab is None else vocab
    prefixes = torch.empty(1, 0, dtype=torch.long)
    joint = torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        rows = len(prefixes)
        outputs = model.generate(
            input_ids=torch.cat([ids.expand(rows, -1), prefixes], dim=1),
            attention_mask=torch.cat([mask.expand(rows, -1), torch.ones_like(prefixes)], dim=1),
            **{name: values.expand(rows, *values.shape[1:]) for name, values in others.items()},
            **({"top_k": 0} | generate_kwargs),
            do_sample=True,
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        joint = (joint[:, None] * outputs.scores[0][:, :vocab].double().softmax(dim=-1)).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(rows)[:, None]], dim=1)
    return joint.view([vocab] * length)


def sample_tokens(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    rows: int,
    length: int,
    seed: int = 0,
    spare: int = 2,
    **generate_kwargs: Any,
) -> torch.Tensor:
    """
    The first `length` tokens of `rows` texts sampled after every prompt of `inputs`, `[prompts, rows, length]`.

    All rows go through one `generate` call: rows are independent. It may generate `spare` more tokens than it returns,
    since a tree never reaches past the end of the text.
    """
    torch.manual_seed(seed)
    repeated = {name: values.repeat_interleave(rows, dim=0) for name, values in inputs.items()}
    prompt = inputs["input_ids"].shape[1]
    ids = model.generate(
        **repeated,
        **({"top_k": 0} | generate_kwargs),
        do_sample=True,
        max_new_tokens=length + spare,
        stopping_criteria=StoppingCriteriaList([StopAt(prompt + length)]),
    )
    return ids[:, prompt : prompt + length].view(-1, rows, length)


# ----------------------------------------------------------------------------------------------------- goodness of fit


@dataclass(frozen=True)
class Fit:
    """
    How well samples fit a distribution.

    Args:
        samples (`int`): their number.
        cells (`int`): cells after pooling.
        statistic (`float`): Pearson's chi-square.
        total_variation (`float`): between the observed shares and the expected ones, over the cells.
        noise (`float`): what `total_variation` is on average for exact samples.
        rare (`float`):
            Probability, for exact samples, of at least as many as were seen of the strings that are too rare for a
            cell even together; 0 if a string came out whose probability is 0.
    """

    samples: int
    cells: int
    statistic: float
    total_variation: float
    noise: float
    rare: float = 1.0

    @property
    def p_value(self) -> float:
        """
        Probability of such a statistic, or such a number of rare strings, or a larger one, if the samples are exact.
        """
        common = float(scipy.stats.chi2.sf(self.statistic, self.cells - 1)) if self.cells > 1 else 1.0
        return common if self.rare == 1.0 else min(1.0, 2 * min(common, self.rare))

    @property
    def detectable(self) -> float:
        """Every bias of at least this total variation is found with probability > 0.99; see `detectable_bias`."""
        return detectable_bias(self.samples, self.cells)


def fit(tokens: torch.Tensor, expected: torch.Tensor) -> Fit:
    """
    Fits samples `[samples, length]` (or `[samples]`) to their expected distribution (`[vocab] * length`).
    """
    expected = expected.double()
    tokens = tokens.reshape(len(tokens), -1)
    place = torch.zeros(len(tokens), dtype=torch.long)
    for column, size in zip(tokens.unbind(1), expected.shape, strict=True):
        place = place * size + column
    observed = torch.bincount(place, minlength=expected.numel()).view(expected.shape)
    return fit_counts(observed.numpy(), expected.numpy())


def fit_counts(observed: np.ndarray, expected: np.ndarray) -> Fit:
    """Fits counts to probabilities, both of shape `[values] * length`."""
    samples = int(observed.sum())
    if not np.isclose(expected.sum(), 1.0, atol=1e-6):
        raise ValueError(f"The expected probabilities sum to {expected.sum()}.")
    cells, (rare_count, rare_share) = _pooled(observed.astype(float), expected * samples)
    if observed[expected == 0].any():
        rare = 0.0
    elif rare_count == 0:
        rare = 1.0
    else:
        rare = float(scipy.stats.binom.sf(rare_count - 1, samples, rare_share / samples))
    if len(cells) == 0:
        raise ValueError(f"{samples} samples are too few: no cell has an expected count of {MIN_EXPECTED:g}.")
    # In the statistic, what is left over is part of the smallest cell.
    smallest = cells[:, 1].argmin()
    cells[smallest] += (rare_count, rare_share)
    counts, shares = cells.T
    differences, probabilities = counts - shares, np.minimum(shares / samples, 1.0)
    noise = np.sqrt(2 * probabilities * (1 - probabilities) / (np.pi * samples)).sum() / 2
    statistic = float((differences**2 / shares).sum())
    return Fit(samples, len(cells), statistic, float(np.abs(differences).sum() / 2 / samples), float(noise), rare)


def combine(fits: Iterable[Fit]) -> Fit:
    """One fit for several independent ones: their statistics and degrees of freedom add up."""
    fits = list(fits)
    samples = sum(one.samples for one in fits)
    rare = [one.rare for one in fits if one.rare < 1.0]
    return Fit(
        samples,
        sum(one.cells - 1 for one in fits) + 1,
        sum(one.statistic for one in fits),
        sum(one.total_variation * one.samples for one in fits) / samples,
        sum(one.noise * one.samples for one in fits) / samples,
        min(1.0, len(rare) * min(rare)) if rare else 1.0,
    )


def detectable_bias(samples: int, cells: int, significance: float = SIGNIFICANCE, power: float = 0.99) -> float:
    """
    The total variation from which on any bias gives a p-value below `significance` with probability `power`.

    With a bias b over cells of probability p, chi-square has noncentrality N·Σ b²/p ≥ N·(Σ |b|)² = 4·N·TV². Equality
    is the worst form that a bias can have, |b| in proportion to p; biases of other forms are found much earlier.
    """
    freedom = max(cells - 1, 1)
    threshold = scipy.stats.chi2.isf(significance, freedom)
    lack = scipy.optimize.brentq(
        lambda noncentrality: scipy.stats.ncx2.sf(threshold, freedom, noncentrality) - power, 1e-3, 1e5
    )
    return float(np.sqrt(lack / (4 * samples)))


def _pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Cells with an expected count of at least `MIN_EXPECTED`, pooled from the last token up, `[cells, 2]`: counts and
    expected counts; and those of what is left over, `[2]`.
    """
    cells, rare = [], np.stack([observed, expected], axis=-1)
    while True:
        enough = rare[..., 1] >= MIN_EXPECTED
        cells.append(rare[enough])
        rare = np.where(enough[..., None], 0.0, rare)
        if rare.ndim == 1:
            return np.concatenate(cells), rare
        rare = rare.sum(axis=-2)
