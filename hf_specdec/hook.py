"""Makes `model.generate(assistant_model=…, tree=…)` ours, on unchanged transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from . import attention
from .batching import hook as batching
from .config import SpeculativeConfig
from .drafters import as_drafter, is_own_draft
from .generation import plan_of_call, speculative_decoding
from .refusals import check_call, check_inputs, check_not_for_batches


def is_speculative(generation_config: GenerationConfig, assistant_model: Any) -> bool:
    """
    Whether a `generate` call is ours: it names a tree or a `SpeculativeConfig`, or its assistant is a drafter or head
    of ours.
    """
    return (
        generation_config.tree is not None
        or generation_config.speculative_config is not None
        or is_own_draft(assistant_model)
    )


def install() -> None:
    """
    Hooks into transformers, once: two generation options, and methods of `GenerationMixin` and `ContinuousMixin` that
    take over where a call is ours and else call what was there. Registers "tree_attention".
    """
    if hasattr(GenerationConfig, "tree"):
        return
    GenerationConfig.tree = None
    GenerationConfig.speculative_config = None
    attention.register()
    _wrap_validation()
    _wrap_assisted_decoding()
    batching.install()


def _wrap_validation() -> None:
    original = GenerationMixin._validate_generation_mode

    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant_model = generation_mode_kwargs.get("assistant_model")
        if not is_speculative(generation_config, assistant_model):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        check_call(self, generation_mode, generation_config, generation_mode_kwargs)
        check_not_for_batches(generation_config)

    GenerationMixin._validate_generation_mode = _validate_generation_mode


def _wrap_assisted_decoding() -> None:
    original = GenerationMixin._assisted_decoding

    @functools.wraps(original)
    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        assistant_tokenizer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        if not is_speculative(generation_config, assistant_model):
            return original(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        check_inputs(self, generation_config, input_ids, model_kwargs)
        drafter = as_drafter(assistant_model)
        config = SpeculativeConfig.from_generation_config(generation_config)
        plan = plan_of_call(generation_config, config, drafter, self.config.get_text_config().vocab_size)
        return speculative_decoding(
            self,
            input_ids,
            drafter,
            plan,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            synced_gpus=synced_gpus,
            streamer=streamer,
        )

    GenerationMixin._assisted_decoding = _assisted_decoding
