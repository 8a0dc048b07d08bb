"""Calls that cannot be served are refused by name, before any forward."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..cache import check_reusable
from ..compat import cache_name_of, warn_if_untried
from ..config import SpeculativeConfig
from ..drafters import as_drafter, reading
from ..models.asked_once import asking_once
from ..models.encoders import runs_own_encoder
from ..models.reasons import Reason
from ..models.rope import length_dependent_ropes
from ..models.structure import attends_to_images_apart, keeps_encoder_apart
from ..plan import SpeculationPlan
from ..states import is_attention_free
from .arguments import CallArguments
from .draft_refusals import check_draft
from .inherited import (
    OF_ASSISTED_GENERATION,
    OF_OTHER_MODES,
    OTHER_DRAFTS,
    default_of,
    remedy,
    set_aside_idle_options,
)
from .model_refusals import check_foreign_hooks, check_target


_IMAGES = ("pixel_values", "cross_attention_states", "cross_attention_mask")


@asking_once()
def check_call(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
    checks_models: bool = True,
) -> None:
    """
    Checks a speculative call when `generate` validates its mode. `checks_models`: whether target and draft are checked
    as well, which is needed only once while they stay as they are.

    Raises:
        ValueError: for what cannot be served; the message names the argument, its value and the remedy.
        TypeError: for an argument of the wrong type.
    """
    warn_if_untried()
    config = SpeculativeConfig.from_generation_config(generation_config)
    assistant_model = generation_mode_kwargs.get("assistant_model")
    if assistant_model is None:
        name = "speculative_config" if generation_config.tree is None else "tree"
        raise ValueError(
            f"`{name}`={getattr(generation_config, name)!r} without a draft: pass `assistant_model=` a draft model or "
            f"`hf_specdec.NgramDraft()` (a callable `custom_generate` does not get it), or leave `{name}` out."
        )
    if checks_models:
        check_target(model)
    set_aside_idle_options(model, generation_config)
    _check_mode(model, generation_config)
    _check_options(generation_config)
    tokenizers = (generation_mode_kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer"))
    drafter = as_drafter(reading(assistant_model, model, *tokenizers))
    if checks_models:
        check_draft(model, drafter)
    plan = SpeculationPlan.of_call(generation_config, config, drafter, model)
    for tree in plan.trees:
        drafter.check(model, tree)
        if drafter.max_depth is not None and tree.depth > drafter.max_depth:
            raise ValueError(
                f"`tree` is {tree.depth} levels deep, but {type(drafter).__name__} proposes only {drafter.max_depth}. "
                "Use a shallower one."
            )
    if checks_models:
        check_foreign_hooks(model, drafter, SpeculativeConfig() if config is None else config)


def check_inputs(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    shares_steps: bool = False,
) -> None:
    """
    Checks what is known once `generate` has prepared its inputs. `shares_steps`: whether texts of other lengths are in
    the same forwards.

    Raises:
        ValueError: for a cache that cannot be used, or a text that is too long for the target's rotary
            embedding.
    """
    cache = model_kwargs.get(cache_name_of(model))
    if getattr(cache, "_is_user_defined", False):
        check_reusable(cache, model)
        if is_attention_free(model):
            raise ValueError(
                f"`{cache_name_of(model)}` with `assistant_model`: the states of {type(model).__name__} do not tell "
                "how many tokens they hold. Pass the whole text without a cache."
            )
    if model_kwargs.get("encoder_hidden_states") is not None and not keeps_encoder_apart(model):
        raise ValueError(
            f"`encoder_hidden_states` with `assistant_model`: the target {type(model).__name__} attends to them by "
            "cross-attention, whose K/V a tree's cache does not hold. Call `generate` without `assistant_model`."
        )
    images = [name for name in _IMAGES if model_kwargs.get(name) is not None]
    if images and attends_to_images_apart(model):
        raise ValueError(
            f"`{images[0]}` with `assistant_model`: the target {type(model).__name__} {Reason.CROSS_ATTENTION}. Call "
            "`generate` without images, or without `assistant_model`."
        )
    mask = model_kwargs.get("attention_mask")
    if model.config.model_type == "git" and model_kwargs.get("pixel_values") is None and not _is_full(mask):
        raise ValueError(
            f"`attention_mask` with `assistant_model`: the target {type(model).__name__} {Reason.MASK} without an "
            "image: it masks other tokens than the padding. Pass `pixel_values`, or prompts of one length."
        )
    _check_rotary_embedding(model, generation_config, input_ids, model_kwargs, shares_steps)


def check_encoder(arguments: CallArguments) -> None:
    """
    Checks that a draft with an encoder of its own gets what that reads.

    Raises:
        ValueError: if the call has the states of the target's encoder instead.
    """
    encoder = arguments.encoder
    for draft in () if encoder is None or encoder.are_known else arguments.drafter.models:
        if runs_own_encoder(draft, arguments.model):
            raise ValueError(
                f"`encoder_outputs` or `inputs_embeds` with `assistant_model`: the draft {type(draft).__name__} has "
                f"an encoder of its own. Pass `{arguments.model.main_input_name}` instead, or a draft that attends to "
                "the target's states."
            )


def check_padding(arguments: CallArguments) -> None:
    """
    Checks that rows that end before others can be padded, as plain `generate` pads them.

    Raises:
        ValueError: without a pad token, if a stopping criterion has end tokens.
    """
    if arguments.pads_ended_rows and arguments.pad_token is None:
        raise ValueError(
            "`stopping_criteria` has end tokens of its own, and `pad_token_id` is None: rows that end before others "
            "cannot be padded. Give `pad_token_id`."
        )


def _is_full(mask: torch.Tensor | None) -> bool:
    return mask is None or bool(mask.all())


def check_no_batch_options(generation_config: GenerationConfig) -> None:
    """
    Checks that `generate` is not asked for what only `generate_batch` does.

    Raises:
        ValueError: for options of a `SpeculativeConfig` about requests that share steps.
    """
    config, default = SpeculativeConfig.from_generation_config(generation_config), SpeculativeConfig()
    for name in ("disable_counts_waiting", "max_step_nodes"):
        value = getattr(default if config is None else config, name)
        if value != getattr(default, name):
            raise ValueError(
                f"`{name}={value!r}` is for `generate_batch` and its manager. Leave it out of `generate`, where "
                "nobody waits and `tree` says how much is drafted."
            )


def _check_rotary_embedding(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    shares_steps: bool,
) -> None:
    text_config = model.config.get_text_config(decoder=True)
    for rope in length_dependent_ropes(text_config):
        boundary = (
            rope.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or text_config.max_position_embeddings
        )
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())
        longest = prompt + generation_config.max_length - input_ids.shape[1]
        # After a prompt past the boundary, "longrope" no longer changes, unless shorter texts share its forwards.
        never_changes = rope["rope_type"] == "longrope" and prompt > boundary and not shares_steps
        if longest <= boundary or never_changes:
            continue
        raise ValueError(
            f"`max_length`={generation_config.max_length}: the target's rotary embedding ({rope['rope_type']!r}) "
            f"changes for all tokens when the text passes {boundary} tokens, which a tree cannot follow. Ask for at "
            f"most `max_new_tokens={max(boundary - prompt, 0)}`, or call `generate` without `assistant_model`."
        )


def _check_mode(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    if generation_config.num_beams is not None and generation_config.num_beams > 1:
        do = "Use num_beams=1 (a pipeline of speech asks for beams by itself: `generate_kwargs={'num_beams': 1}`), "
        do = remedy(model, generation_config, "num_beams", 1, do + "or leave `assistant_model` out.")
        raise ValueError(
            f"`num_beams={generation_config.num_beams}` with `assistant_model`: trees are verified for greedy "
            f"decoding and sampling. {do}"
        )
    if getattr(generation_config, "dola_layers", None) is not None:  # transformers keeps the mode, with a warning
        do = remedy(model, generation_config, "dola_layers", None, "Leave one of them out.")
        raise ValueError(
            f"`dola_layers={generation_config.dola_layers!r}` with `assistant_model`: trees are verified for greedy "
            f"decoding and sampling. {do}"
        )
    mode = generation_config.get_generation_mode()  # without the assistant
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        do = "Leave the option that asks for that mode out (`penalty_alpha`, `dola_layers`, `constraints`, …)."
        for name, neutral in OF_OTHER_MODES.items():
            do = remedy(model, generation_config, name, neutral, do)
        raise ValueError(
            f"`assistant_model` with the generation mode '{mode.value}': trees are verified for greedy "
            f"decoding and sampling. {do}"
        )


def _check_options(generation_config: GenerationConfig) -> None:
    for name in OTHER_DRAFTS:
        if getattr(generation_config, name, None):
            raise ValueError(
                f"`{name}={getattr(generation_config, name)!r}` beside `assistant_model`: they are two ways to draft. "
                "Leave one out."
            )
    for name in OF_ASSISTED_GENERATION:
        value = getattr(generation_config, name, None)
        if value is not None and value not in default_of(name):
            raise ValueError(
                f"`{name}={value!r}` belongs to transformers' own assisted generation and has no meaning for a tree. "
                "Leave it out; `tree=` says how much is drafted."
            )
    if generation_config.use_cache is False:
        raise ValueError(
            "`use_cache=False` with `assistant_model`: speculation needs the cache. Leave `use_cache` out."
        )
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`cache_implementation={generation_config.cache_implementation!r}` with `tree`: a tree has a cache of "
            "its own. Leave `cache_implementation` out."
        )
