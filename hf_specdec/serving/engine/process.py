"""What the engine's process does: loading, start and end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ... import loading
from ...batching import Limits, SpeculativeBatchingManager
from ...benchmarking.dtypes import load_fastest
from ...compiling.kept import KeptCode
from ...compiling.preparation import prepare_compiler
from ...models.modules import num_parameters_of
from ...models.structure import execution_device
from ..interpreter import let_steps_go_first
from ..termination import leave_no_semaphore
from .messages import NotServed, Stage
from .options import EngineOptions, StartError
from .server import EngineServer


def run(options: EngineOptions, connection: Connection) -> None:
    """Loads the models, and serves the other end of the connection until that closes."""
    leave_no_semaphore()  # the server kills this process while it loads, or if a step hangs
    tell = lambda text: connection.send(Stage(text))  # noqa: E731
    if options.tells_more:
        _show_information()
    kept = None if options.compile_cache is None else KeptCode(Path(options.compile_cache), options.device)
    if kept is not None:
        kept.use()
    try:
        # Loads in a thread that ends, so that its worker threads do too; see `RequestLoop.run_here`.
        with ThreadPoolExecutor(max_workers=1) as loader:
            loaded = loader.submit(load, options, tell)
            if options.speculative_config.compile and options.device.startswith("cuda"):
                prepare_compiler()  # meanwhile
            manager, tokenizer = loaded.result()
    except StartError as error:
        connection.send(NotServed(error.option, error.reason))
        return
    let_steps_go_first()
    tell("Compiling and capturing the first CUDA graphs." if options.speculative_config.compile else "Warming up.")
    manager.warmup()
    with manager:
        EngineServer(manager, tokenizer, connection, when_warm=None if kept is None else kept.note).serve()
        manager.stop(hard_stop=True)
    connection.close()  # tells the server that no step runs
    if kept is not None:
        kept.note()  # of what has been compiled since the warm-up


def _show_information() -> None:
    """Shows what the library logs for information, with the seconds since the start of the process."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("engine, %(relativeCreated)d ms: %(message)s"))
    own = logging.getLogger("hf_specdec")
    own.addHandler(shown)
    own.setLevel(logging.INFO)
    own.propagate = False


def load(
    options: EngineOptions, tell: Callable[[str], None] = lambda text: None
) -> tuple[SpeculativeBatchingManager, PreTrainedTokenizerBase]:
    """
    Loads the models. Returns the manager, not started, and the target's tokenizer. `tell` is called with a line about
    each stage.

    Raises:
        StartError: if a model or the tokenizer cannot be loaded, or the models do not fit together.
    """
    load_target = partial(
        loading.load_target,
        options.target,
        device=options.device,
        device_map=options.device_map,
        with_images=options.with_images,
    )
    dtype = options.dtype
    tell(f"Loading the model {options.target or loading.SMOLLM2}.")
    if dtype == "auto":
        target, dtype = _loaded("TARGET", load_fastest, load_target, tell)
    else:
        target = _loaded("TARGET", load_target, loading.DTYPES[dtype])
    _loaded("--lora", loading.load_adapters, target, options.adapters)
    tokenizer = _loaded("TARGET", loading.load_tokenizer, options.target)
    tell(f"Loading the draft {options.draft}.")
    place_of_draft = loading.DTYPES[dtype], str(execution_device(target))
    draft = _loaded("--draft", loading.load_draft_to, options.draft, *place_of_draft, target, tokenizer)
    defaults = Limits.of(None, target.device, num_parameters_of(target))
    limits = Limits(
        num_blocks=options.num_blocks,
        max_requests=options.max_requests or defaults.max_requests,
        chunk_size=options.max_batch_tokens or defaults.chunk_size,
        max_queue_size=options.max_queue_size,
        shares_prefixes=options.shares_prefixes,
        image_pixels=options.image_pixels if options.with_images else 0,
    )

    def manager() -> SpeculativeBatchingManager:
        made = SpeculativeBatchingManager(
            target,
            continuous_batching_config=limits,
            assistant_model=draft,
            speculative_config=options.speculative_config,
        )
        for name in options.adapters:  # so that a warm-up is one for requests that choose
            made.engine.target.adapters.check(name)
        return made

    tell("Taking memory for keys and values.")
    return _loaded("--draft", manager), tokenizer


def _loaded(option: str, load_it: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return load_it(*arguments)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise StartError(option, str(error)) from error
