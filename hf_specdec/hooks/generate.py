"""Wrapped methods of `generate`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from .calls import PASSED_BY, is_speculative, loaded


def wrap_generate(mixin: Any) -> None:
    """Wraps the methods of `GenerationMixin` through which a speculative call passes."""
    _wrap_call(mixin)
    _wrap_generation_mode()
    _wrap_validation(mixin)
    _wrap_assisted_decoding(mixin)


def _wrap_call(mixin: Any) -> None:
    """What `assistant_model` names is loaded, and is from then on as if it had been passed itself."""
    original = mixin.generate
    signature = inspect.signature(original)
    position = list(signature.parameters).index("assistant_model") - 1  # without self

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if PASSED_BY in kwargs:
            kwargs["assistant_model"] = kwargs.pop(PASSED_BY)
        elif "assistant_model" in kwargs:
            kwargs["assistant_model"] = loaded(self, kwargs["assistant_model"])
        elif len(args) > position:
            args = (*args[:position], loaded(self, args[position]), *args[position + 1 :])
        if "grammar" in kwargs or "grammar_after" in kwargs:
            args, kwargs = _with_mask(self, signature.bind(self, *args, **kwargs))
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _with_mask(model: Any, call: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `generate` call whose `grammar` has become a logits processor, without the model."""
    from ..grammar import with_grammar

    named = call.arguments
    config, processors = named.get("generation_config"), named.get("logits_processor")
    options = with_grammar(model, config, named.pop("kwargs") | {"logits_processor": processors})
    named["logits_processor"], named["kwargs"] = options.pop("logits_processor"), options
    return call.args[1:], call.kwargs


def _wrap_generation_mode() -> None:
    """Speculative calls with other modes are refused by `check_call`: no warning before it that flags are ignored."""
    from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

    original = GenerationConfig.get_generation_mode

    @functools.wraps(original)
    def get_generation_mode(self, assistant_model=None):
        if assistant_model is not None and is_speculative(self, assistant_model):
            return GenerationMode.ASSISTED_GENERATION
        return original(self, assistant_model)

    GenerationConfig.get_generation_mode = get_generation_mode


def _wrap_validation(mixin: Any) -> None:
    original = mixin._validate_generation_mode

    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant_model = generation_mode_kwargs.get("assistant_model")
        if not is_speculative(generation_config, assistant_model):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        from ..generation.refusals import check_call, check_no_batch_options

        check_call(self, generation_config, generation_mode_kwargs)
        check_no_batch_options(generation_config)

    mixin._validate_generation_mode = _validate_generation_mode


def _wrap_assisted_decoding(mixin: Any) -> None:
    original = mixin._assisted_decoding

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
        call = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "synced_gpus": synced_gpus,
            "streamer": streamer,
        }
        if not is_speculative(generation_config, assistant_model):
            return original(
                self,
                input_ids,
                **call,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        from ..drafters import reading
        from ..generation.calls import decode

        assistant_model = reading(assistant_model, self, tokenizer, assistant_tokenizer)
        call["inputs_tensor"] = inputs_tensor
        return decode(self, input_ids, assistant_model, model_kwargs=model_kwargs, **call)

    mixin._assisted_decoding = _assisted_decoding
