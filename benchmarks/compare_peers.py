"""
This library beside its peers, with one target and one head: transformers, vLLM, SGLang and SafeAILab's EAGLE.

    python benchmarks/compare_peers.py --device cuda
    python benchmarks/compare_peers.py --shape 8b --acceptance-length 3.5 --device cuda

See benchmarks/peers/README.md: what is measured, and how peers of other environments take part. Prints what each
contender ran with, a table, and one JSON line; draws a picture into `--output`. A trial on a CPU:

    python benchmarks/compare_peers.py --contenders hf-plain ours-tree --open 1 2 --num-prompts 2 --new-tokens 8
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from load import HEAD, prompts_of
from peers.contenders import CONTENDERS, PACKAGES
from peers.job import Job
from peers.preparing import SHAPES, converted, described, has_package, random_head, random_target
from peers.report import save_picture, table_of, with_shares
from rich.console import Console

from hf_specdec.benchmarking.environment import environment
from hf_specdec.loading import default_device
from hf_specdec.smollm2 import smollm2_folder


HERE = Path(__file__).parent
WIDTH = 140
"""Of the table, at least."""


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
    parser.add_argument("--chain", type=int, default=5, help="draft tokens of chains")
    parser.add_argument("--tree", default="default", help="ours")
    parser.add_argument("--compile", action="store_true", help="compile our forwards")
    parser.add_argument(
        "--interpreters", nargs="+", default=[], metavar="FAMILY=PATH", help=f"Python for {', '.join(PACKAGES)}"
    )
    parser.add_argument("--arguments", nargs=2, action="append", default=[], metavar=("NAME", "JSON"))
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="float32" if device == "cpu" else "bfloat16")
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


def run(name: str, python: str, job_file: Path, seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """Runs one contender in a process of its own; returns its lines, and last one that says how it failed, if so."""
    output = job_file.parent / f"{name}.jsonl"
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [python, "-m", "peers.worker", name, str(job_file), str(output)]
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    if output.exists():
        yield from map(json.loads, output.read_text().splitlines())
    if status is None:
        yield {"failure": f"not ready after {seconds:g} s"}
    elif status:
        yield {"failure": (log.read_text().strip().splitlines() or [f"exit status {status}"])[-1][:300]}


def end_group(process: subprocess.Popen) -> None:
    """Ends a process with those that it has started: engines leave some."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main(words: Sequence[str] | None = None) -> None:
    options, console = parse_arguments(words), Console(highlight=False, width=max(WIDTH, Console().width))
    results: list[dict[str, Any]] = []
    ran_with: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        job = job_of(options, folder)
        job.write(folder / "job.json")
        for name in options.contenders:
            contender = CONTENDERS[name]
            python, package = options.interpreters.get(contender.family, sys.executable), PACKAGES[contender.family]
            reason = contender.reason_against(job)
            if reason is None and not has_package(python, package):
                reason = f"{python} has no {package}"
            if reason is not None:
                left_out[name] = reason
                continue
            for line in run(name, python, folder / "job.json", options.seconds, logs / f"{name}.log"):
                if "ran_with" in line:
                    ran_with[name] = line["ran_with"] | {"seconds_to_start": line["seconds_to_start"]}
                    console.print(f"{contender.label}: {described(ran_with[name])}", markup=False)
                elif "failure" in line:
                    left_out[name] = line["failure"]
                else:
                    results.append({"contender": name, **line})
    results = with_shares(results)
    for name, reason in left_out.items():
        console.print(f"{CONTENDERS[name].label}: {reason}", markup=False)
    console.print(table_of(results))
    about = environment(options.device)
    if any("error" not in cell for cell in results):
        what = options.shape or Path(job.target).name
        save_picture(results, f"{what} · {options.dtype} · {about['device']}", options.output)
    setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    for cell in results:
        cell.pop("texts", None)
    found = {"ran_with": ran_with, "left_out": left_out, "results": results}
    print(json.dumps({**setting, **about, **found}))


if __name__ == "__main__":
    main()
