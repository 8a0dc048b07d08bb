"""Drafts that do not suit a target are refused by name."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..drafters import Drafter, DraftModelDrafter
from ..models.encoders import attends_to_encoder_of, runs_own_encoder
from ..models.modules import modules_of
from ..models.probe import reads_tokens_alone
from ..models.reasons import Reason
from ..models.structure import forward_parameters
from ..ranks import is_sharded
from .model_refusals import check_attention


def check_draft(model: PreTrainedModel, drafter: Drafter) -> None:
    """
    Checks that the draft suits the target, and that both keep their caches.

    Raises:
        ValueError: for a draft model of another vocabulary or of a kind that cannot fill a tree, a model that drops
            its cache, and a sharded draft beside a sharded target.
    """
    reads_more = drafter.models or type(drafter).watching is not Drafter.watching
    if model.config.is_encoder_decoder and reads_more and type(drafter) is not DraftModelDrafter:
        raise ValueError(
            f"`assistant_model`: the target {type(model).__name__} {Reason.ENCODER}, for which "
            f"{type(drafter).__name__} cannot draft. Use `hf_specdec.NgramDraft()` or a draft model with the target's "
            "tokenizer, or call `generate` without `tree` and `speculative_config`."
        )
    if isinstance(drafter, DraftModelDrafter):
        _check_draft_model(drafter, model)
    for role, part in [("target", model), *(("draft", draft) for draft in drafter.models)]:
        _check_keeps_cache(part, role)
    if is_sharded(model):
        _check_drafts_are_whole(drafter.models)


def _check_keeps_cache(model: PreTrainedModel, role: str) -> None:
    """With gradient checkpointing, layers in training mode drop the cache."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in modules_of(model)):
        raise ValueError(
            f"`assistant_model`: the {role} {type(model).__name__} is in training mode with gradient checkpointing, "
            "which keeps no cache. Call its `eval()` first."
        )


def _check_draft_model(drafter: DraftModelDrafter, target: PreTrainedModel) -> None:
    draft = drafter.model
    _check_encoder(draft, target)
    if not draft.can_generate() and draft.get_output_embeddings() is None:
        raise ValueError(
            f"`assistant_model`: the draft {type(draft).__name__} has no language model head to propose tokens with. "
            "Load it with `AutoModelForCausalLM`."
        )
    drafter.check_vocabulary(target)
    check_attention(draft, "draft")
    if "pixel_values" in forward_parameters(draft) and not reads_tokens_alone(draft):
        raise ValueError(
            f"`assistant_model`: the draft {type(draft).__name__} {Reason.OTHER_TOKENS}: its forward wants an image. "
            "Use a language model."
        )


def _check_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """A draft with an encoder must read what the target's reads, and one without must attend to its states."""
    if draft.config.is_encoder_decoder and draft.config.model_type != target.config.model_type:
        raise ValueError(
            f"`assistant_model`: the draft {type(draft).__name__} is an encoder-decoder model, the target "
            f"{type(target).__name__} is none of its kind. Use a decoder-only model with the target's tokenizer."
        )
    names: tuple[str, ...]
    if runs_own_encoder(draft, target):
        names, remedy = ("num_mel_bins", "max_source_positions"), "a draft for the same inputs"
    elif attends_to_encoder_of(draft, target):
        names, remedy = ("d_model",), "a draft with an encoder of its own"
    else:
        return
    for name in names:
        mine, its = (getattr(model.config, name, None) for model in (draft, target))
        if mine != its:
            raise ValueError(
                f"`assistant_model`: the draft {type(draft).__name__} reads what belongs to the encoder of the target "
                f"with `{name}`={mine}, which is {its} there. Use {remedy}."
            )


def _check_drafts_are_whole(drafts: tuple[PreTrainedModel, ...]) -> None:
    """Draft models beside a sharded target must be whole on every rank: the ranks run them at different times."""
    for draft in filter(is_sharded, drafts):
        raise ValueError(
            f"`assistant_model`: {type(draft).__name__} is sharded, like the target, but the ranks forward it at "
            "different times. Give every rank a whole one."
        )
