"""Targets with recurrent layers beside layers whose indexers pool keys: random trees, and caches that go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import limits

from hf_specdec import last_metrics
from hf_specdec.cache.index_keys import HoldsIndexKeys
from hf_specdec.compat import CACHE
from hf_specdec.forwards import selecting

from .building import tiny_model
from .images import with_images
from .modes import ROWS, TREE, prompts
from .registry import Pair
from .state_modes import PADDED, TOGETHER, outcome_of
from .test_faults import runner_of


FAMILIES = ("glm5_next", "qwen4_exp_text")


def skip_if_refused(family: str) -> None:
    if runner_of(family).outcome("n-grams").kind == "refused":
        pytest.skip("refused by this release's name of its layers")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [PADDED, TOGETHER])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees(family: str, mode: str) -> None:
    skip_if_refused(family)
    assert outcome_of(runner_of(family), mode, seed=1).kind == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, owner, name",
    [("glm5_next", selecting, "_select_along_paths"), ("qwen4_exp_text", HoldsIndexKeys, "positions_of")],
)
def test_the_order_of_keys_matters(family: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are pooled in the order of slots, or turned to other positions, give other texts."""
    skip_if_refused(family)

    def in_order_of_slots(*args: Any) -> torch.Tensor | None:
        return None if owner is selecting else args[1].expand(3, -1, -1) // 2

    monkeypatch.setattr(owner, name, in_order_of_slots)
    assert outcome_of(runner_of(family), PADDED, seed=1).kind == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_turns(family: str) -> None:
    """Plain `generate` goes on with the cache of a call with a draft, and a call with the cache of that."""
    skip_if_refused(family)
    model, found = runner_of(family).model, []
    for speculates in ((True, False, True), (False,) * 3):
        inputs, cache = prompts(ROWS), None
        for is_ours in speculates:
            options = {"assistant_model": runner_of(family).draft, "tree": TREE} if is_ours else {}
            out = model.generate(
                **inputs, do_sample=False, max_new_tokens=9, return_dict_in_generate=True, **{CACHE: cache}, **options
            )
            assert not is_ours or last_metrics().num_accepted_tokens > 0
            text, cache = torch.cat([out.sequences, prompts(ROWS)["input_ids"][:, -2:]], dim=1), out[CACHE]
            mask = inputs["attention_mask"]
            mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
            inputs = {"input_ids": text, "attention_mask": mask}
        found.append(text.tolist())
    assert found[0] == found[1]


@pytest.mark.slow
def test_images_beside_texts() -> None:
    """Indexers know the positions of an image in one row, and count along the text in another."""
    skip_if_refused("qwen4_exp_text")
    model = tiny_model(Pair("qwen4_exp", "Qwen4ExpForConditionalGeneration"))
    image = with_images(model, prompts(1))
    together: list[Any] = [image, image["input_ids"][0, :9].tolist()]
    options = {"do_sample": False, "max_new_tokens": 8}
    plain = [model.generate(**image, **options), model.generate(image["input_ids"][:, :9], **options)]
    found = model.generate_batch(
        together, assistant_model="ngram", tree=TREE, continuous_batching_config=limits(), **options
    )
    assert [output.error for output in found.values()] == [None, None]
    assert [output.generated_tokens for output in found.values()] == [text[0, -8:].tolist() for text in plain]
