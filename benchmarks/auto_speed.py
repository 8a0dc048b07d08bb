"""
What `tree="auto"` chooses against everything that it could choose (target P13): steps without a tree, and fixed trees.

    python benchmarks/auto_speed.py [--paths generate generate_batch] [--rows 1 8 64] [--temperatures 0 1] [--compile]
    OMP_NUM_THREADS=2 taskset -c 0,1 python benchmarks/auto_speed.py --device cpu --rows 1 --asked default

SmolLM2-135M-Instruct, and the head in `model_cards/` or n-grams. Contenders are "plain" (plain `generate`; on a GPU
our captured steps without a tree, which are faster), "default" (nothing asked), "auto", and the trees of `--trees`. In
one process, every turn runs all of them on every prompt (with several rows, on several prompts at once), each turn
beginning with another one. All texts have the same length. The first turn, in which "auto" measures and most graphs
are captured, is reported apart: of each contender the seconds of its first call, how many graphs this captured and how
long these took, and the same of the whole turn and of later ones.

Prints, for every path, draft, temperature and number of rows, tokens per second over plain of each contender: the
first turn, the median of the later ones with its spread, the steps of a call, and "auto" and "default" over the best
contender. (Texts of other trees may differ where two tokens are nearly as likely, and then take other numbers of
steps: a few percent for eight prompts in bfloat16, less with `--endings 4`.) With one row, each prompt's medians, too,
and whether what is asked first meets the bars: for every prompt 0.97 x plain and 0.95 x the best fixed tree, the very
first call 0.90 x plain. It shares step times with what is asked beside it, so the bars are measured with one thing
asked (`--asked default`). One JSON line at the end. On a CPU: 1 and 8 rows of 96 tokens; on a GPU 1, 8 and 64 of 256.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.graphs import RECORDERS
from hf_specdec.loading import default_device
from hf_specdec.smollm2 import smollm2_folder


HEAD = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
PROMPTS = {
    "chat": "What should I think about before I adopt a dog?",
    "german": "Erzähle mir kurz, warum der Himmel blau ist.",
    "code": "Write a Python function that returns the prime factors of a number.",
    "list": "List the planets of the solar system with one sentence about each.",
    "maths": "A train goes 60 km in 45 minutes. How far does it go in two hours? Explain each step.",
    "story": "Write a short story about a lighthouse keeper who finds a letter.",
    "rewrite": "Repeat this text with better punctuation: the cat sat on the mat the dog sat on the cat",
    "table": "Make a table of five countries with their capitals and continents.",
}
ENDINGS = ("", " Answer briefly.", " Use simple words.", " Be precise and give details.")
"""What may be asked at the end of every prompt."""
TREES = ("dynamic:4,3,9", "chain:3", "chain:5", "branching:4,2,1")
"""The first one is the default tree of the head."""
OVER_PLAIN, OVER_BEST, FIRST_CALL = 0.97, 0.95, 0.90
"""Bars of every prompt, and of the first call of a process."""
Call = Callable[[list[str]], None]
"""Writes the texts of some prompts."""
Seconds = dict[str, dict[str, list[float]]]
"""Seconds of the calls of each contender, by what was asked, one for each turn."""


class Captures:
    """Counts what is captured in CUDA graphs, and for how long: steps, prompts and single forwards."""

    def __init__(self, device: str):
        self.number, self.seconds = 0, 0.0
        if device in RECORDERS:
            self._record = RECORDERS[device]
            RECORDERS[device] = self._recorded

    def _recorded(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._record(*args, **options)
        finally:
            self.number += 1
            self.seconds += time.perf_counter() - start

    def take(self) -> tuple[int, float]:
        """Number and seconds of captures since the last call."""
        found = self.number, self.seconds
        self.number, self.seconds = 0, 0.0
        return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch on a CPU")
    parser.add_argument("--turns", type=int, default=5, help="timed ones, after the first")
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), metavar="NAME", help="names, or how many")
    parser.add_argument("--endings", type=int, default=1, choices=range(1, len(ENDINGS) + 1), help="of each prompt")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--paths", nargs="+", default=["generate"], choices=["generate", "generate_batch"])
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--drafts", nargs="+", default=["head"], choices=["head", "ngram"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--trees", nargs="*", default=TREES, help="fixed trees; default: %(default)s")
    parser.add_argument("--asked", nargs="*", default=["default", "auto"], choices=["default", "auto"])
    parser.add_argument("--compile", action="store_true", help="compile forwards, see `SpeculativeConfig`")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    arguments.max_new_tokens = arguments.max_new_tokens or (96 if on_cpu else 256)
    arguments.rows = arguments.rows or ([1, 8] if on_cpu else [1, 8, 64])
    if len(arguments.prompts) == 1 and arguments.prompts[0].isdigit():
        arguments.prompts = list(PROMPTS)[: int(arguments.prompts[0])]
    if unknown := set(arguments.prompts) - set(PROMPTS):
        parser.error(f"--prompts: {sorted(unknown)} are no prompts; there are {list(PROMPTS)}")
    return arguments


def configs_of(arguments: argparse.Namespace) -> dict[str, SpeculativeConfig | None]:
    """How each contender speculates; None for plain `generate`."""
    fixed: dict[str, Any] = {"compile": arguments.compile}
    on_cpu = arguments.device == "cpu" and arguments.paths == ["generate"]
    plain = None if on_cpu else SpeculativeConfig(tree="chain:1", disable_by_batch_size=0, **fixed)
    trees = {"default": None, "auto": "auto"}
    asked = {name: trees[name] for name in arguments.asked} | {tree: tree for tree in arguments.trees}
    return {"plain": plain, **{name: SpeculativeConfig(tree=tree, **fixed) for name, tree in asked.items()}}


class Texts:
    """The model, its prompts, and calls that continue them."""

    def __init__(self, arguments: argparse.Namespace, draft: str, temperature: float):
        folder = smollm2_folder()
        dtype = getattr(torch, arguments.dtype)
        # A new model: its step times are measured from the start.
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        head = hf_specdec.EagleHead.from_pretrained(HEAD).to(arguments.device)
        self.draft: Any = hf_specdec.NgramDraft() if draft == "ngram" else head
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        self.options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, **sampling}
        self.model.generation_config.eos_token_id = None  # every text has the same length
        self.steps: int | None = None
        """Steps of the last `generate`: of its row with most."""

    def call(self, path: str, speculation: SpeculativeConfig | None) -> Call:
        drafting = {"assistant_model": self.draft, "speculative_config": speculation}
        options = self.options | ({} if speculation is None else drafting)

        def generate(prompts: list[str]) -> None:
            inputs = encode_turns(self.tokenizer, prompts).to(self.model.device)
            self.model.generate(**inputs, **options)
            metrics = None if speculation is None else hf_specdec.last_metrics()
            accepted = [0] if metrics is None else map(sum, metrics.accepted_per_step)
            self.steps = options["max_new_tokens"] - 1 - min(accepted, default=0)

        def generate_batch(prompts: list[str]) -> None:
            inputs = encode_turns(self.tokenizer, prompts)
            rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
            self.model.generate_batch([ids[mask].tolist() for ids, mask in rows], persistent_manager=True, **options)

        return generate if path == "generate" else generate_batch


def seconds_of(call: Call, prompts: list[str], seed: int, device: str) -> float:
    torch.manual_seed(seed)
    start = time.perf_counter()
    call(prompts)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def batches_of(prompts: dict[str, str], rows: int) -> dict[str, list[str]]:
    """What is asked at once: each prompt alone, or as many as there are rows, some several times if need be."""
    if rows == 1:
        return {name: [text] for name, text in prompts.items()}
    texts = list(prompts.values())
    texts += [texts[number % len(texts)] for number in range(-len(texts) % rows)]
    return {f"{rows} rows, {first // rows}": texts[first : first + rows] for first in range(0, len(texts), rows)}


CaptureCounts = dict[str, list[tuple[int, float]]]
"""Captures of each contender's calls, in order, and their seconds."""
StepCounts = dict[str, dict[str, list[int | None]]]
"""Steps of the calls of each contender, by what was asked."""


def measure(
    texts: Texts,
    calls: dict[str, Call],
    batches: dict[str, list[str]],
    turns: int,
    captures: Captures,
    captured: CaptureCounts,
    steps: StepCounts,
) -> Seconds:
    found: Seconds = {contender: {name: [] for name in batches} for contender in calls}
    names = list(calls)
    for turn in range(turns + 1):
        for number, (batch, prompts) in enumerate(batches.items()):
            first = (turn + number) % len(names)
            for name in names[first:] + names[:first]:
                captures.take()
                found[name][batch].append(seconds_of(calls[name], prompts, turn, texts.model.device.type))
                captured.setdefault(name, []).append(captures.take())
                steps.setdefault(name, {}).setdefault(batch, []).append(texts.steps)
    return found


def measure_one_by_one(texts: Texts, calls: dict[str, Call], *others: Any) -> Seconds:
    """As `measure`, one contender after the other: a model keeps the manager of the last one only."""
    found: Seconds = {}
    for name, call in calls.items():
        found |= measure(texts, {name: call}, *others)
    return found


def report_captures(found: Seconds, captured: CaptureCounts) -> None:
    """Prints for each contender what it captured in its first call, in the first turn, and later."""
    for name, counts in captured.items():
        in_turn = len(found[name])
        parts = {"first call": counts[:1], "first turn": counts[:in_turn], "later": counts[in_turn:]}
        sums = (f"{key} {sum(n for n, _ in some)} in {sum(s for _, s in some):.2f} s" for key, some in parts.items())
        first = next(iter(found[name].values()))[0]
        print(f"  {name:16} first call {first:.2f} s; captures: {', '.join(sums)}", flush=True)


def report(found: Seconds, steps: StepCounts) -> dict[str, float]:
    """Prints a line for each contender, and one for each prompt if there are several; returns the medians."""
    of_turns = {name: [sum(turn) for turn in zip(*by.values(), strict=True)] for name, by in found.items()}
    medians = {}
    for name, seconds in of_turns.items():
        ratios = [plain / own for plain, own in zip(of_turns["plain"], seconds, strict=True)]
        later = sorted(ratios[1:])
        medians[name] = statistics.median(later)
        spread = f"{later[0]:.2f} … {later[-1]:.2f}"
        counts = [count for by in steps[name].values() for count in by[1:] if count is not None]
        each = f", {statistics.mean(counts):.1f} steps a call" if counts else ""
        print(f"  {name:16} {medians[name]:5.2f} x plain ({spread}), first turn {ratios[0]:.2f}{each}")
    best = max(value for name, value in medians.items() if name not in ("auto", "default"))
    for name in [name for name in ("auto", "default") if name in medians]:
        print(f"  {name} over the best of plain and fixed trees: {medians[name] / best:.3f}")
    for prompt in next(iter(found.values())) if len(next(iter(found.values()))) > 1 else ():
        cells = []
        for name in found:
            pairs = zip(found["plain"][prompt][1:], found[name][prompt][1:], strict=True)
            cells.append(f"{name} {statistics.median(plain / own for plain, own in pairs):.2f}")
        print(f"    {prompt:8} {'  '.join(cells)}", flush=True)
    return medians


def check_bars(found: Seconds, asked: str) -> dict[str, dict[str, float]]:
    """Prints what missed its bar, and how much was met; returns what was compared by prompt."""
    trees = [name for name in found if name not in ("plain", "default", "auto")]
    compared = {}
    for number, prompt in enumerate(found["plain"]):
        # The first call ends the first turn of the first prompt only.
        seconds = {name: by[prompt][0 if number else 1 :] for name, by in found.items()}
        over = {
            name: statistics.median(other / own for other, own in zip(seconds[name], seconds[asked], strict=True))
            for name in ("plain", *trees)
        }
        compared[prompt] = {"plain": over.pop("plain")}
        best = min(over, key=lambda name: over[name], default="plain")
        if over and over[best] < compared[prompt]["plain"]:  # which is faster than plain steps
            compared[prompt][best] = over[best]
    first = next(iter(found["plain"]))
    compared["first call"] = {"plain": statistics.median(found["plain"][first]) / found[asked][first][0]}
    missed = {"plain": 0, "the best tree": 0, "the first call": 0}
    for prompt, shares in compared.items():
        for name, share in shares.items():
            kind = "the first call" if prompt == "first call" else name if name == "plain" else "the best tree"
            bar = {"plain": OVER_PLAIN, "the best tree": OVER_BEST, "the first call": FIRST_CALL}[kind]
            missed[kind] += share < bar
            verdict = "PASS" if share >= bar else "FAIL"
            print(f"    {verdict}  {prompt:10} {asked} over {name}: {share:.3f} (bar {bar:.2f})")
    verdicts = (f"{kind} {f'FAIL ({count})' if count else 'PASS'}" for kind, count in missed.items())
    print(f"  bars of {asked}: over {', '.join(verdicts)}", flush=True)
    return compared


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    asked = [(name, number) for number in range(arguments.endings) for name in arguments.prompts]
    prompts = {f"{name} {number or ''}".strip(): PROMPTS[name] + ENDINGS[number] for name, number in asked}
    results: dict[str, Any] = {}
    captures = Captures(torch.device(arguments.device).type)
    for path in arguments.paths:
        for draft in arguments.drafts:
            for temperature in arguments.temperatures:
                texts = Texts(arguments, draft, temperature)
                calls = {name: texts.call(path, config) for name, config in configs_of(arguments).items()}
                for rows in arguments.rows:
                    batches = batches_of(prompts, rows)
                    measure_all = measure if path == "generate" else measure_one_by_one
                    captured: CaptureCounts = {}
                    steps: StepCounts = {}
                    seconds = measure_all(texts, calls, batches, arguments.turns, captures, captured, steps)
                    plain = min(sum(turn) for turn in zip(*seconds["plain"].values(), strict=True))
                    tokens = arguments.max_new_tokens * sum(map(len, batches.values()))
                    name = f"{path}, {draft}, temperature {temperature:g}, {rows} rows"
                    print(f"{name}: plain writes {tokens / plain:,.0f} tokens/s", flush=True)
                    medians = report(seconds, steps)
                    results[name] = {"over_plain": medians, "seconds": seconds, "captures": captured, "steps": steps}
                    report_captures(seconds, captured)
                    if rows == 1 and arguments.asked:
                        results[name]["bars"] = check_bars(seconds, arguments.asked[0])
                del texts, calls
                gc.collect()
    on_cpu = arguments.device == "cpu"
    setting = {
        "device": arguments.device,
        "machine": platform.processor() if on_cpu else torch.cuda.get_device_name(),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "compile": arguments.compile,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps({**setting, "results": results}))


if __name__ == "__main__":
    main()
