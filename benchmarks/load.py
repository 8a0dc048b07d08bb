"""
What the scripts that put a load on a manager share: their options, the managers, and requests that are kept open.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from load_figures import Timing
from suite.pair import Pair
from suite.sizes import LLAMA_8B
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig, loading
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.benchmarking import prompts as prompt_sets
from hf_specdec.trees.text import parse_tree


HEAD = Path(__file__).parents[1] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
BLOCK_SIZE = 32


# ------------------------------------------------------------------------------------------------------------- options


def load_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every load."""
    device = loading.default_device()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct; pair:0.03 for random weights (no server)")
    parser.add_argument("--draft", help="default: the head in model_cards/ for SmolLM2, else ngram")
    parser.add_argument("--tree", default="default", help="default: the draft's; on a CPU what pays")
    parser.add_argument("--prompts", choices=("random", "real"), default="random")
    parser.add_argument("--input-len", type=int, default=1000, help="of random prompts")
    parser.add_argument("--shared-len", type=int, default=0, help="tokens with which all random prompts begin")
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--max-requests", type=int)
    parser.add_argument("--num-blocks", type=int, help=f"of {BLOCK_SIZE} tokens, of our managers")
    parser.add_argument("--compile", action="store_true", help="compile forwards first: see `SpeculativeConfig`")
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="float32" if device == "cpu" else "bfloat16")
    return parser


def sweep_parser(description: str | None, contenders: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options of a sweep of contenders over numbers of open requests and temperatures."""
    parser = load_parser(description)
    parser.add_argument("--disable-by-batch-size", type=int, help="of the contenders that speculate")
    parser.add_argument("--contenders", nargs="+", default=list(contenders), choices=contenders)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16, 64, 100])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--requests-per-place", type=int, default=2, help="requests = concurrency times this, 4 at least"
    )
    return parser


def load_models(options: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The target and its draft."""
    dtype = loading.DTYPES[options.dtype]
    kind, _, epsilon = (options.target or "").partition(":")
    if kind == "pair":
        pair = Pair(LLAMA_8B, dtype, options.device)
        pair.scale(float(epsilon))
        return pair.target, pair.draft
    draft = options.draft or (str(HEAD) if options.target is None else "ngram")
    model = loading.load_target(options.target, dtype, options.device)
    return model, loading.load_draft_to(draft, dtype, options.device)


def prompts_of(options: argparse.Namespace, vocab_size: int, count: int) -> list[list[int]]:
    """The token ids of `count` prompts, equal for every contender."""
    if options.prompts == "real":
        tokenizer = loading.load_tokenizer(options.target)
        built_in = prompt_sets.encode(tokenizer, prompt_sets.built_in(), "cpu")
        encoded = [prompt.inputs["input_ids"][0].tolist() for prompt in built_in]
        return [encoded[number % len(encoded)] for number in range(count)]
    choice = random.Random(0)
    shared = choice.choices(range(5, vocab_size), k=options.shared_len)
    own = options.input_len - options.shared_len
    return [[*shared, *choice.choices(range(5, vocab_size), k=own)] for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------ managers


def blocks_of(count: int) -> dict[str, int]:
    """The options of a `ContinuousBatchingConfig` for so many blocks of `BLOCK_SIZE` tokens."""
    # Transformers before 5.23 calls the option `block_size`.
    return {
        "num_blocks": count,
        "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size": BLOCK_SIZE,
    }


def sampling_at(temperature: float) -> dict[str, Any]:
    """The sampling options of `generate` for a temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}


@contextmanager
def running_manager(
    contender: str, model: PreTrainedModel, draft: Any, temperature: float, options: argparse.Namespace
) -> Iterator[Any]:
    """
    Runs a contender's manager inside the context; requests without sampling options use this temperature. Ours share
    K/V blocks only where prompts have a beginning in common: loads that are repeated would find all of their prompts.
    """
    config = GenerationConfig(
        **sampling_at(temperature), top_k=0, max_new_tokens=options.output_len, eos_token_id=-1, pad_token_id=0
    )
    memory = {} if options.num_blocks is None else blocks_of(options.num_blocks)
    if options.max_requests is not None:
        memory["max_requests_per_batch"] = options.max_requests
    memory["allow_block_sharing"] = options.shared_len > 0 and contender != "unshared"
    call: dict[str, Any] = {"generation_config": config}
    if contender != "transformers":
        call["continuous_batching_config"] = ContinuousBatchingConfig(**memory)
    if contender != "transformers":
        tree = "auto" if contender == "auto" else parse_tree(options.tree)
        most = 0 if contender in ("off", "plain", "unshared") else options.disable_by_batch_size
        call |= {
            "assistant_model": NgramDraft() if contender in ("plain", "unshared") else draft,
            "speculative_config": SpeculativeConfig(tree=tree, disable_by_batch_size=most, compile=options.compile),
        }
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(**call)
    if isinstance(manager, SpeculativeBatchingManager):
        manager.warmup(at_once=True)
    manager.start()
    try:
        yield manager
    finally:
        stops_hard = "hard_stop" in inspect.signature(manager.stop).parameters
        manager.stop(block=True, timeout=60, **({"hard_stop": True} if stops_hard else {}))
        if model.config._attn_implementation != attention:  # transformers' manager does not restore the model's
            model.set_attn_implementation(attention)
        del manager
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fatal_error(manager: Any) -> Any:
    return getattr(getattr(manager, "background_thread_status", None), "fatal_error", None)


def counters(manager: Any) -> dict[str, float]:
    """The manager's counters of speculation, under vLLM's names; empty for a manager of transformers."""
    if not isinstance(manager, SpeculativeBatchingManager):
        return {}
    counts = manager.state.speculation
    found = {name: getattr(counts, name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
    by_position = enumerate(list(counts.num_accepted_per_position))
    return found | {f"num_accepted_tokens_per_pos_{place}": count for place, count in by_position}


def wait_for_none(manager: Any) -> None:
    """Takes results until all requests are over, cancelled ones too: the next contender is to run alone."""
    while manager.get_result(timeout=0.2) is not None or is_busy(manager):
        pass


def is_busy(manager: Any) -> bool:
    """Whether one of this library's managers has requests that are not over, as when it captures a step for long."""
    is_ours = isinstance(manager, SpeculativeBatchingManager) and manager.is_running()
    return is_ours and manager.state.num_running + manager.state.num_waiting > 0


# ---------------------------------------------------------------------------------------------------------------- load


@dataclass
class Open:
    """An unfinished request: its tokens so far, and the times of its results in seconds from its start."""

    number: int
    start: float
    tokens: list[int] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)


class Load:
    """
    Keeps requests open on a running manager.

    Args:
        manager: the manager.
        requests (`Iterable[tuple[list[int], int]]`): the prompts' token ids and their numbers of new tokens.
        options: of every request.
    """

    def __init__(self, manager: Any, requests: Iterable[tuple[list[int], int]], **options: Any):
        self._manager, self._options = manager, options
        self._waiting = enumerate(requests)
        self.open: dict[str, Open] = {}

    def fill(self, places: int) -> bool:
        """Adds requests until `places` are open or none is left; returns whether any is open."""
        while len(self.open) < places and (request := next(self._waiting, None)) is not None:
            number, (prompt, length) = request
            start = time.perf_counter()
            name = self._manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1, **self._options)
            self.open[name] = Open(number, start)
        return bool(self.open)

    def take(self, timeout: float) -> Open | None:
        """Waits for a result; returns the request that it ends, if any."""
        result, now = self._manager.get_result(timeout=timeout), time.perf_counter()
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError(f"{type(self._manager).__name__} has ended: {fatal_error(self._manager)}")
            return None
        request = self.open.get(result.request_id)
        if request is None:
            return None
        if result.error is not None:
            raise RuntimeError(f"A request has failed: {result.error}")
        if len(result.generated_tokens) > len(request.tokens):
            request.tokens = list(result.generated_tokens)
            request.pieces.append(now - request.start)
        return self.open.pop(result.request_id) if result.is_finished() else None

    def cancel(self) -> None:
        """Cancels the requests that are open."""
        for name in self.open:
            self._manager.cancel_request(name)


@dataclass
class Outcome:
    """Results of a load: timings, and the texts of finished requests by the number of the prompt."""

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    is_cut: bool = False


def put_load(
    manager: Any,
    prompts: list[list[int]],
    length: int,
    concurrency: int,
    deadline: float,
    sampling: dict[str, Any] | None = None,
    varies: bool = False,
) -> Outcome:
    """
    Puts a load on a manager until all requests are finished or the deadline is reached.

    Args:
        manager: a running manager.
        prompts (`list[list[int]]`): token ids, one request each.
        length (`int`): new tokens of a request.
        concurrency (`int`): requests open at a time.
        deadline (`float`): time of `time.perf_counter()`.
        sampling (`dict`, *optional*): sampling options of the requests.
        varies (`bool`): whether lengths vary from half to one and a half times `length`.
    """
    shortest, longest = (length // 2, length + length // 2) if varies else (length, length)
    lengths = [random.Random(number).randint(shortest, longest) for number in range(len(prompts))]
    load = Load(manager, zip(prompts, lengths, strict=True), streaming=True, **(sampling or {}))
    outcome, start = Outcome(), time.perf_counter()
    while not outcome.is_cut and load.fill(concurrency):
        request = load.take(timeout=0.1)
        outcome.is_cut = time.perf_counter() > deadline
        if request is not None:
            outcome.texts[request.number] = request.tokens
            outcome.timings.append(Timing(len(request.tokens), request.pieces))
    outcome.seconds = time.perf_counter() - start
    load.cancel()
    outcome.timings += [
        Timing(len(request.tokens), request.pieces, is_cut=True) for request in load.open.values() if request.pieces
    ]
    return outcome
