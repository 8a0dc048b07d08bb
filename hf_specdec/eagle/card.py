"""The model card of a head: what it is, how to use it, what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from ..cards import Measurement
from ..cards.sections import build_card, facts, measured, published_name, recipe, title, usage


if TYPE_CHECKING:
    from .modeling_eagle import EagleHead


def model_card(
    head: EagleHead,
    repo_id: str | None = None,
    *,
    measurements: Sequence[Measurement] = (),
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    The model card of a head.

    Args:
        head (`EagleHead`): the head. Its config's `target_name` and `recipe` go into the card.
        repo_id (`str`, *optional*): the Hub repository that the head will be in.
        measurements (`Sequence[Measurement]`, *optional*): acceptance and speed, for a table, the model-index and
            measurements.json.
        license (`str`, *optional*), language (`str` or `list[str]`, *optional*), datasets (`list[str]`, *optional*):
            the card's fields of these names.
        tags (`Sequence[str]`, *optional*): tags besides "speculative-decoding" and "eagle" or "eagle3".
    """
    config = head.config
    version = "EAGLE-3" if config.eagle_version == 3 else "EAGLE"
    name = (repo_id or "EAGLE head").split("/")[-1]
    load = f'head = hf_specdec.EagleHead.from_pretrained("{repo_id or "this repository"}").to(target.device)'
    sections = [
        title(name, f"An {version} head", config.target_name),
        usage(config.target_name, load, '"assistant_model": head'),
        measured(measurements),
        facts("The head", _facts(head)),
        recipe(config.recipe),
        _conventions(config.conventions),
    ]
    return build_card(
        sections,
        name=name,
        measurements=measurements,
        base_model=published_name(config.target_name),
        library_name="hf_specdec",
        tags=["speculative-decoding", "eagle3" if config.eagle_version == 3 else "eagle", *tags],
        license=license,
        language=language,
        datasets=datasets,
    )


def _facts(head: EagleHead) -> dict[str, str]:
    config, layers = head.config, head.config.text_config
    found = {
        "parameters": f"{head.num_parameters() / 1e6:.1f} M",
        "dtype": str(head.dtype).removeprefix("torch."),
        "decoder layers": f"{layers.num_hidden_layers} ({layers.model_type}), hidden size {config.hidden_size}",
        "reads": _features(config),
        "drafts": f"{config.num_draft_tokens} of {config.vocab_size} tokens",
    }
    if config.default_tree is not None:
        found["default tree"] = f"`{config.default_tree}`"
    return found


def _features(config: Any) -> str:
    if config.num_aux_features == 0:
        return "the target's last hidden state, after its final norm"
    if config.aux_layer_ids is None:
        return "the target's hidden states 2, L/2 and L−3 of L layers"
    return f"the target's hidden states {config.aux_layer_ids} ({config.aux_layer_convention})"


def _conventions(conventions: dict[str, str] | None) -> str:
    if not conventions:
        return ""
    rows = [f"- `{name}`: {reason}" for name, reason in conventions.items()]
    return "\n".join(["## Assumed when the original checkpoint was read", "", *rows])
