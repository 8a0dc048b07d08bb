"""The histogram of the Space: draws by steps with drafts have plain `generate`'s probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.models import noisy_copy
from transformers import PreTrainedModel


CONTEXT = [5, 9, 33, 7, 41, 12, 8]


def test_draws_have_the_exact_distribution(space: SimpleNamespace, target: PreTrainedModel) -> None:
    """And draws of another temperature are told from them."""
    torch.manual_seed(0)
    *_, draws = space.draws.draw(target, noisy_copy(target, noise=0.3), CONTEXT, 0.7)
    logits = target(torch.tensor([CONTEXT])).logits[0, -1].double()
    expected = (logits / 0.7).softmax(-1)
    assert torch.tensor(draws.exact[:-1]).allclose(expected[draws.tokens].float(), atol=1e-5)
    assert draws.total == space.draws.COUNT and sum(draws.accepted) > 0 and sum(draws.own) > 0
    assert draws.distance < draws.usual_distances()[1] * 1.3
    other = space.draws.Draws(draws.tokens, [*(p := (logits / 1.4).softmax(-1)[draws.tokens].tolist()), 1 - sum(p)])
    other.accepted, other.own = draws.accepted, draws.own
    assert other.distance > other.usual_distances()[1] * 1.3
    html = space.histogram.histogram_html("<draft>", draws, str)
    assert "400 of 400 draws" in html and "<draft>" not in html


def test_the_place_where_draws_tell_something(space: SimpleNamespace, target: PreTrainedModel) -> None:
    """Of all places, the one whose likeliest token `next_token_probabilities` has nearest to one half."""
    prompt, written = CONTEXT[:3], CONTEXT[3:]
    found = space.draws.telling_place(target, prompt, written, 0.7)
    best = [
        float(space.draws.next_token_probabilities(target, [*prompt, *written[:place]], 0.7).max())
        for place in range(len(written))
    ]
    assert found == min(range(len(written)), key=lambda place: abs(best[place] - 0.5))
    assert len(set(best)) == len(best)


def test_nothing_to_draw(space: SimpleNamespace, target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="temperature=0"):
        next(space.draws.draw(target, None, CONTEXT, 0.0))
    with pytest.raises(ValueError, match="context of 1"):
        next(space.draws.draw(target, None, [5], 1.0))
