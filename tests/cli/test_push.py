"""`hf-specdec push-space`, `push-kernel`, `push-generate`: the real client against a small Hub on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.goldens import TINY_TARGET
from support.hub_client import hub_environment
from support.hub_server import OWNER, TOKEN, HubServer, running_hub
from typer.testing import CliRunner, Result

from hf_specdec.cli import build_app


ROOT = Path(__file__).parents[2]
KINDS = {"space": "spaces:", "kernel": "kernels:", "generate": ""}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments, env={"COLUMNS": "200"})


def in_a_process(code: str, home: Path, hub: HubServer) -> subprocess.CompletedProcess[str]:
    """The Hub's address is read at import."""
    environment = hub_environment(home, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def listed(output: str) -> list[str]:
    return [line.split()[1] for line in output.splitlines()[:-1]]


def test_what_a_push_would_send(hub: HubServer) -> None:
    """Without `--push` the files are listed, and the Hub hears nothing."""
    before = len(hub.requests)
    files = {kind: listed(run(f"push-{kind}", "someone/x", "--checkout", str(ROOT)).output) for kind in KINDS}
    assert files["generate"] == ["README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"]
    weights = [f"SmolLM2-135M-Instruct-{draft}/model.safetensors" for draft in ("EAGLE3", "DSpark", "draft")]
    assert {"app.py", "README.md", "requirements.txt", *weights} <= set(files["space"])
    assert {"README.md", "build.toml", "build/torch-universal/metadata.json"} <= set(files["kernel"])
    assert not any(path.startswith(("tests", "CARD")) or "__pycache__" in path for path in files["kernel"])
    assert len(hub.requests) == before


@pytest.mark.slow
def test_pushes(hub: HubServer, tmp_path: Path) -> None:
    """Everything that was listed is in one commit of a repository of its kind; what else is there stays."""
    hub.publish("spaces:someone/space", {"notes.txt": b"kept"})
    commands = [[f"push-{kind}", f"{OWNER}/{kind}", "--checkout", str(ROOT), "--push"] for kind in KINDS]
    commands[0] += ["--requirement", "hf-specdec @ git+https://host/name"]
    code = f"from hf_specdec.cli import build_app\nfor line in {commands}: build_app()(line, standalone_mode=False)"
    done = in_a_process(code, tmp_path, hub)
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/spaces/someone/space/commit/" in done.stdout
    for kind, prefix in KINDS.items():
        repository = hub.repositories[f"{prefix}{OWNER}/{kind}"]
        found = repository.commits[repository.branches["main"]]
        names = listed(run(f"push-{kind}", "someone/x", "--checkout", str(ROOT)).output)
        assert set(names) <= set(found)
    space = hub.repositories["spaces:someone/space"]
    files = space.commits[space.branches["main"]]
    assert files["notes.txt"] == b"kept"
    assert files["requirements.txt"] == b"hf-specdec[demo] @ git+https://host/name\n"
    assert files["app.py"] == (ROOT / "examples" / "space" / "app.py").read_bytes()


@pytest.mark.slow
def test_the_page_of_custom_generate(hub: HubServer, tmp_path: Path) -> None:
    """Its Python, with what was pushed and tiny models under the names that it has."""
    model = {path.name: path.read_bytes() for path in TINY_TARGET.iterdir() if path.is_file()}
    for size in ("1.7B", "135M"):
        hub.publish(f"HuggingFaceTB/SmolLM2-{size}-Instruct", model)
    hub.publish(
        "your-name/hf-specdec",
        {
            p: (ROOT / "hub" / p).read_bytes()
            for p in listed(run("push-generate", "x", "--checkout", str(ROOT)).output)
        },
    )
    code = (ROOT / "hub" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    code = "import sys\n" + code + "assert 'hf_specdec' in sys.modules\n"
    done = in_a_process(code, tmp_path, hub)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["push-space", "a/b", "--checkout", "/tmp"], "no folder examples/space"),
        (["push-space", "a/b", "--checkout", str(ROOT), "--requirement", "torch"], "requirement='torch'"),
        (["push-generate", "a b", "--checkout", str(ROOT), "--push"], "a b"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output
