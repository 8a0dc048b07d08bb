"""Requests that schemathesis makes of the server's own description, right and wrong ones, to a server of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies
from support.models import VOCAB, tiny_model
from support.servers import running_server
from support.tokenizer import tiny_tokenizer


for package in ("fastapi", "openai", "prometheus_client", "schemathesis"):
    pytest.importorskip(package)

import requests  # noqa: E402
import schemathesis  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402


SEED = 1
CASES = {
    ("POST", "/v1/completions"): 3200,
    ("POST", "/load_model"): 1100,
    ("POST", "/v1/chat/completions"): 250,
    ("POST", "/v1/responses"): 150,
    ("POST", "/tokenize"): 150,
    ("POST", "/detokenize"): 150,
}
"""Cases of each kind, right and wrong, by route."""
SHARE = float(os.environ.get("DESCRIBED_REQUESTS", "1"))
"""Share of these cases that is sent, from 0 to 1: a small one while something is worked on."""
CONTEXT = 512
"""Long enough for most chats that schemathesis makes."""
ENDS = list(range(2, VOCAB, 2))
"""Tokens that end the model's texts: so many that few texts are long."""
LEAST_SERVED = 0.3
"""Least share of the right requests that is served. (Options may ban any token, and grammars be none.)"""
SECONDS = 20
"""Within which each request is answered."""
MOST_GROWTH = 150 * 2**20


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with a tiny model whose texts soon end."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    model = tiny_model(max_position_embeddings=CONTEXT)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    options = ["--dtype", "float32", "--device", "cpu", "--model-name", "tiny", "--draft", "ngram"]
    with running_server(str(folder), *options, log=tmp_path_factory.mktemp("server") / "log") as address:
        yield address


WATCH = """
import sys, time, urllib.request
while True:
    began = time.monotonic()
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
            healthy = answer.status == 200
    except OSError:
        healthy = False
    print(time.monotonic() - began if healthy else "inf", flush=True)
    time.sleep(0.2)
"""
"""Asks for `/health` all along, and prints the seconds until each answer."""


@contextmanager
def watched_health(address: str) -> Iterator[list[float]]:
    """A context in which another process asks for `/health`; at its end, the list has the seconds of its answers."""
    seconds: list[float] = []
    with tempfile.TemporaryFile("w+") as output:
        # A thread of this process would at times wait for schemathesis: up to 0.4 s were measured.
        watcher = subprocess.Popen([sys.executable, "-c", WATCH, f"{address}/health"], stdout=output)
        try:
            yield seconds
        finally:
            watcher.kill()
            watcher.wait()
            output.seek(0)
            seconds += [float(line) for line in output if line.endswith("\n")]


def processes() -> list[int]:
    """The server and its engine: what this process has started, and what that has."""
    found: list[int] = []
    left = [os.getpid()]
    while left:
        one = left.pop()
        try:
            children = "".join(path.read_text() for path in Path(f"/proc/{one}/task").glob("*/children"))
        except OSError:
            continue
        left += map(int, children.split())
        found += map(int, children.split())
    return [one for one in found if b"hf_specdec" in _read(one, "cmdline") or b"spawn_main" in _read(one, "cmdline")]


def _read(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""


def held(process: int) -> tuple[int, int]:
    """Bytes of memory and number of file descriptors that a process holds."""
    pages = int(_read(process, "statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_described_requests(address: str) -> None:
    schemathesis.openapi.format("json-object", strategies.sampled_from(["{}", "", '{"a": 1}', ' {"a": {"b": []}}']))
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    statuses: dict[Any, Counter[int]] = {}
    wrong: list[str] = []
    known: dict[int, tuple[int, int]] = {}
    with requests.Session() as session, watched_health(address) as seconds:
        for (method, path), number in CASES.items():
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                statuses[path, mode] = counts = Counter()
                _send(session, address, schema[path][method], mode, max(round(number * SHARE), 10), counts, wrong)
            if not known:  # what the first requests need stays
                known = {process: held(process) for process in processes()}
        for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny"):
            assert session.get(address + path, timeout=SECONDS).status_code == 200
    assert not wrong, f"seed {SEED}: " + "\n".join(wrong[:10])
    total = sum(statuses.values(), Counter())
    assert total.total() >= 9000 * SHARE and set(total) <= {200, 400, 404, 405, 413}, statuses
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        right, bad = (statuses[path, mode] for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE))
        assert right[200] > LEAST_SERVED * right.total() and bad[400] > 0.9 * bad.total(), (path, right, bad)
    assert len(known) >= 2, "no processes found"
    late = [round(one, 2) for one in seconds if one >= 1]
    grown = {process: (before, held(process)) for process, before in known.items()}
    grown = {
        process: (before, now)
        for process, (before, now) in grown.items()
        if now[0] - before[0] >= MOST_GROWTH or now[1] - before[1] > 8
    }
    assert len(seconds) > 100 * SHARE and not late and not grown, (
        f"/health after {late} s; bytes and descriptors: {grown}"
    )


def _whole(value: Any) -> Any:
    """A body whose integers are integers: to JSON Schema, 1.0 is one."""
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shorten(body: Any) -> None:
    """Lets a right request ask for few texts, each of which ends soon."""
    if isinstance(body, dict):
        if type(body.get("n")) is int:
            body["n"] = 1 + body["n"] % 3
        if isinstance(body.get("prompt"), list):
            del body["prompt"][3:]
        if body.get("ignore_eos") or body.get("min_tokens"):
            body |= {"ignore_eos": None, "min_tokens": 1}


def _send(
    session: requests.Session,
    address: str,
    operation: Any,
    mode: GenerationMode,
    number: int,
    statuses: Counter[int],
    wrong: list[str],
) -> None:
    """Sends cases of an operation, and notes their statuses, and those that are wrong."""

    @seed(SEED)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode == GenerationMode.POSITIVE:
            case.body = _whole(case.body)
            _shorten(case.body)
        answer = case.call(base_url=address, session=session, timeout=SECONDS)
        statuses[answer.status_code] += 1
        if answer.status_code >= 500 or answer.elapsed > SECONDS:
            wrong.append(f"{operation.label} {case.body!r:.500}: {answer.status_code} {answer.text[:300]}")

    send()
