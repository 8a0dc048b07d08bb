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

With `--shared-len`, random prompts begin with as many equal tokens, and our managers share the K/V of these;
"unshared" is "plain" without:

    python benchmarks/manager_load.py --contenders unshared plain --input-len 4000 --shared-len 3990 --output-len 4

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
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from load import (
    BLOCK_SIZE,
    Outcome,
    counters,
    load_models,
    prompts_of,
    put_load,
    running_manager,
    sampling_at,
    sweep_parser,
    wait_for_none,
)
from load_figures import add_row, new_table, summary
from rich.console import Console
from transformers import PreTrainedModel

from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.benchmarking.environment import environment
from hf_specdec.serving.interpreter import let_steps_go_first


CONTENDERS = ("plain", "off", "auto", "tree", "transformers", "unshared")


@dataclass(frozen=True)
class Cell:
    """One measurement: a contender under a load."""

    temperature: float
    concurrency: int
    contender: str


def parse_arguments() -> argparse.Namespace:
    parser = sweep_parser(__doc__, CONTENDERS)
    parser.set_defaults(contenders=CONTENDERS[:-1])
    parser.add_argument("--top-logprobs", type=int, help="log-probabilities that requests of ours ask for")
    parser.add_argument("--vary", action="store_true", help="texts are of different lengths")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each load, the contenders in turn")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything but loading the models")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds of each measurement, before it begins")
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
    if sampling is not None and options.top_logprobs is not None:
        sampling["top_logprobs"] = options.top_logprobs
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
        longest = max(map(len, prompts_of(options, vocab_size, 64)))
        most = max(max(options.concurrency), 8) * (longest + 2 * options.output_len + 128)
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
