"""
This library beside its peers, with one target and one head: transformers, vLLM, SGLang and SafeAILab's EAGLE.

    python benchmarks/compare_peers.py --device cuda
    python benchmarks/compare_peers.py --shape 8b --acceptance-length 3.5 --device cuda

See benchmarks/peers/README.md: what is measured, and how peers of other environments take part. Prints what each
contender ran with, a table, and one JSON line; draws a picture into `--output`. What is measured is written to
`--results` at once: the same command goes on where it was cut, and tries what has failed again. `--render` draws and
prints without measuring.

    python benchmarks/compare_peers.py --render peers.jsonl --markdown

A trial on a CPU:

    python benchmarks/compare_peers.py --contenders hf-plain ours-tree --open 1 2 --num-prompts 2 --new-tokens 8
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from load import HEAD, prompts_of
from peers.contenders import CONTENDERS, PACKAGES
from peers.job import Job
from peers.preparing import SHAPES, converted, described, has_package, random_head, random_target
from peers.report import failures_of, markdown_of, save_picture, table_of, with_shares
from peers.results import append, begin, cells_of, done_of, read
from rich.console import Console

from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import default_device
from hf_specdec.smollm2 import smollm2_folder


HERE = Path(__file__).parent
WIDTH = 140
"""Of the table, at least."""
SAME = (
    "target head assistant shape acceptance_length num_prompts input_len new_tokens turns warm_up chain tree compile "
    "arguments dtype device"
).split()
"""What two commands that write to one file have in common."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    device = default_device()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--target", help="Hub id or folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--head", default=str(HEAD), help="EAGLE-3 head of any format; default: that of model_cards/")
    parser.add_argument("--assistant", help="small language model for transformers' assisted generation")
    parser.add_argument("--eagle-code", help="checkout of SafeAILab/EAGLE")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a target and head")
    parser.add_argument("--acceptance-length", type=float, help="of --shape: tokens of a step, the bonus one included")
    parser.add_argument("--open", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=4, help="of a turn, where fewer requests are open")
    parser.add_argument("--input-len", type=int, default=512, help="of the random prompts of --shape")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="turns")
    parser.add_argument("--cell-seconds", type=float, default=30.0, help="after which no further turn begins")
    parser.add_argument("--seconds", type=float, default=900.0, help="of one contender, loading included")
    parser.add_argument("--seconds-in-all", type=float, default=math.inf, help="after which the present one is ended")
    parser.add_argument("--chain", type=int, default=5, help="draft tokens of chains")
    parser.add_argument("--tree", default="default", help="ours")
    parser.add_argument("--compile", action="store_true", help="compile our forwards")
    parser.add_argument(
        "--interpreters", nargs="+", default=[], metavar="FAMILY=PATH", help=f"Python for {', '.join(PACKAGES)}"
    )
    parser.add_argument("--arguments", nargs=2, action="append", default=[], metavar=("NAME", "JSON"))
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="float32" if device == "cpu" else "bfloat16")
    parser.add_argument("--results", type=Path, default=Path("peers.jsonl"), help="lines to write, or to go on with")
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="RESULTS", help="print and draw these; measure nothing"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for a page, too")
    parser.add_argument("--output", type=Path, default=Path("peers.png"))
    parser.add_argument("--logs", type=Path, help="folder for what contenders print")
    options = parser.parse_args(words)
    if (options.acceptance_length is None) != (options.shape is None):
        parser.error("--shape and --acceptance-length go together: random weights accept nothing by themselves.")
    options.arguments = {name: json.loads(value) for name, value in options.arguments}
    if unknown := set(options.arguments) - set(CONTENDERS):
        parser.error(f"--arguments: there is no contender {', '.join(sorted(unknown))}.")
    options.interpreters = dict(value.partition("=")[::2] for value in options.interpreters)
    if unknown := set(options.interpreters) - set(PACKAGES):
        parser.error(f"--interpreters: there is no family {', '.join(sorted(unknown))}.")
    return options


def job_of(options: argparse.Namespace, folder: Path) -> Job:
    """The job of all contenders; writes targets and heads into a folder."""
    count = max(options.num_prompts, *options.open)
    prompts = argparse.Namespace(
        prompts="real" if options.shape is None else "random",
        target=options.target,
        input_len=options.input_len,
        shared_len=0,
    )
    if options.shape is None:
        target, head = options.target or str(smollm2_folder()), options.head
        texts = prompts_of(prompts, 0, count)
    else:
        target = random_target(options.shape, options.dtype, folder / "target")
        head = random_head(options.shape, options.dtype, options.device, folder / "head")
        texts = prompts_of(prompts, SHAPES[options.shape]["vocab_size"], count)
    formats = {CONTENDERS[name].head for name in options.contenders} - {None, "hf_specdec"}
    heads = {format: converted(head, format, target, folder / format) for format in sorted(map(str, formats))}
    return Job(
        target=target,
        dtype=options.dtype,
        device=options.device,
        prompts=texts,
        open=options.open,
        temperatures=options.temperature,
        new_tokens=options.new_tokens,
        turns=options.turns,
        warm_up=options.warm_up,
        seconds=options.cell_seconds,
        prompts_per_turn=options.num_prompts,
        is_random=options.shape is not None,
        acceptance_length=options.acceptance_length,
        heads=heads | {"hf_specdec": head},
        assistant=options.assistant,
        chain=options.chain,
        tree=options.tree,
        compile=options.compile,
        eagle_code=options.eagle_code,
        arguments=options.arguments,
    )


def run(name: str, python: str, job_file: Path, results: Path, seconds: float, log: Path) -> str | None:
    """Runs one contender in a process of its own, which adds to the results; returns how it failed, if it did."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [python, "-m", "peers.worker", name, str(job_file), str(results)]
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not ready after {seconds:.0f} s"
        finally:
            end_group(process)
    return (log.read_text().strip().splitlines() or [f"exit status {status}"])[-1][:300] if status else None


def end_group(process: subprocess.Popen) -> None:
    """Ends a process with those that it has started: engines leave some."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def reason_against(name: str, job: Job, interpreters: dict[str, str]) -> str | None:
    """Why a contender cannot take part; None if it can."""
    contender = CONTENDERS[name]
    python, package = interpreters.get(contender.family, sys.executable), PACKAGES[contender.family]
    if (reason := contender.reason_against(job)) is not None:
        return reason
    return None if has_package(python, package) else f"{python} has no {package}"


def measure(options: argparse.Namespace) -> None:
    """Measures what the results lack, contender by contender."""
    end, path = time.perf_counter() + options.seconds_in_all, options.results.absolute()
    values = vars(options) | {"arguments": json.dumps(options.arguments)}
    setting = {name: values[name] for name in SAME} | environment(options.device)
    begin(path, setting)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        job = job_of(options, folder)
        job.write(folder / "job.json")
        for name in options.contenders:
            if done_of(read(path)[1:], name).issuperset(job.cells):
                continue
            failure, began = reason_against(name, job, options.interpreters), time.perf_counter()
            if failure is None:
                _tell(f"{CONTENDERS[name].label} …")
                seconds = min(options.seconds, end - time.perf_counter())
                python = options.interpreters.get(CONTENDERS[name].family, sys.executable)
                log = logs / f"{name}.log"
                failure = (
                    "no time was left" if seconds <= 0 else run(name, python, folder / "job.json", path, seconds, log)
                )
                begin(path, setting)  # without a line that was cut
                num_done = len(done_of(read(path)[1:], name))
                _tell(f"  {num_done} of {len(job.cells)} cells after {time.perf_counter() - began:.0f} s")
            if failure is not None:
                append(path, {"contender": name, "failure": failure})


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def render(paths: Sequence[Path], picture: Path, console: Console, markdown: bool = False) -> None:
    """Prints what contenders ran with, a table and one JSON line; draws a picture."""
    files = [read(path) for path in paths]
    if not all(files):
        raise ValueError(f"--render: there are no results in {', '.join(map(str, paths))}.")
    about, lines = files[0][0]["job"], [line for file in files for line in file[1:]]
    order = list(CONTENDERS).index
    results = with_shares(sorted(cells_of(lines), key=lambda cell: order(cell["contender"])))
    ran_with = {
        line["contender"]: line["ran_with"] | {"seconds_to_start": round(line["seconds_to_start"], 1)}
        for line in lines
        if "ran_with" in line
    }
    last = {line["contender"]: line for line in lines}
    left_out = {name: line["failure"] for name, line in last.items() if "failure" in line}
    for name, values in ran_with.items():
        console.print(f"{CONTENDERS[name].label}: {described(values)}", markup=False)
    for name, reason in left_out.items():
        console.print(f"{CONTENDERS[name].label}: {reason}", markup=False)
    for failure in failures_of(results):
        console.print(failure, markup=False)
    console.print(table_of(results))
    if any("error" not in cell for cell in results):
        what = about["shape"] or Path(about["target"] or "SmolLM2-135M-Instruct").name
        save_picture(results, f"{what} · {about['dtype']} · {about['device']}", picture)
        if markdown:
            print(markdown_of(results))
    for cell in results:
        cell.pop("texts", None)
    print(json.dumps(about | {"ran_with": ran_with, "left_out": left_out, "results": results}))


def main(words: Sequence[str] | None = None) -> None:
    options, console = parse_arguments(words), Console(highlight=False, width=max(WIDTH, Console().width))
    try:
        if options.render is None:
            measure(options)
        render(options.render or [options.results], options.output, console, options.markdown)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the present contender, too
    main()
