"""`assistant_model="…"`: a name is as good as the draft that `load_draft` makes of it."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle import GOLDENS
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from transformers import PreTrainedModel, pipeline

import hf_specdec
from hf_specdec import load_draft
from hf_specdec.generation.named_drafts import named_draft
from hf_specdec.metrics import set_last_metrics


NAMES = [*(str(GOLDENS / name) for name in ("specforge_eagle3", "dspark", "medusa")), "ngram", str(TINY_TARGET)]
TREE = "[(0,), (1,), (0, 0)]"


@pytest.fixture
def target() -> PreTrainedModel:
    """A target of its own: what is loaded is kept with it."""
    return copy.deepcopy(trained_target())


def call(target: PreTrainedModel, assistant: Any, **options: Any) -> Any:
    ids = torch.tensor(trained_prompts()["prompts"][:1])
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True} | options
    return target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: Path(name).name)
@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.some_cases(3)
def test_calls(target: PreTrainedModel, name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = call(target, load_draft(name), tree=TREE, **how)
    torch.manual_seed(3)
    found = call(target, name, tree=TREE, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.speculation.accepted_per_step == expected.speculation.accepted_per_step
    ids = torch.tensor(trained_prompts()["prompts"][:1])
    positional = target.generate(ids, None, None, None, None, None, name, tree="chain:1", max_new_tokens=4)
    assert torch.equal(positional, found.sequences[:, : positional.shape[1]]) or how["do_sample"]


@pytest.mark.parametrize("name", [str(GOLDENS / "dflash"), GOLDENS / "specforge_eagle3", "ngram"], ids=str)
def test_without_a_tree(target: PreTrainedModel, name: Any) -> None:
    assert call(target, name).speculation.num_drafts > 0
    assert torch.equal(call(target, name).sequences, call(target, None).sequences)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_language_model_without_a_tree(target: PreTrainedModel, num_beams: int) -> None:
    """It is transformers' own assisted generation, as with the model itself."""
    set_last_metrics(None)
    outputs = [
        call(target, assistant, num_beams=num_beams, output_scores=True)
        for assistant in (load_draft(str(TINY_TARGET)), str(TINY_TARGET))
    ]
    assert type(outputs[0]) is type(outputs[1]) and not hasattr(outputs[1], "speculation")
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert hf_specdec.last_metrics() is None


@pytest.mark.parametrize("name", [str(GOLDENS / "dflash"), "ngram"], ids=lambda name: Path(name).name)
def test_in_flight(target: PreTrainedModel, name: str) -> None:
    requests = [prompt[:12] for prompt in trained_prompts()["prompts"][:2]]
    options = {"tree": TREE, "max_new_tokens": 8, "do_sample": False}
    expected, found = (
        target.generate_batch(requests, assistant_model=assistant, **options) for assistant in (load_draft(name), name)
    )
    for request, output in found.items():
        assert output.generated_tokens == expected[request].generated_tokens
    managers = []
    for _ in range(2):  # the manager that is kept for the draft is that of the name
        with target.continuous_batching_context_manager(
            assistant_model=name, tree=TREE, persistent_manager=True
        ) as manager:
            managers.append(manager)
    assert managers[0] is managers[1]
    assert target.init_continuous_batching(assistant_model=name, tree=TREE) is managers[0]


@pytest.mark.parametrize("name", [str(GOLDENS / "dspark"), "ngram"], ids=lambda name: Path(name).name)
def test_pipelines(target: PreTrainedModel, name: str) -> None:
    text = trained_tokenizer().decode(trained_prompts()["prompts"][0])
    for given, in_call in (({"assistant_model": name}, {}), ({}, {"assistant_model": name})):
        generator = pipeline("text-generation", model=target, tokenizer=trained_tokenizer(), **given)
        set_last_metrics(None)
        generator(text, max_new_tokens=8, do_sample=False, **in_call)
        assert hf_specdec.last_metrics().num_drafts > 0


def test_loaded_once_and_kept_with_the_target() -> None:
    target, other_target = copy.deepcopy(trained_target()), copy.deepcopy(trained_target())
    state = torch.get_rng_state()
    first, other = named_draft(target, GOLDENS / "dflash"), named_draft(target, GOLDENS / "jetspec")
    assert torch.equal(torch.get_rng_state(), state)
    assert named_draft(target, str(GOLDENS / "dflash")) is first is not other
    assert named_draft(other_target, GOLDENS / "dflash") is not first
    gone = weakref.ref(first)
    del first, other, target
    gc.collect()
    assert gone() is None


def test_a_changed_folder(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(GOLDENS / "dflash", folder)
    first = named_draft(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"block_size": 5}))
    second = named_draft(target, folder)
    assert (first.config.block_size, second.config.block_size) == (config["block_size"], 5)
    assert named_draft(target, folder) is second


def test_dtypes(target: PreTrainedModel) -> None:
    """A model is in the target's dtype, also once that has changed; a head is in its own until it drafts."""
    assert named_draft(target, TINY_TARGET).dtype == torch.float32
    assert named_draft(target.to(torch.bfloat16), TINY_TARGET).dtype == torch.bfloat16


ERRORS = {
    "no/such/folder": (OSError, "There is no folder"),
    "no-such-model": (OSError, "couldn't"),
    "mtp": (ValueError, "holds no MTP modules; looked for `mtp.fc.weight`"),
    "": (OSError, "Repo id"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("options", [{}, {"tree": TREE}], ids=["no tree", "tree"])
def test_names_of_nothing(target: PreTrainedModel, name: str, options: dict[str, Any]) -> None:
    """Before any forward, in every kind of call."""
    kind, words = ERRORS[name]
    target.forward = None  # type: ignore[assignment]
    match = f"^`assistant_model`={name!r}: .*{words}"
    with pytest.raises(kind, match=match):
        call(target, name, **options)
    with pytest.raises(kind, match=match):
        target.generate_batch([[5, 6]], assistant_model=name, **options)
    with pytest.raises(kind, match=match):
        target.init_continuous_batching(assistant_model=name, **options)
    with pytest.raises(kind, match=match):
        pipeline("text-generation", model=target, tokenizer=trained_tokenizer(), assistant_model=name)


def test_a_damaged_head(target: PreTrainedModel, tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "dflash", tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="^`assistant_model`=.*model.safetensors"):
        call(target, str(tmp_path / "head"))
