"""What kind a draft is, told by its files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from support.eagle import GOLDENS
from support.goldens import TINY_TARGET

from hf_specdec import BlockHead, EagleHead, MedusaHeads, NgramDraft, load_draft
from hf_specdec.checkpoints import reading
from hf_specdec.eagle.formats import TargetFiles
from hf_specdec.loading import kind_of_draft, load_draft_to, load_target, load_tokenizer


BLOCKS = ("dflash", "jetspec", "dspark", "dflash2", "peagle")
HEADS = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir() and "_eagle" in path.name)


@pytest.mark.parametrize("name", HEADS)
def test_eagle_heads_of_every_format(name: str) -> None:
    assert kind_of_draft(str(GOLDENS / name)) == "eagle"
    assert isinstance(load_draft_to(str(GOLDENS / name), torch.float32, "cpu"), EagleHead)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads_of_every_format(name: str) -> None:
    assert kind_of_draft(str(GOLDENS / name)) == "block"
    assert isinstance(load_draft_to(str(GOLDENS / name), torch.float32, "cpu"), BlockHead)


@pytest.mark.parametrize(
    ("name", "kind"), [("dspark", BlockHead), ("specforge_eagle3", EagleHead), ("medusa", MedusaHeads)]
)
def test_arguments_of_from_pretrained(name: str, kind: type) -> None:
    draft = load_draft(str(GOLDENS / name), dtype=torch.float16, default_tree=[[0]])
    assert isinstance(draft, kind)
    assert draft.dtype == torch.float16 and draft.config.default_tree == [[0]] and not draft.training


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(reading, "load_file", lambda path: calls.append(path) or load_file(path))
    load_draft(str(GOLDENS / "dflash"))
    assert len(calls) == 1


def test_drafts_without_heads() -> None:
    assert load_draft("ngram", max_ngram=5).max_ngram == 5
    model = load_draft(str(TINY_TARGET), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training


def test_kinds_that_are_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mtp'.*target=model"):
        load_draft("mtp")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other_assistant"}))
    with pytest.raises(ValueError, match="`model_type`='other_assistant'"):
        load_draft(str(tmp_path))


def test_medusa_heads_models_and_ngrams() -> None:
    assert isinstance(load_draft_to(str(GOLDENS / "medusa"), torch.float32, "cpu"), MedusaHeads)
    model = load_draft_to(str(TINY_TARGET), torch.bfloat16, "cpu")
    assert model.dtype == torch.bfloat16 and not isinstance(model, EagleHead | MedusaHeads) and not model.training
    assert isinstance(load_draft_to("ngram", torch.float32, "cpu"), NgramDraft)


def test_our_own_format_of_heads(tmp_path: Path) -> None:
    EagleHead.from_pretrained(GOLDENS / HEADS[0]).save_pretrained(tmp_path / "eagle")
    MedusaHeads.from_pretrained(GOLDENS / "medusa").save_pretrained(tmp_path / "medusa")
    BlockHead.from_pretrained(GOLDENS / "dflash").save_pretrained(tmp_path / "block")
    assert kind_of_draft(str(tmp_path / "block")) == "block"
    assert kind_of_draft(str(tmp_path / "eagle")) == "eagle"
    assert kind_of_draft(str(tmp_path / "medusa")) == "medusa"


@pytest.mark.parametrize(
    "load",
    [
        EagleHead.from_pretrained,
        MedusaHeads.from_pretrained,
        kind_of_draft,
        TargetFiles,
        lambda name: load_target(name, torch.float32, "cpu"),
        load_tokenizer,
    ],
)
def test_a_wrong_path_without_a_network(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks like a Hub id; huggingface_hub alone would ask the Hub again and again, for 24 seconds."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    before = time.monotonic()
    with pytest.raises(OSError, match="There is no folder 'out/head', and http://127.0.0.1:9 cannot be reached"):
        load("out/head")
    assert time.monotonic() - before < 5


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="config.json"):
        kind_of_draft(str(tmp_path))
