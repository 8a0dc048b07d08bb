"""`model.generate_batch(assistant_model=…, tree=…)` and the other methods that replace transformers' for our calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..config import SpeculativeConfig
from ..drafters import reading
from ..engine.request import SpeculativeGenerationOutput
from .arguments import BaseConfig, overrides_in
from .keeping import keep, let_go
from .manager import SpeculativeBatchingManager


def _make_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
    *,
    assistant_model: Any = None,
    tree: Any = None,
    speculative_config: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
) -> SpeculativeBatchingManager:
    """
    Implements `init_continuous_batching` (`workload_hints` are ignored: they tune transformers' own manager), which
    also takes the tokenizers of a target and a draft model that differ in them, as `generate` does. Returns
    the manager that the model keeps, if it serves these arguments; otherwise destroys it, to free its memory, and
    makes a new one.

    Raises:
        ValueError, TypeError: without a draft, or for a target, draft or option that cannot be served.
    """
    return _manager_for(
        model,
        generation_config,
        continuous_batching_config,
        {},
        assistant_model=reading(assistant_model, model, tokenizer, assistant_tokenizer),
        tree=tree,
        speculative_config=speculative_config,
    )


def _manager_for(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    continuous_batching_config: ContinuousBatchingConfig | None,
    overrides: dict[str, Any],
    *,
    assistant_model: Any,
    tree: Any,
    speculative_config: Any,
    prompts: list[list[int] | Mapping[str, Any]] | None = None,
) -> SpeculativeBatchingManager:
    """
    See `_make_manager`; `overrides` are default options beside the `generation_config`, see `BaseConfig`, and
    `prompts` all that are going to come, if that is known.
    """
    if not isinstance(generation_config, GenerationConfig | None):
        raise TypeError(
            f"`generation_config` must be a GenerationConfig, but is {type(generation_config).__name__}: "
            f"{generation_config!r}."
        )
    call = GenerationConfig()
    call.tree = tree if tree is not None else getattr(generation_config, "tree", None)
    own = getattr(generation_config, "speculative_config", None)
    call.speculative_config = speculative_config if speculative_config is not None else own
    if call.tree is None and call.speculative_config is None:
        call.tree, call.speculative_config = model.generation_config.tree, model.generation_config.speculative_config
    config = SpeculativeConfig.from_generation_config(call)
    if assistant_model is None:
        name = "tree" if call.tree is not None else "speculative_config"
        raise ValueError(
            f"`{name}`={getattr(call, name)!r} without a draft: pass `assistant_model=` a draft model, a head or "
            f"`hf_specdec.NgramDraft()`, or leave `{name}` out."
        )
    defaults = replace(BaseConfig.of(generation_config), overrides=overrides)
    kept = let_go(model)  # removed first, so that no other thread takes it
    if kept is not None:
        try:
            serves = kept.serves(assistant_model, config, continuous_batching_config)
            if serves and (prompts is None or kept.has_room_for(prompts)):
                kept.renew(defaults)
                return kept
        except BaseException:
            keep(kept)  # a refused call changes nothing
            raise
        keep(kept)
        del kept
        _destroy_kept_manager(model)
    return SpeculativeBatchingManager(
        model,
        defaults,
        continuous_batching_config,
        assistant_model=assistant_model,
        speculative_config=config,
        prompts=prompts,
    )


@contextmanager
def _running_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
    **speculation: Any,
) -> Iterator[SpeculativeBatchingManager]:
    """Implements `continuous_batching_context_manager`. `warmup` is ignored: see the manager's own `warmup`."""
    manager = _make_manager(model, generation_config, continuous_batching_config, **speculation)
    manager.start()
    try:
        yield manager
    except BaseException:
        manager.stop(hard_stop=True)
        raise
    manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)


def _generate_batch(
    model: PreTrainedModel,
    inputs: list[list[int] | Mapping[str, Any]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    assistant_model: Any = None,
    tree: Any = None,
    speculative_config: Any = None,
    assistant_tokenizer: Any = None,
    **options: Any,
) -> dict[str, SpeculativeGenerationOutput]:
    """
    Implements `generate_batch`: returns results by request name, in the order of `inputs`, which are lists of tokens,
    or dicts of the model's inputs for one prompt each, as a processor returns them. `options` are options of
    `generate`, and `seed`, `speculate`, `top_logprobs`, `logprobs_mode` and `adapter` (see `add_request`; the last for
    each prompt its own, if it is a list); `tokenizer` serves `assistant_tokenizer`, too. (`max_queue_size` does not
    apply, because all requests are there from the start.) With `persistent_manager` the model keeps the manager for
    the next call.

    Raises:
        ValueError, TypeError: for a call that cannot be served, before anything runs.
        RuntimeError: if a step fails.
    """
    manager = _manager_for(
        model,
        generation_config,
        continuous_batching_config,
        overrides_in(options),
        assistant_model=reading(assistant_model, model, options.get("tokenizer"), assistant_tokenizer),
        tree=tree,
        speculative_config=speculative_config,
        prompts=inputs,
    )
    # All requests are queued before the first step, so that `torch.manual_seed` reproduces the batch.
    streaming = options.pop("streaming", False)
    try:
        names = manager.add_all(inputs, options, streaming=streaming, record_timestamps=record_timestamps)
    except BaseException:
        if manager.was_kept:
            keep(manager)  # a refused call changes nothing
        raise
    results: dict[str, SpeculativeGenerationOutput] = {}
    with logging.tqdm(total=len(names), disable=not progress_bar, unit="request") as bar:

        def take(outputs: list[SpeculativeGenerationOutput]) -> None:
            for output in outputs:
                if output.is_finished():
                    results[output.request_id] = output
                    bar.update()

        manager.run_here(take)
    fatal_error = manager.background_thread_status.fatal_error
    if fatal_error is not None:
        raise RuntimeError(f"A step has failed: {fatal_error}") from fatal_error
    if persistent_manager:
        keep(manager)
    return {name: results[name] for name in names}


def _destroy_kept_manager(model: PreTrainedModel) -> None:
    """
    Implements `destroy_cached_continuous_batching_manager`: frees the manager that the model keeps, if any (one that
    runs is in use, and freed by its user).
    """
    manager = let_go(model)
    if manager is not None:
        del manager
        gc.collect()  # the caller wants its memory now, even if something of it is in a reference cycle


METHODS: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": _make_manager,
    "continuous_batching_context_manager": _running_manager,
    "generate_batch": _generate_batch,
    "destroy_cached_continuous_batching_manager": _destroy_kept_manager,
}
"""Replacements of methods of transformers' `ContinuousMixin`, by name."""
