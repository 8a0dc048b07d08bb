"""The model card of a block head: what it is, how to use it, what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard

from ..cards import Measurement
from ..cards.sections import build_card, facts, measured, published_name, recipe, title, usage


if TYPE_CHECKING:
    from .modeling_block import BlockHead

_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2", "peagle": "P-EAGLE"}


def model_card(
    head: BlockHead,
    repo_id: str | None = None,
    *,
    measurements: Sequence[Measurement] = (),
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    The model card of a block head.

    Args:
        head (`BlockHead`): the head. Its config's `target_name` and `recipe` go into the card.
        repo_id (`str`, *optional*): the Hub repository that the head will be in.
        measurements (`Sequence[Measurement]`, *optional*): acceptance and speed, for a table, the model-index and
            measurements.json.
        license (`str`, *optional*), language (`str` or `list[str]`, *optional*), datasets (`list[str]`, *optional*):
            the card's fields of these names.
        tags (`Sequence[str]`, *optional*): tags besides "speculative-decoding" and the kind of the head.
    """
    config = head.config
    kind = _NAMES[config.kind]
    name = (repo_id or f"{kind} head").split("/")[-1]
    load = f'head = hf_specdec.BlockHead.from_pretrained("{repo_id or "this repository"}").to(target.device)'
    sections = [
        title(name, f"A {kind} head", config.target_name),
        usage(config.target_name, load, '"assistant_model": head'),
        measured(measurements),
        facts("The head", _facts(head)),
        recipe(config.recipe),
        "\n".join(["## How it is read", "", *(f"- `{name}`: {why}" for name, why in config.conventions.items())]),
    ]
    return build_card(
        sections,
        name=name,
        measurements=measurements,
        base_model=published_name(config.target_name),
        library_name="hf_specdec",
        tags=["speculative-decoding", config.kind, *tags],
        license=license,
        language=language,
        datasets=datasets,
    )


def _facts(head: BlockHead) -> dict[str, str]:
    config, layers = head.config, head.config.text_config
    read = (
        f"hidden states {config.aux_layer_ids}" if config.aux_layer_ids else f"{config.num_aux_features} hidden states"
    )
    found = {
        "parameters": f"{head.num_parameters() / 1e6:.1f} M",
        "dtype": str(head.dtype).removeprefix("torch."),
        "decoder layers": f"{layers.num_hidden_layers} ({layers.model_type}), hidden size {config.hidden_size}",
        "reads": f"the target's {read} (boundaries)",
        "drafts": f"{config.num_drafts} at once, of {config.num_draft_tokens} of {config.vocab_size} tokens",
    }
    if config.default_tree is not None:
        found["default tree"] = f"`{config.default_tree}`"
    return found
