"""The model card of a head of any kind: what it is, how to use it, what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huggingface_hub import ModelCard

from .measurement import Measurement
from .sections import build_card, facts, measured, published_name, recipe, title, usage


def head_card(
    head: Any,
    repo_id: str | None = None,
    *,
    method: str,
    name: str,
    tag: str,
    reads: str,
    drafts: str,
    conventions: str,
    measurements: Sequence[Measurement] = (),
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    The model card of a head.

    Args:
        head (`EagleHead` or `BlockHead`): the head. Its config's `target_name` and `recipe` go into the card.
        repo_id (`str`, *optional*): the Hub repository that the head will be in.
        method (`str`): the head's method, as "EAGLE-3".
        name (`str`): the head's name without a `repo_id`.
        tag (`str`): the method's tag.
        reads, drafts (`str`): what the head reads of the target, and what it drafts.
        conventions (`str`): the section about how the checkpoint was read; empty for none.
        measurements (`Sequence[Measurement]`, *optional*): acceptance and speed, for a table, the model-index and
            measurements.json.
        license (`str`, *optional*), language (`str` or `list[str]`, *optional*), datasets (`list[str]`, *optional*):
            the card's fields of these names.
        tags (`Sequence[str]`, *optional*): tags besides "speculative-decoding" and the method's.
    """
    config, layers = head.config, head.config.text_config
    name = (repo_id or name).split("/")[-1]
    load = f'head = hf_specdec.{type(head).__name__}.from_pretrained("{repo_id or "this repository"}")'
    found = {
        "parameters": f"{head.num_parameters() / 1e6:.1f} M",
        "dtype": str(head.dtype).removeprefix("torch."),
        "decoder layers": f"{layers.num_hidden_layers} ({layers.model_type}), hidden size {config.hidden_size}",
        "reads": reads,
        "drafts": drafts,
    }
    if config.default_tree is not None:
        found["default tree"] = f"`{config.default_tree}`"
    sections = [
        title(name, f"{'An' if method[0] in 'AEIO' else 'A'} {method} head", config.target_name),
        usage(config.target_name, f"{load}.to(target.device)", '"assistant_model": head'),
        measured(measurements),
        facts("The head", found),
        recipe(config.recipe),
        conventions,
    ]
    return build_card(
        sections,
        name=name,
        measurements=measurements,
        base_model=published_name(config.target_name),
        library_name="hf_specdec",
        tags=["speculative-decoding", tag, *tags],
        license=license,
        language=language,
        datasets=datasets,
    )


def conventions_section(heading: str, conventions: dict[str, str] | None) -> str:
    """A section with the values or reasons of conventions; empty without any."""
    rows = [f"- `{name}`: {reason}" for name, reason in (conventions or {}).items()]
    return "\n".join([f"## {heading}", "", *rows]) if rows else ""
