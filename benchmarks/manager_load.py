"""
Many requests under load, without a server: throughput and latency with speculation, without, and of transformers' own
`ContinuousBatchingManager`.

    python benchmarks/manager_load.py [--target ID_OR_FOLDER] [--draft ID_OR_FOLDER] [--seconds 300]

The defaults need no network: SmolLM2-135M-Instruct and its head in model_cards/. `--target pair:0.03` is a random
model of the shape of Llama-3.1-8B and a draft of its first two layers; the larger the number, the less they agree.

Every contender gets the same prompts: `--input-len` random tokens (or the built-in prompts, with `--prompts real`),
`--output-len` tokens each whatever they say (with `--vary`, from half to one and a half times as many: else those of
plain decoding end together, and the prompts of the next are read together), as many open at a time as `--concurrency`
says. Times are those at which results come out of the manager. Contenders are our manager without a draft model
("plain"), with one whose speculation is off ("off"), with a tree ("tree", "auto"), and transformers' manager. TTFT:
time to the first token; TPOT: time per token after the first; ITL: time between two results.

One manager of each contender serves all its loads, as a server would; it captures its CUDA graphs first
(`manager.warmup()`). Before each load a few requests do not count; with `--warm-up`, as many as fit into so many
seconds, at the full load. What is left of `--seconds` is shared out evenly to what is still to be measured; requests
that are open when the time of a measurement ends count with the tokens they have, but not as requests. With `--rounds`
every load is put on the contenders in turn so many times: the figures are those of the round of median throughput (of
the lower one in the middle if their number is even), and beside the throughput stands its multiple of the first
contender's. Greedy texts are compared with those of the first contender. Prints a table, then one JSON line. A trial
on a CPU:

    python benchmarks/manager_load.py --concurrency 1 4 --input-len 40 --output-len 20 --seconds 60
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from load_figures import Timing, add_row, new_table, summary
from rich.console import Console
from suite.pair import Pair
from suite.sizes import LLAMA_8B
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_specdec import NgramDraft, SpeculativeConfig, loading
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.benchmarking import prompts as prompt_sets
from hf_specdec.benchmarking.environment import environment
from hf_specdec.serving.engine.process import let_steps_go_first
from hf_specdec.trees.text import parse_tree


HEAD = Path(__file__).parents[1] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
BLOCK_SIZE = 32
CONTENDERS = ("plain", "off", "auto", "tree", "transformers")


@dataclass(frozen=True)
class Cell:
    """One measurement: a contender under a load."""

    temperature: float
    concurrency: int
    contender: str


@dataclass
class Open:
    """An unfinished request: its tokens so far, and the times of its results in seconds from its start."""

    prompt: int
    start: float
    tokens: list[int] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """Results of a load: timings, and the texts of finished requests by the number of the prompt."""

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    is_cut: bool = False


# ---------------------------------------------------------------------------------------------------------------- load


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
    outcome, waiting, running = Outcome(), list(enumerate(prompts))[::-1], {}

    def add() -> None:
        if waiting:
            number, prompt = waiting.pop()
            own = random.Random(number).randint(length // 2, length + length // 2) if varies else length
            begun = time.perf_counter()
            name = manager.add_request(prompt, max_new_tokens=own, streaming=True, eos_token_id=-1, **(sampling or {}))
            running[name] = Open(number, begun)

    start = time.perf_counter()
    for _ in range(concurrency):
        add()
    while running and not outcome.is_cut:
        result, now = manager.get_result(timeout=0.1), time.perf_counter()
        outcome.is_cut = now > deadline
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"{type(manager).__name__} has ended: {fatal_error(manager)}")
            continue
        request = running.get(result.request_id)
        if request is None:
            continue
        if result.error is not None:
            raise RuntimeError(f"A request has failed: {result.error}")
        if len(result.generated_tokens) > len(request.tokens):
            request.tokens = list(result.generated_tokens)
            request.pieces.append(now - request.start)
        if result.is_finished():
            del running[result.request_id]
            outcome.texts[request.prompt] = request.tokens
            outcome.timings.append(Timing(len(request.tokens), request.pieces))
            add()
    outcome.seconds = time.perf_counter() - start
    for name, request in running.items():
        manager.cancel_request(name)
        if request.pieces:
            outcome.timings.append(Timing(len(request.tokens), request.pieces, is_cut=True))
    return outcome


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


# ------------------------------------------------------------------------------------------------------------ managers


def sampling_at(temperature: float) -> dict[str, Any]:
    """The sampling options of `generate` for a temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}


@contextmanager
def running_manager(
    contender: str, model: PreTrainedModel, draft: Any, temperature: float, options: argparse.Namespace
) -> Iterator[Any]:
    """Runs a contender's manager inside the context; requests without sampling options use this temperature."""
    config = GenerationConfig(
        **sampling_at(temperature), top_k=0, max_new_tokens=options.output_len, eos_token_id=-1, pad_token_id=0
    )
    # Transformers before 5.23 calls the option `block_size`.
    size = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    memory = {} if options.num_blocks is None else {"num_blocks": options.num_blocks, size: BLOCK_SIZE}
    if options.max_requests is not None:
        memory["max_requests_per_batch"] = options.max_requests
    call: dict[str, Any] = {"generation_config": config}
    if memory and contender != "transformers":
        call["continuous_batching_config"] = ContinuousBatchingConfig(**memory)
    if contender != "transformers":
        tree = "auto" if contender == "auto" else parse_tree(options.tree)
        most = 0 if contender in ("off", "plain") else options.disable_by_batch_size
        call |= {
            "assistant_model": NgramDraft() if contender == "plain" else draft,
            "speculative_config": SpeculativeConfig(tree=tree, disable_by_batch_size=most, compile=options.compile),
        }
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(**call)
    if isinstance(manager, SpeculativeBatchingManager):
        manager.warmup()
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
    return model, loading.load_draft(draft, dtype, options.device)


def longest_prompt(options: argparse.Namespace, vocab_size: int) -> int:
    """The number of tokens of the longest prompt."""
    return max(map(len, prompts_of(options, vocab_size, 64)))


def prompts_of(options: argparse.Namespace, vocab_size: int, count: int) -> list[list[int]]:
    """The token ids of `count` prompts, equal for every contender."""
    if options.prompts == "real":
        tokenizer = loading.load_tokenizer(options.target)
        built_in = prompt_sets.encode(tokenizer, prompt_sets.built_in(), "cpu")
        encoded = [prompt.inputs["input_ids"][0].tolist() for prompt in built_in]
        return [encoded[number % len(encoded)] for number in range(count)]
    choice = random.Random(0)
    return [choice.choices(range(5, vocab_size), k=options.input_len) for _ in range(count)]


# ----------------------------------------------------------------------------------------------------------------- all


def parse_arguments() -> argparse.Namespace:
    device = loading.default_device()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct; pair:0.03 for random weights")
    parser.add_argument("--draft", help="default: the head in model_cards/ for SmolLM2, else ngram")
    parser.add_argument("--tree", default="default", help='of the contender "tree"')
    parser.add_argument("--disable-by-batch-size", type=int, help='of the contenders "auto" and "tree"')
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16, 64, 100])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", choices=("random", "real"), default="random")
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--vary", action="store_true", help="texts are of different lengths")
    parser.add_argument("--requests-per-place", type=int, default=2, help="requests = concurrency times this")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each load, the contenders in turn")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything but loading the models")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds of each measurement, before it begins")
    parser.add_argument("--max-requests", type=int)
    parser.add_argument(
        "--num-blocks", type=int, help="of 32 tokens, of our managers; default: what the largest load needs"
    )
    parser.add_argument("--compile", action="store_true", help="compile forwards first: see `SpeculativeConfig`")
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="float32" if device == "cpu" else "bfloat16")
    return parser.parse_args()


class Managers:
    """
    Managers that serve the loads: one for each contender of this library, and one per temperature for transformers,
    whose requests take no sampling options.

    Transformers' manager runs without any other manager, because it switches the model's attention.
    """

    def __init__(self, model: PreTrainedModel, draft: Any, options: argparse.Namespace):
        self._model, self._draft, self._options = model, draft, options
        self._running: dict[tuple[str, float], Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Managers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.clear()
        self._stack.close()

    def of(self, contender: str, temperature: float) -> Any:
        """A running manager of a contender, which has served a first request."""
        is_theirs = contender == "transformers"
        key = contender, temperature if is_theirs else 0.0
        if key not in self._running:
            if is_theirs:
                self.__exit__()
            manager = self._stack.enter_context(
                running_manager(contender, self._model, self._draft, key[1], self._options)
            )
            put_load(manager, [[5, 6, 7]], 2, 1, time.perf_counter() + 600)
            self._running[key] = manager
        return self._running[key]


def measure(
    manager: Any,
    prompts: list[list[int]],
    temperature: float,
    concurrency: int,
    seconds: float,
    options: argparse.Namespace,
) -> tuple[Outcome, dict[str, Any]]:
    """Measures one manager under one load, for at most `seconds` after warm-up."""
    sampling = sampling_at(temperature) if isinstance(manager, SpeculativeBatchingManager) else None
    torch.manual_seed(0)
    few = prompts[: min(concurrency, 8)]
    put_load(manager, few, min(options.output_len, 16), len(few), time.perf_counter() + 60, sampling)
    warm = time.perf_counter() + options.warm_up
    while time.perf_counter() < warm:
        put_load(manager, prompts, options.output_len, concurrency, warm, sampling, options.vary)
    wait_for_none(manager)
    before = counters(manager)
    end = time.perf_counter() + seconds
    outcome = put_load(manager, prompts, options.output_len, concurrency, end, sampling, options.vary)
    figures = summary(outcome.seconds, outcome.timings, before, counters(manager))
    wait_for_none(manager)
    return outcome, {"temperature": temperature, "concurrency": concurrency} | figures | {"was_cut": outcome.is_cut}


def wait_for_none(manager: Any) -> None:
    """Takes results until all requests are over, cancelled ones too: the next contender is to run alone."""
    while manager.get_result(timeout=0.2) is not None or is_busy(manager):
        pass


def is_busy(manager: Any) -> bool:
    """Whether one of this library's managers has requests that are not over, as when it captures a step for long."""
    is_ours = isinstance(manager, SpeculativeBatchingManager) and manager.is_running()
    return is_ours and manager.state.num_running + manager.state.num_waiting > 0


def main() -> None:
    options = parse_arguments()
    model, draft = load_models(options)
    let_steps_go_first()  # as `hf-specdec serve` does
    vocab_size = model.config.get_text_config().vocab_size
    cells = [
        Cell(temperature, concurrency, contender)
        for temperature in options.temperature
        for concurrency in options.concurrency
        for _ in range(options.rounds)
        for contender in options.contenders
    ]
    cells.sort(key=lambda cell: cell.contender == "transformers")  # last: it may take long to start
    found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    expected: dict[int, dict[int, list[int]]] = {}
    end = time.perf_counter() + options.seconds
    if options.num_blocks is None and set(options.contenders) != {"transformers"}:  # our managers share the memory
        most = max(max(options.concurrency), 8) * (longest_prompt(options, vocab_size) + 2 * options.output_len + 128)
        options.num_blocks = -(-most // BLOCK_SIZE)
    with Managers(model, draft, options) as managers:
        for number, cell in enumerate(cells):
            case = asdict(cell)
            try:
                manager = managers.of(cell.contender, cell.temperature)
                left = end - time.perf_counter()
                if left <= 0:
                    raise TimeoutError("no time was left")
                prompts = prompts_of(options, vocab_size, max(4, cell.concurrency * options.requests_per_place))
                share = left / (len(cells) - number)
                outcome, figures = measure(manager, prompts, cell.temperature, cell.concurrency, share, options)
            except Exception as error:  # the other contenders are still measured
                case["error"] = f"{type(error).__name__}: {error}"
            else:
                if cell.temperature == 0:
                    texts = expected.setdefault(cell.concurrency, outcome.texts)
                    figures["same_texts"] = share_of_same(texts, outcome.texts)
                case |= figures
            found[cell].append(case)
            print(json.dumps(case), file=sys.stderr, flush=True)
    results, table = [], new_table()
    for cell, rounds in found.items():
        results.append(median_of(rounds))
        if "error" not in results[-1]:
            first = median_of(found[Cell(cell.temperature, cell.concurrency, options.contenders[0])])
            if "error" not in first:
                results[-1]["over_first"] = results[-1]["tokens_per_second"] / first["tokens_per_second"]
            add_row(table, results[-1])
    Console().print(table)
    print(json.dumps({**environment(options.device), **vars(options), "results": results}))


def share_of_same(texts: dict[int, list[int]], others: dict[int, list[int]]) -> float | None:
    """The share of equal texts among the prompts that both have finished; None if there are none."""
    both = texts.keys() & others.keys()
    return sum(texts[one] == others[one] for one in both) / len(both) if both else None


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """
    The figures of the round of median throughput, the lower one of two in the middle, with the throughput of all
    rounds; an error if all failed.
    """
    done = sorted((one for one in rounds if "error" not in one), key=lambda one: one["tokens_per_second"])
    if not done:
        return dict(rounds[0])
    return done[(len(done) - 1) // 2] | {"tokens_per_second_of_rounds": [one["tokens_per_second"] for one in done]}


if __name__ == "__main__":
    main()
