"""Two replicas under a local Ray, one of which is killed; and a bulk job of two engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.bulk import lines_of
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.servers import metric, read


pytestmark = pytest.mark.slow
for package in ("fastapi", "prometheus_client", "ray.serve"):
    pytest.importorskip(package)
openai = pytest.importorskip("openai")

from hf_specdec.replicas.front import GONE  # noqa: E402


ROOT = Path(__file__).parents[2]
SECONDS = 600
LENGTH, LONG = 100, 400


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels/hf-specdec-kernels/torch-ext"), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | more


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address of `examples/ray_serve.py` with two replicas, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "log"
    options = ["--replicas", "2", "--cpus", "0.1", "--num-blocks", "64", "--port", str(port)]
    command = [
        sys.executable,
        ROOT / "examples/ray_serve.py",
        "--target",
        TINY_TARGET,
        "--model-name",
        "tiny",
        *options,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment())
    try:
        until = time.monotonic() + SECONDS
        while "(Ctrl-C ends)" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def body(number: int, length: int = LENGTH) -> dict[str, Any]:
    prompts = trained_prompts()["prompts"]
    prompt = trained_tokenizer().decode(prompts[number % len(prompts)][: 6 + number])
    return {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0}


@cache
def expected(number: int, length: int = LENGTH) -> str:
    """What plain `generate` writes."""
    inputs = trained_tokenizer()(body(number)["prompt"], return_tensors="pt")
    text = trained_target().generate(**inputs, do_sample=False, max_new_tokens=length)
    return trained_tokenizer().decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def client_of(address: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=SECONDS)


async def whole(client: Any, number: int, length: int = LENGTH) -> str:
    answer = await client.completions.create(**body(number, length))
    return answer.choices[0].text


async def streamed(client: Any, number: int, begun: asyncio.Semaphore) -> tuple[str, str | None]:
    """The text of a stream, and the error that ends it; `begun` is released at its first piece."""
    text = ""
    try:
        async for chunk in await client.completions.create(**body(number, LONG), stream=True):
            if not text:
                begun.release()
            text += "".join(choice.text for choice in chunk.choices)
    except openai.APIError as error:
        return text, error.message
    return text, None


def replicas_of(process: int) -> list[int]:
    """The processes of the replicas, among all that a process has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # has ended meanwhile
    found, new = {process}, {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    titles = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in found}
    return [child for child, title in titles.items() if title.startswith(b"ray::ServeReplica:default:replica")]


def test_a_replica_that_is_killed(served: tuple[str, int]) -> None:
    """As most streams have begun: those of the other go on, and what is not told yet is repeated."""
    address, process = served
    wholes, streams = range(12), range(12, 24)

    async def run() -> tuple[list[str], list[tuple[str, str | None]]]:
        begun = asyncio.Semaphore(0)
        async with client_of(address) as client:
            told = [asyncio.ensure_future(streamed(client, number, begun)) for number in streams]
            texts = [asyncio.ensure_future(whole(client, number)) for number in wholes]
            for _ in range(len(streams) * 3 // 4):
                await begun.acquire()
            os.kill(replicas_of(process)[0], signal.SIGKILL)
            return await asyncio.gather(*texts), await asyncio.gather(*told)

    assert len(replicas_of(process)) == 2
    texts, told = asyncio.run(run())
    assert texts == [expected(number) for number in wholes]
    failed = [number for number, (_, error) in zip(streams, told, strict=True) if error is not None]
    assert 0 < len(failed) < len(streams)
    for number, (text, error) in zip(streams, told, strict=True):
        assert error in (None, GONE) and expected(number, LONG).startswith(text)
        assert error is not None or text == expected(number, LONG)

    async def repeat() -> list[str]:
        async with client_of(address) as client:
            return await asyncio.gather(*(whole(client, number, LONG) for number in failed))

    assert asyncio.run(repeat()) == [expected(number, LONG) for number in failed]


def test_one_page_of_metrics(served: tuple[str, int]) -> None:
    """After the replica that was killed has been replaced, if it was."""
    address, until = served[0], time.monotonic() + SECONDS
    while read(f"{address}/metrics").count("vllm:num_requests_running{") != 2:
        assert time.monotonic() < until
        time.sleep(1)
    assert metric(address, "vllm:generation_tokens_total") >= 0
    assert json.loads(read(f"{address}/health"))["status"] == "ready"
    assert json.loads(read(f"{address}/v1/models"))["data"][0]["id"] == "tiny"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(f"{address}/v1/models/other")


def test_texts_that_begin_alike_share_a_prefix_cache(served: tuple[str, int]) -> None:
    """A conversation stays where it began, and is not read again."""
    address = served[0]
    text = " ".join(f"t{number}" for number in range(1, 100))

    async def run() -> None:
        async with client_of(address) as client:
            for turn in range(6):
                await client.completions.create(**body(0) | {"prompt": f"{text} t{turn}", "max_tokens": 4})

    before = metric(address, "vllm:prefix_cache_hits_total")
    asyncio.run(run())
    until = time.monotonic() + 30
    while metric(address, "vllm:prefix_cache_hits_total") - before < 5 * 96:
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_bulk_job(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers"
    records = [body(number) | {"id": number} for number in range(12)]
    records[3] |= {"max_tokens": 0}
    prompts.write_text("".join(json.dumps(record | {"model": None}) + "\n" for record in records))
    options = ["--engines", "2", "--cpus", "0.1", "--num-blocks", "64", "--block", "4"]
    command = [sys.executable, ROOT / "examples/ray_data.py", prompts, output, "--target", TINY_TARGET, *options]
    done = subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [answer for path in output.iterdir() for answer in lines_of(path)]
    bad = [answer for answer in answers if "error" in answer]
    assert len(bad) == 1 and "`max_tokens`" in bad[0]["error"] and json.loads(bad[0]["record"])["id"] == 3
    texts = {answer["id"]: answer["choices"][0]["text"] for answer in answers if "error" not in answer}
    assert texts == {number: expected(number) for number in range(12) if number != 3}
