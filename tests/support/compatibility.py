"""The table of model families in docs/compatibility.md, made from what the tests go through."""

from __future__ import annotations

from support.models import FAMILIES, attention_of, tiny_config


NAMES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "gpt_oss": "gpt-oss",
    "gpt2": "GPT-2",
    "phi": "Phi",
    "gptj": "GPT-J",
    "stablelm": "StableLM",
    "falcon": "Falcon",
}
NOTES = {
    "llama": "SmolLM2-135M-Instruct with real weights, too: `tests/test_smollm2.py`",
    "gemma3_text": "Gemma 3 270M with real weights, too: `tests/test_gemma3_270m.py`",
    "gemma2": "soft-capping, which sdpa before 5.23 drops, as in plain `generate`",
    "gpt_oss": "attention sinks; there is no sdpa",
    "gptj": "an attention of its own, which takes a 4D mask",
    "falcon": "with ALiBi it is refused",
}


def special(family: str) -> str:
    """What trees have to mind in its layers, and what is to be said of it."""
    config = tiny_config(family)
    kinds = {
        "sliding windows": getattr(config, "sliding_window", None),
        "experts": any("expert" in name for name in config.to_dict()),
        NOTES.get(family): True,
    }
    return "; ".join(kind for kind, is_so in kinds.items() if kind and is_so)


def family_table() -> str:
    """One row for each family."""
    rows = ["| family | attention | what is special |", "|---|---|---|"]
    for family in FAMILIES:
        attention = ", ".join(name.replace("default", "its default") for name in attention_of(family))
        rows.append(f"| {NAMES[family]} | {attention} | {special(family)} |".replace("  ", " "))
    return "\n".join(rows) + "\n"
