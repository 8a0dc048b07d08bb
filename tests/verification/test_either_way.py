"""
Sampled calls whose steps take drawn trees or trees of best tokens in turn: against the enumerated distribution, and
with one seed always the same text.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.batches import ragged_prompts
from support.exact import SIGNIFICANCE
from support.models import prompts
from support.sampling import a_block_head, a_draft, a_head, fit_samples, the_target

from hf_specdec import SpeculativeConfig, TokenTree
from hf_specdec.drafters import BlockDrafter, EagleDrafter
from hf_specdec.trees.auto_choice import AutoChoice


CAUGHT = 1e-6
AUTO = SpeculativeConfig(tree="auto")
TREES = (
    TokenTree.parse("[(0,), (1,), (0,0), (0,1), (1,0)]"),
    TokenTree.chain(2),
    TokenTree.parse("[(0,), (1,), (2,)]"),
)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets "auto" take one of `TREES` and the other way at every step, and keeps whether it took best tokens."""
    taken: list[bool] = []
    steps = itertools.cycle(itertools.product(TREES, (False, True)))

    def chosen(choice: AutoChoice) -> TokenTree:
        tree, takes_best = next(steps)
        taken.append(takes_best)
        choice._way = choice._ways[takes_best]
        return tree

    monkeypatch.setattr(AutoChoice, "_chosen", chosen)
    return taken


class Unseeded(BlockDrafter):
    """Draws otherwise than by position, so that drawn trees are verified by rejection."""

    reads_noise = False


class UnseededEagle(EagleDrafter):
    """The same with an EAGLE head."""

    reads_noise = False


def drafts() -> dict[str, Any]:
    return {
        "block head": a_block_head("markov"),
        "head": a_head(5),
        "draft model": a_draft("noisy"),
        "block head, rejection": Unseeded(a_block_head("markov")),
        "head, rejection": UnseededEagle(a_head(5)),
    }


@pytest.mark.parametrize("kind", drafts())
def test_the_distribution_is_the_target_s(kind: str, ways: list[bool]) -> None:
    found = fit_samples(AUTO, drafts()[kind], "temperature", rows=600)
    assert found.p_value > SIGNIFICANCE, found
    assert {True, False} == set(ways)


class ClaimsToDraw(Unseeded):
    """Fills trees with the best tokens, and has them verified as if they had been drawn."""

    def grow(self, tree: Any, root_logits: torch.Tensor, depth: int, warp: Any = None, *drawing: Any) -> Any:
        draft = super().grow(tree, root_logits, depth, self.request._warp, *drawing)
        draft.tokens, draft.valid = super().grow(tree, root_logits, depth).tokens, None
        return draft


def test_best_tokens_verified_as_if_drawn_are_caught(ways: list[bool]) -> None:
    found = fit_samples(AUTO, ClaimsToDraw(a_block_head("dflash")), "plain", rows=2_000)
    assert found.p_value < CAUGHT, found


@pytest.mark.parametrize("kind", ["block head", "head", "draft model"])
def test_a_seed_gives_one_text(kind: str, ways: list[bool]) -> None:
    """The second call begins with the other way: the text stays, in a call and among requests."""
    texts, steps = list[Any](), list[int]()
    options: dict[str, Any] = {"assistant_model": drafts()[kind], "speculative_config": AUTO, "do_sample": True}
    batch = ragged_prompts((3, 6))
    batch = [[token % 8 for token in prompt] for prompt in batch]
    inputs = {name: values % 8 for name, values in prompts(2, 5).items()}
    for _ in range(2):
        torch.manual_seed(3)
        text = the_target().generate(**inputs, max_new_tokens=12, pad_token_id=0, **options).tolist()
        outputs = the_target().generate_batch(batch, max_new_tokens=12, **options)
        texts.append((text, [output.generated_tokens for output in outputs.values()]))
        steps.append(len(ways))
        if steps[0] % (2 * len(TREES)) == 0:  # the second time, other steps have other trees
            the_target().generate(**inputs, max_new_tokens=2, pad_token_id=0, **options)
    assert texts[0] == texts[1]


def test_requests_are_verified_as_they_were_drafted(ways: list[bool]) -> None:
    """Of requests whose drafts are drawn and verified by rejection, steps with best tokens are not."""
    options: dict[str, Any] = {"assistant_model": Unseeded(a_block_head("markov")), "speculative_config": AUTO}
    outputs = the_target().generate_batch([[5, 3, 7], [1, 2]], do_sample=True, max_new_tokens=12, **options)
    assert all(output.error is None and len(output.generated_tokens) == 12 for output in outputs.values())
    assert {True, False} == set(ways)
