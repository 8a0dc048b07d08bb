"""Parts of the server that need none to be tested."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.goldens import TINY_TARGET
from support.servers import FORKED
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig
from hf_specdec.cli import build_app
from hf_specdec.serving.engine import start
from hf_specdec.serving.engine.options import EngineOptions
from hf_specdec.serving.stop_strings import TrimmedQueue, trimmed


def through(pieces: list[Any], stop: Any) -> list[Any]:
    """What comes out of a queue that has been given pieces."""

    async def run() -> list[Any]:
        texts: asyncio.Queue = asyncio.Queue()
        queue, out = TrimmedQueue(texts, stop), []
        for piece in pieces:
            texts.put_nowait(piece)
            try:
                while True:
                    out.append(queue.get_nowait())
            except asyncio.QueueEmpty:
                pass
        return out

    return asyncio.run(run())


@pytest.mark.parametrize(
    "pieces, stop, expected",
    [
        (["ab", "cd", "ef"], "cd", "ab"),
        (["a", "b", "c", "d", "e"], "bcd", "a"),
        (["ab", "ab", "ac"], "abac", "ab"),
        (["aa", "aa", "ab"], ["aab"], "aaa"),
        (["ab", "c"], ["x", "bc", "abc"], ""),
        (["ab", "c"], "cd", "abc"),
        (["one", " two"], ["two", " "], "one"),
        ([], "x", ""),
    ],
)
def test_streams_are_trimmed_as_whole_texts_are(pieces: list[str], stop: Any, expected: str) -> None:
    out = through([*pieces, None], stop)
    assert out[-1] is None and "".join(out[:-1]) == trimmed("".join(pieces), stop) == expected


def test_what_can_be_no_stop_string_is_not_held_back() -> None:
    assert through(["abc", "de", "fx"], "xyz") == ["abc", "de", "f"]


def test_other_things_pass() -> None:
    marker = object()
    assert through(["ab", marker, None], "z") == ["ab", marker, None]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("uvicorn", "prometheus_client")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest)
    )
    result = CliRunner().invoke(build_app(), ["serve"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "uvicorn, prometheus_client" in result.output and "pip install 'hf-specdec[serve]'" in result.output


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def begin(_: Any, options: EngineOptions, tell: Any) -> None:
        found.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "multiprocessing", FORKED)
    monkeypatch.setattr(start.EngineProcess, "begin", begin)
    arguments = "--tree auto --compile --disable-by-batch-size 3 --max-requests 5 --device cpu".split()
    result = CliRunner().invoke(build_app(), ["serve", str(TINY_TARGET), *arguments])
    assert result.exit_code == 130 and len(found) == 1
    config = found[0].speculative_config
    assert config == SpeculativeConfig(tree="auto", compile=True, disable_by_batch_size=3)
    assert (found[0].target, found[0].max_requests, found[0].device) == (str(TINY_TARGET), 5, "cpu")


def test_a_server_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins to answer, all that it has loaded is left out: a search would hold up everybody."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("uvicorn")
    done: list[str] = []
    served: Any = SimpleNamespace(model=SimpleNamespace(about_draft=None))

    @contextmanager
    def starting(app: Any, engine: Any, server: Any, make_app: Any, tell: Any, prepare: Any) -> Iterator[None]:
        make_app()
        yield

    monkeypatch.setattr(start, "multiprocessing", FORKED)
    monkeypatch.setattr(start.EngineProcess, "begin", lambda *_: served)
    monkeypatch.setattr("hf_specdec.serving.starting.starting", starting)
    monkeypatch.setattr("hf_specdec.serving.app.build_app", lambda *_, **__: done.append("build"))
    monkeypatch.setattr("hf_specdec.serving.interpreter.never_search_again", lambda: done.append("freeze"))
    monkeypatch.setattr("hf_specdec.serving.http_server.HttpServer.run", lambda _: done.append("run"))
    result = CliRunner().invoke(build_app(), ["serve", str(TINY_TARGET), "--device", "cpu"])
    assert result.exit_code == 0 and done == ["build", "freeze", "run"], result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tree", "[(0, 0)]"), "parent"),
        (("no/such/folder/here",), "TARGET: There is no folder 'no/such/folder/here'"),
        (("./nowhere",), "TARGET: There is no folder './nowhere'"),
        (("--draft", "no/such/draft"), "--draft: There is no folder 'no/such/draft'"),
        (("--draft", "/nowhere"), "--draft: There is no folder '/nowhere'"),
        (("--host", "nowhere.invalid"), "--host: 'nowhere.invalid' is no address"),
        (("--host", "192.0.2.1"), "--host: '192.0.2.1' is no address of this machine"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str) -> None:
    check_refusal(message, *arguments)


def check_refusal(message: str, *arguments: str) -> None:
    """Asserts that the command says so, before it loads a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "multiprocessing", FORKED)
        patch.setattr(start.EngineProcess, "begin", None)
        result = CliRunner().invoke(build_app(), ["serve", *arguments, "--device", "cpu"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_empty_folders(tmp_path: Path) -> None:
    check_refusal(f"TARGET: The folder '{tmp_path}' is empty", str(tmp_path))
    check_refusal(f"--draft: The folder '{tmp_path}' is empty", "--draft", str(tmp_path))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        check_refusal(f"--port: {port} cannot be listened at", "--host", "127.0.0.1", "--port", port)
