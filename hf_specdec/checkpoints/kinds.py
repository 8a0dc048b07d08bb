"""The kind of a draft, told from its config and the names of its tensors alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


BLOCK_KINDS = ("dflash", "dflash2", "dspark", "peagle")
"""Values of `speculators_model_type` that mean block heads."""

GEMMA_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type` that assistants of Gemma 4 have."""

_OURS = {
    "hf_specdec_eagle": "eagle",
    "hf_specdec_medusa": "medusa",
    "hf_specdec_block": "block",
    **dict.fromkeys(GEMMA_ASSISTANTS, "gemma"),
}


def kind_of_checkpoint(config: dict[str, Any], keys: Iterable[str]) -> str:
    """
    The kind of a draft: "eagle", "medusa", "block", "gemma" (an assistant of Gemma 4) or "model", a whole
    language model.

    Ours and assistants say so in `model_type`. Medusa heads have `medusa_num_heads` in the config or are numbered;
    block heads are named in the config, or have a norm of the context, P-EAGLE's `mask_hidden` or the recurrent cell
    of Domino; EAGLE heads have an `fc`.

    Args:
        config (`dict`): content of config.json.
        keys (`Iterable[str]`): names of the tensors.
    """
    if config.get("model_type") in _OURS:
        return _OURS[config["model_type"]]
    names = {key.removeprefix("model.") for key in keys}
    is_medusa = any(re.fullmatch(r"(medusa_head\.)?\d+\.0\.linear\.weight", name) for name in names)
    if "medusa_num_heads" in config or is_medusa:
        return "medusa"
    if _names_block_head(config) or names & {"hidden_norm.weight", "mask_hidden"}:
        return "block"
    if any("prefix_gru." in name for name in names):
        return "block"
    return "eagle" if any(name.split(".")[-2:] == ["fc", "weight"] for name in names) else "model"


def _names_block_head(config: dict[str, Any]) -> bool:
    if config.get("speculators_model_type") in BLOCK_KINDS or "dflash_config" in config:
        return True
    named = " ".join(map(str, config.get("architectures") or ())).lower()
    return "dflash" in named or "dspark" in named


def refuse_other_kinds(name: str, wanted: str, config: dict[str, Any], keys: Iterable[str]) -> None:
    """
    Refuses a checkpoint of another kind than `wanted` ("eagle" or "block"), which is often passed in its place.

    Raises:
        ValueError: naming what the checkpoint is, and what loads it.
    """
    keys, other = set(keys), "an EAGLE head" if wanted == "eagle" else "a block head"
    kind = kind_of_checkpoint(config, keys)
    if kind == "gemma":
        raise ValueError(
            f"{name}: the checkpoint is an assistant of Gemma 4, not {other}. Use "
            "`hf_specdec.GemmaAssistant.from_pretrained`."
        )
    if kind == "medusa":
        raise ValueError(
            f"{name}: the checkpoint holds Medusa heads, not {other}. Use `hf_specdec.MedusaHeads.from_pretrained`."
        )
    if any(key.startswith("model.layers.0.") for key in keys):
        raise ValueError(
            f"{name}: the checkpoint is a whole language model (it has `model.layers.0.…` and no `fc.weight`), not "
            f"{other}. Load it with `AutoModelForCausalLM` and pass that as the draft."
        )
    if kind == "block" and wanted == "eagle":
        why = "its config says so" if _names_block_head(config) else "it has `hidden_norm.weight` or `mask_hidden`"
        raise ValueError(
            f"{name}: the checkpoint is a block head, DFlash, DSpark, P-EAGLE or the like ({why}), not an EAGLE head. "
            "Use `hf_specdec.BlockHead.from_pretrained`."
        )
    if kind == "eagle" and wanted == "block":
        raise ValueError(
            f"{name}: the checkpoint is an EAGLE head (it has no `hidden_norm.weight` beside `fc.weight`), not a "
            "block head. Use `hf_specdec.EagleHead.from_pretrained`."
        )
