"""
Hooks that let hf_specdec serve `model.generate(assistant_model=…, tree=…)` and `generate_batch`, on unchanged
transformers. The speculative code is imported with the first speculative call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from importlib import import_module
from os import PathLike
from typing import Any

from .importing import when_imported


OPTIONS = ("assistant_model", "tree", "speculative_config")
_MODULES_OF_DRAFTS = (
    "hf_specdec.drafters",
    "hf_specdec.block.modeling_block",
    "hf_specdec.eagle.modeling_eagle",
    "hf_specdec.gemma.modeling_gemma",
    "hf_specdec.medusa.modeling_medusa",
    "hf_specdec.mtp.modeling_mtp",
)
"""Modules of which one is imported wherever there is a drafter or head of hf_specdec."""
_WHISPER = "transformers.models.whisper.generation_whisper"
"""Module of a `generate` that sets a flag on its assistant before it calls that of `GenerationMixin`."""
_OWN_LOOPS = {
    "diffusion_gemma.generation_diffusion_gemma": (
        "DiffusionGemmaGenerationMixin",
        "writes blocks of tokens by diffusion, and checks no drafts",
    ),
    "dia.generation_dia": ("DiaGenerationMixin", "writes several codebooks at once, and checks no drafts"),
}
"""Modules of a `generate` that calls none of the methods below, its class, and what it does."""
_DESTRUCTION = "destroy_cached_continuous_batching_manager"
_BATCH_METHODS = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")


def install_when_needed() -> None:
    """Installs the hooks when transformers' modules are imported: at once for modules that already are."""
    when_imported("transformers.generation.configuration_utils", _add_options)
    when_imported("transformers.generation.utils", install)
    when_imported("transformers.models.auto.configuration_auto", _register_configs)
    when_imported("transformers.pipelines.base", _let_pipelines_take_drafts)


def install() -> None:
    """
    Wraps methods of `GenerationMixin` and `ContinuousMixin`, once. The wrappers serve speculative calls and pass all
    other calls to the original methods.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
    from transformers.generation.utils import GenerationMixin

    _add_options()
    if hasattr(GenerationMixin._assisted_decoding, "__wrapped__"):
        return
    _wrap_generate(GenerationMixin)
    _wrap_generation_mode()
    _wrap_validation(GenerationMixin)
    _wrap_assisted_decoding(GenerationMixin)
    for name in _BATCH_METHODS:
        _wrap_batches(ContinuousMixin, name)
    _wrap_destruction(ContinuousMixin)
    for module in _OWN_LOOPS:
        when_imported(f"transformers.models.{module}", functools.partial(_wrap_own_loop, module))
    when_imported(_WHISPER, _wrap_whisper)


def is_speculative(generation_config: Any, assistant_model: Any) -> bool:
    """
    Whether hf_specdec serves a `generate` call: it names a tree or a `SpeculativeConfig`, or its assistant is a
    drafter or head of hf_specdec. So is one whose assistant is a class (or a name, where `generate` has not loaded
    it), to be refused with a remedy: transformers fails on it without one.
    """
    if generation_config.tree is not None or generation_config.speculative_config is not None:
        return True
    return isinstance(assistant_model, str | PathLike | type) or _is_own(assistant_model)


def _is_own(assistant_model: Any) -> bool:
    """Whether an assistant is a drafter or head of hf_specdec."""
    if assistant_model is None or not any(name in sys.modules for name in _MODULES_OF_DRAFTS):
        return False
    from ..drafters import is_own_draft

    return is_own_draft(assistant_model)


# ------------------------------------------------------------------------------------------------ options and configs


def _add_options() -> None:
    from transformers.generation.configuration_utils import GenerationConfig

    if not hasattr(GenerationConfig, "tree"):
        GenerationConfig.tree = _TreeOption()
        GenerationConfig.speculative_config = None


class _TreeOption:
    """
    `GenerationConfig.tree`, None by default. Trees within a schedule are held in their JSON-able form: transformers
    converts an option that is an object when it saves a config, but not what a list holds.
    """

    def __get__(self, config: Any, kind: Any = None) -> Any:
        return None if config is None else vars(config).get("tree")

    def __set__(self, config: Any, tree: Any) -> None:
        if isinstance(tree, (list, tuple)):
            tree = [_jsonable(entry) if isinstance(entry, (list, tuple)) else entry for entry in tree]
        vars(config)["tree"] = tree

    def __delete__(self, config: Any) -> None:
        vars(config).pop("tree", None)


def _jsonable(entry: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    parts = [part.to_dict() if hasattr(part, "to_dict") else part for part in entry]
    return tuple(parts) if isinstance(entry, tuple) else parts


def _register_configs() -> None:
    """Imports the modules that register our configs with `AutoConfig`, except one whose import triggered this hook."""
    for kind in ("block", "eagle", "medusa", "mtp"):
        if (name := f"hf_specdec.{kind}.configuration_{kind}") not in sys.modules:
            import_module(name)


def _loaded(model: Any, assistant_model: Any) -> Any:
    """The draft of an assistant that is a name; any other is returned as it is."""
    if not isinstance(assistant_model, str | PathLike):
        return assistant_model
    from .named_drafts import named_draft

    return named_draft(model, assistant_model)


# ---------------------------------------------------------------------------------------------------- wrapped methods


def _wrap_generate(mixin: Any) -> None:
    """What `assistant_model` names is loaded, and is from then on as if it had been passed itself."""
    original = mixin.generate
    signature = inspect.signature(original)
    position = list(signature.parameters).index("assistant_model") - 1  # without self

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if "assistant_model" in kwargs:
            kwargs["assistant_model"] = _loaded(self, kwargs["assistant_model"])
        elif len(args) > position:
            args = (*args[:position], _loaded(self, args[position]), *args[position + 1 :])
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
        from .refusals import check_call, check_no_batch_options

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
        from .calls import decode

        assistant_model = reading(assistant_model, self, tokenizer, assistant_tokenizer)
        call["inputs_tensor"] = inputs_tensor
        return decode(self, input_ids, assistant_model, model_kwargs=model_kwargs, **call)

    mixin._assisted_decoding = _assisted_decoding


def _wrap_own_loop(module: str) -> None:
    name_of_mixin, does = _OWN_LOOPS[module]
    mixin = getattr(sys.modules[f"transformers.models.{module}"], name_of_mixin)
    original = mixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        for name in OPTIONS:
            if kwargs.get(name) is not None:
                from ..models.reasons import Reason

                raise ValueError(
                    f"`{name}`: the target {type(self).__name__} {Reason.LOOP}: it {does}. Call `generate` without "
                    "`assistant_model`, `tree` and `speculative_config`."
                )
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _wrap_whisper() -> None:
    mixin = sys.modules[_WHISPER].WhisperGenerationMixin
    original = mixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if kwargs.get("assistant_model") is not None:
            kwargs["assistant_model"] = _with_flags(_loaded(self, kwargs["assistant_model"]))
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _with_flags(assistant_model: Any) -> Any:
    """An assistant on which flags can be set: the drafter of a head, which has no generation config."""
    if not _is_own(assistant_model) or hasattr(assistant_model, "generation_config"):
        return assistant_model
    from ..drafters import as_drafter

    return as_drafter(assistant_model)


def _wrap_batches(mixin: Any, name: str) -> None:
    original = getattr(mixin, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        config = kwargs.get("generation_config")
        position = 1 if name == "generate_batch" else 0
        if config is None and len(args) > position:
            config = args[position]
        is_ours = any(kwargs.get(option) is not None for option in OPTIONS)
        defaults = (config, getattr(self, "generation_config", None))
        is_ours |= any(getattr(one, option, None) is not None for one in defaults for option in OPTIONS)
        given = {option: value for option, value in kwargs.items() if value is not None or option not in OPTIONS}
        if not is_ours:
            rollouts = _rollouts_of(self) if name == "generate_batch" else None
            if rollouts is not None:
                return rollouts.generate_batch(*args, **given)
            _destroy_ours(self)
            return original(self, *args, **given)
        from ..batching.methods import METHODS

        if "assistant_model" in given:
            given["assistant_model"] = _loaded(self, given["assistant_model"])
        return METHODS[name](self, *args, **given)

    setattr(mixin, name, method)


def _wrap_destruction(mixin: Any) -> None:
    original = getattr(mixin, _DESTRUCTION)

    @functools.wraps(original)
    def method(self):
        original(self)
        _destroy_ours(self)

    setattr(mixin, _DESTRUCTION, method)


def _let_pipelines_take_drafts() -> None:
    """
    Wraps the function by which a pipeline prepares its assistant, once. It compares the vocabularies and end tokens of
    two language models: heads and drafters have neither of their own, and draft in the target's tokens; so does a
    model whose vocabulary is only padded otherwise. Named language models are left to transformers, which loads their
    tokenizers too.
    """
    from transformers.pipelines import base

    original = base.load_assistant_model
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if isinstance(assistant_model, str | PathLike):
            from .named_drafts import names_own_draft

            if names_own_draft(model, assistant_model):
                assistant_model = _loaded(model, assistant_model)
        if isinstance(assistant_model, type) or _is_own(assistant_model):
            from ..drafters import as_drafter

            as_drafter(assistant_model)
            return assistant_model, assistant_tokenizer
        if assistant_tokenizer is None and _needs_no_tokenizer(assistant_model, model):
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    base.load_assistant_model = load_assistant_model


def _needs_no_tokenizer(assistant_model: Any, model: Any) -> bool:
    from ..forwards.vocabulary import is_padded_otherwise

    return is_padded_otherwise(assistant_model, model)


def _rollouts_of(model: Any) -> Any:
    """The `rollouts` in whose context a model is, if any."""
    if "hf_specdec.rl" not in sys.modules:
        return None
    from ..rl.rollouts import open_rollouts

    return open_rollouts(model)


def _destroy_ours(model: Any) -> None:
    """Destroys the speculative batching manager that a model keeps, so that its memory is free for another."""
    if "hf_specdec.batching.methods" in sys.modules:  # else there is none
        from ..batching.methods import METHODS

        METHODS[_DESTRUCTION](model)
