"""The prompts that a step reads: by captured steps, or by the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..trees import DraftTree
from .captured import LaunchedPrompts
from .captured.prompt_step import PromptReport
from .prompt_memory import lacks_memory
from .request import Request
from .scheduler import Chunk


if TYPE_CHECKING:
    from .engine import Engine


def run(engine: Engine) -> Iterator[list[Request]]:
    """Runs the step's prefill chunks. Yields requests whose prefill has ended, each with its first new token."""
    launched: list[LaunchedPrompts] = []
    for chunk in engine.scheduler.chunks():
        engine.last_end = None
        with engine.metrics.phase("prefill"):
            report = engine.device_steps.prompts.launch(chunk, engine.target.widths())
            begun = _read(engine, chunk) if report is None else []
        if report is not None:
            engine.device_steps.deliver_results()
            launched += _launched(engine, chunk, report)
        if begun:
            yield begun
    if launched:
        with engine.metrics.phase("prefill"):
            begun = _begin(engine, launched)
        yield begun


def _read(engine: Engine, chunk: Chunk) -> list[Request]:
    """Prefills a chunk. Returns the requests whose prefill has ended, each with its first new token."""
    requests, counts = chunk.requests, chunk.counts
    nodes = engine.target.nodes_of(chunk)
    try:
        with engine.prompt_memory.measuring(counts[0], _inputs_of(chunk)):
            logits = engine.target.read(chunk)
    except Exception as error:
        if not chunk.is_whole or (lacks_memory(error) and engine.ranks.are_several):  # others may have had enough
            raise
        return _refuse_inputs(engine, requests, error)
    engine.device_steps.deliver_results()
    engine.drafting.observe_prompts(requests, nodes)
    engine.num_tokens_read += sum(counts)
    rows = engine.scheduler.note_read(requests)
    begun = [requests[row] for row in rows]
    if begun:
        no_draft = DraftTree.empty(len(rows), engine.target.device)
        walk = engine.acceptance.accept(begun, no_draft, [], logits[rows, None])
        engine.bookkeeping.append_last(begun, walk)
        engine.bookkeeping.mark_nan_of_failed(begun)
        engine.prefixes.read(begun)
    return begun


def _inputs_of(chunk: Chunk) -> dict[str, Any]:
    """What one prompt that a chunk is the whole of holds beside its tokens; nothing of others."""
    inputs, is_one = chunk.requests[0].inputs, chunk.is_whole and len(chunk.requests) == 1
    is_one = is_one and chunk.counts[0] == len(chunk.requests[0].prompt)
    return inputs.values if inputs is not None and is_one else {}


def _refuse_inputs(engine: Engine, requests: list[Request], error: Exception) -> list[Request]:
    """
    Fails requests whose inputs the model does not take, such as images that their tokens have no places for, or that
    are more than memory has room for.
    """
    if engine.target.features is not None:
        engine.target.features.drop()
    for request in requests:
        request.fail(error, by_its_options=True)
        if lacks_memory(error) and request.inputs is not None:
            request.error = engine.prompt_memory.error_of(error, len(request.prompt), request.inputs.values)
    engine.bookkeeping.mark_nan_of_failed(requests)
    return requests


def _launched(engine: Engine, chunk: Chunk, report: PromptReport) -> list[LaunchedPrompts]:
    """Takes note of a chunk launched on the device. Returns nothing if no prefill ends in it."""
    engine.num_tokens_read += sum(chunk.counts)
    rows = engine.scheduler.note_read(chunk.requests)
    return [LaunchedPrompts([chunk.requests[row] for row in rows], rows, report)] if rows else []


def _begin(engine: Engine, launched: list[LaunchedPrompts]) -> list[Request]:
    """Gives requests whose prefill on the device has ended their first new token, and returns these requests."""
    for reading in launched:
        engine.bookkeeping.append_last(reading.requests, reading.walk())
    begun = [request for reading in launched for request in reading.requests]
    engine.bookkeeping.mark_nan_of_failed(begun)
    engine.prefixes.read(begun)
    return begun
