"""The model card of a small draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from .measurement import Measurement
from .sections import build_card, facts, measured, published_name, recipe, title, usage


EXAMPLE_TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"


def draft_model_card(
    draft: PreTrainedModel,
    target: str,
    repo_id: str | None = None,
    *,
    measurements: Sequence[Measurement] = (),
    tags: Sequence[str] = (),
    **fields: Any,
) -> ModelCard:
    """
    The card of a draft model: a language model that proposes tokens to a larger one.

    Args:
        draft (`PreTrainedModel`): the draft model. The `recipe` of its config becomes a section, if there is one.
        target (`str`): Hub id of the target. A name that cannot be a Hub repository is not published.
        repo_id (`str`, *optional*): Hub id under which the draft model will be published.
        measurements (`Sequence[Measurement]`, *optional*): acceptance and speed, for a table, the model-index
            and measurements.json.
        tags (`Sequence[str]`, *optional*): further tags.
        fields: other fields of `ModelCardData`, such as `license` and `language`.
    """
    name = (repo_id or "Draft model").split("/")[-1]
    load = f'draft = AutoModelForCausalLM.from_pretrained("{repo_id or "this repository"}", dtype="auto")'
    sections = [
        title(name, "A small draft model", target),
        usage(target, f"{load}.to(target.device)", f'"assistant_model": draft, "tree": "{EXAMPLE_TREE}"'),
        measured(measurements),
        facts("The model", _facts(draft)),
        recipe(getattr(draft.config, "recipe", None)),
    ]
    return build_card(
        sections,
        name=name,
        measurements=measurements,
        base_model=published_name(target),
        library_name="transformers",
        tags=["speculative-decoding", "draft-model", *tags],
        **fields,
    )


def _facts(draft: PreTrainedModel) -> dict[str, str]:
    config = draft.config
    return {
        "parameters": f"{draft.num_parameters() / 1e6:.1f} M",
        "dtype": str(draft.dtype).removeprefix("torch."),
        "decoder layers": f"{config.num_hidden_layers} ({config.model_type}), hidden size {config.hidden_size}",
        "vocabulary": f"the target's {config.vocab_size} tokens",
    }
