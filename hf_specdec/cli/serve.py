"""`hf-specdec serve`: transformers' OpenAI-compatible server, with speculative decoding."""

from __future__ import annotations

import logging
import time
from typing import Annotated, Any

import typer

from ..serving.defaults import MOST_BODY_BYTES, MOST_IMAGE_BYTES, MOST_IMAGE_PIXELS, STALL_SECONDS
from .options import (
    CompileCacheOption,
    CompileOption,
    DeviceMapOption,
    DeviceOption,
    DraftOption,
    DtypeOrAutoOption,
    ImageHostsOption,
    LogprobsMode,
    LogprobsModeOption,
    LorasOption,
    MaxBatchTokensOption,
    MaxRequestsOption,
    NumBlocksOption,
    TargetArgument,
    TreeOption,
)
from .serve_checks import adapters_in, check_address, check_certificate, check_packages


_BEGAN = time.monotonic()


def serve(
    target: TargetArgument = None,
    draft: DraftOption = "ngram",
    tree: TreeOption = "default",
    disable_by_batch_size: Annotated[
        int | None, typer.Option(min=0, help="With more requests than this, steps carry no draft tokens.")
    ] = None,
    disable_counts_waiting: Annotated[
        bool,
        typer.Option("--disable-counts-waiting", help="Count waiting requests towards --disable-by-batch-size, too."),
    ] = False,
    max_step_nodes: Annotated[
        int | None, typer.Option(min=1, help="Most draft tokens of a step, over all its requests.")
    ] = None,
    compiles: CompileOption = False,
    compile_cache: CompileCacheOption = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: as it is named here.")
    ] = None,
    loras: LorasOption = None,
    max_requests: MaxRequestsOption = None,
    max_batch_tokens: MaxBatchTokensOption = None,
    num_blocks: NumBlocksOption = None,
    shares_prefixes: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Let texts that begin alike share K/V, also with those that have ended.",
        ),
    ] = True,
    max_queue_size: Annotated[int, typer.Option(min=0, help="Most requests that wait; 0: any number.")] = 0,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Most bytes of a request's body; longer ones are answered with 413.")
    ] = MOST_BODY_BYTES,
    image_hosts: ImageHostsOption = None,
    max_image_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of an image's file.")] = MOST_IMAGE_BYTES,
    max_image_pixels: Annotated[int, typer.Option(min=1, help="Most pixels of an image.")] = MOST_IMAGE_PIXELS,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="HF_SPECDEC_API_KEY",
            show_envvar=True,
            help="A key that requests must have. May be given several times. The environment hides it from others.",
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-allow-origin", help="An origin whose pages may send requests, or *. May be given several times."
        ),
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate (chain) in PEM format: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Key of the certificate, if it is in another file.")] = None,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Most seconds that an answer may take. Default: any number.")
    ] = None,
    request_log: Annotated[bool, typer.Option(help="Log a line for every request.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Tell of each piece that is compiled and each CUDA graph, with its time.")
    ] = False,
    stall_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds without the end of a forward after which /health answers 503.")
    ] = STALL_SECONDS,
    logprobs_mode: LogprobsModeOption = LogprobsMode.RAW,
    dtype: DtypeOrAutoOption = None,
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
) -> None:
    """Serve a model over OpenAI's API (chat, completions, responses): the same texts as without a draft, sooner."""
    check_packages("serve")
    if device is not None and device_map is not None:
        raise typer.BadParameter("give this or --device, not both.", param_hint="--device-map")
    if disable_counts_waiting and disable_by_batch_size is None:
        raise typer.BadParameter("belongs to --disable-by-batch-size.", param_hint="--disable-counts-waiting")
    check_address(host, port)
    check_certificate(ssl_certfile, ssl_keyfile)
    if any(not key.strip() for key in api_keys or ()):
        raise typer.BadParameter("an empty key is none. Give some characters.", param_hint="--api-key")

    _tell("Importing PyTorch and transformers.")
    from ..serving.engine.start import EngineProcess
    from ..serving.termination import unwound_by_sigterm

    with unwound_by_sigterm(), EngineProcess() as process:
        # Takes seconds, as it does in the engine's process.
        import uvicorn

        from .. import loading
        from ..compiling.kept import compile_cache_of
        from ..config import SpeculativeConfig
        from ..serving.engine.options import EngineOptions, StartError
        from ..serving.http_server import HttpServer
        from ..serving.images import image_reader
        from ..serving.interpreter import never_search_again
        from ..serving.starting import StartingApp, starting
        from ..trees.text import parse_tree
        from .arguments import checked_device, checked_dtype, or_bad_parameter

        name = model_name or target or loading.SMOLLM2
        adapters = or_bad_parameter("--lora", adapters_in, loras or [], name)
        device = checked_device(device)
        config = or_bad_parameter(
            "--tree",
            lambda: SpeculativeConfig(
                tree=parse_tree(tree),
                disable_by_batch_size=disable_by_batch_size,
                disable_counts_waiting=disable_counts_waiting,
                max_step_nodes=max_step_nodes,
                compile=compiles,
            ),
        )
        _tell(f"Reading the tokenizer of {target or loading.SMOLLM2}.")
        tokenizer = or_bad_parameter("TARGET", loading.load_tokenizer, target)
        or_bad_parameter("--draft", loading.check_place, None if draft in loading.WORDS else draft)
        images = image_reader(target, frozenset(map(str.lower, image_hosts or ())), max_image_bytes, max_image_pixels)
        options = EngineOptions(
            target=target,
            draft=draft,
            speculative_config=config,
            device=device,
            dtype=checked_dtype(dtype, device, may_be_auto=True),
            device_map=device_map,
            max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
            num_blocks=num_blocks,
            max_queue_size=max_queue_size,
            with_images=not isinstance(images, str),
            image_pixels=max_image_pixels,
            adapters=adapters,
            shares_prefixes=shares_prefixes,
            compile_cache=compile_cache_of(compile_cache) if compiles or device.startswith("cuda") else None,
            tells_more=verbose,
        )
        engine = process.begin(options, _tell)

        def app() -> Any:
            from ..serving.app import build_app

            if engine.model.about_draft is not None:
                _tell(engine.model.about_draft)
            limits: dict[str, Any] = {"stall_seconds": stall_seconds, "max_body_bytes": max_body_bytes}
            limits |= {"answer_seconds": request_timeout, "api_keys": api_keys, "origins": origins}
            made = build_app(engine, tokenizer, name, images=images, logprobs_mode=logprobs_mode.value, **limits)
            never_search_again()
            return made

        if not request_log:
            logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
        first = StartingApp(engine, api_keys, origins)
        tls: dict[str, Any] = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
        server = HttpServer(uvicorn.Config(first, host=host, port=port, access_log=request_log, **tls), engine)
        try:
            with starting(first, engine, server, app, _tell, prepare=_import_routes):
                server.run()
        except StartError as error:
            raise typer.BadParameter(error.reason, param_hint=error.option) from error


def _import_routes() -> None:
    """Imports, while the engine loads its models, what takes requests after it: that takes seconds, too."""
    from ..serving import app  # noqa: F401


def _tell(line: str) -> None:
    """Writes a line on stderr, with the seconds since the command began."""
    typer.echo(f"[{time.monotonic() - _BEGAN:6.1f} s] {line}", err=True)
