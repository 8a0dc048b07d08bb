"""What kind a draft is, told by its files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from support.eagle import GOLDENS
from support.goldens import TINY_TARGET

from hf_specdec import EagleHead, MedusaHeads, NgramDraft
from hf_specdec.eagle.formats import TargetFiles
from hf_specdec.loading import kind_of_draft, load_draft, load_target, load_tokenizer


HEADS = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir() and "eagle" in path.name)


@pytest.mark.parametrize("name", HEADS)
def test_eagle_heads_of_every_format(name: str) -> None:
    assert kind_of_draft(str(GOLDENS / name)) == "eagle"
    assert isinstance(load_draft(str(GOLDENS / name), torch.float32, "cpu"), EagleHead)


def test_medusa_heads_models_and_ngrams() -> None:
    assert isinstance(load_draft(str(GOLDENS / "medusa"), torch.float32, "cpu"), MedusaHeads)
    model = load_draft(str(TINY_TARGET), torch.bfloat16, "cpu")
    assert model.dtype == torch.bfloat16 and not isinstance(model, EagleHead | MedusaHeads) and not model.training
    assert isinstance(load_draft("ngram", torch.float32, "cpu"), NgramDraft)


def test_our_own_format_of_heads(tmp_path: Path) -> None:
    EagleHead.from_pretrained(GOLDENS / HEADS[0]).save_pretrained(tmp_path / "eagle")
    MedusaHeads.from_pretrained(GOLDENS / "medusa").save_pretrained(tmp_path / "medusa")
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
