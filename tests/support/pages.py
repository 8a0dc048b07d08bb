"""
Runs the Python of pages as a reader would: every page in a process of its own, which has imported torch and
transformers and nothing of this library. Hub ids lead to tiny models on a Hub of this machine. From the root of the
checkout, with any Python that has the package:

    PYTHONPATH=tests python -m support.pages [README.md …]

Without names it runs the pages that need the package alone, without extras.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .fresh import run_and_exit
from .hub_client import hub_environment
from .hub_server import TOKEN, running_hub


ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
CHAT = "{% for message in messages %}t5 t6 t7 {% endfor %}{% if add_generation_prompt %}t8{% endif %}"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))
PLAIN = (".",)
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "tiny_target",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "tiny_target",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "safeailab_eagle3",
    "z-lab/Qwen3-8B-DFlash-b16": "dflash",
    "Qwen/Qwen3.5-4B": "qwen3_5_mtp",
    "FasterDecoding/medusa-vicuna-7b-v1.3": "medusa",
    "google/gemma-4-E4B-it": "gemma4_assistant/target",
    "google/gemma-4-E4B-it-assistant": "gemma4_assistant/assistant",
}
"""For every Hub id that the pages name, something tiny of that kind."""
FOLDERS = {
    "SmolLM2-135M-Instruct-EAGLE3": "safeailab_eagle3",
    "SmolLM2-135M-Instruct-DSpark": "dspark",
    "SmolLM2-135M-Instruct-draft": "tiny_target",
    "model_cards/SmolLM2-135M-Instruct-EAGLE3": "safeailab_eagle3",
    "my-head": "safeailab_eagle1",
}
"""The same for folders that pages name."""


@dataclass(frozen=True)
class Outcome:
    """What the process of a page printed, and whether it ran to the page's end."""

    passed: bool
    printed: str


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, with the line on which each begins."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def runnable() -> list[Path]:
    """The pages with Python."""
    return [page for page in PAGES + CARDS if blocks(page, "python")]


def installs(page: Path) -> list[tuple[int, tuple[str, ...]]]:
    """What each `pip install` of a page installs, the checkout as ".", with the line of its block."""
    return [
        (line, tuple(word.replace("path/to/hf_specdec", ".") for word in shlex.split(words, comments=True)))
        for line, code in blocks(page, "bash")
        for words in re.findall(r"^pip install (?:-e )?(.*)$", code, flags=re.MULTILINE)
    ]


def needs(page: Path) -> tuple[str, ...]:
    """What a page lets its reader install before its first Python; the package alone if it says nothing."""
    first = min((line for line, _ in blocks(page, "python")), default=0)
    return next((wanted for line, wanted in installs(page) if line < first), PLAIN)


def run_blocks(page: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """Runs the page's Python from top to bottom in a namespace, which it returns."""
    for line, code in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
    return namespace


def run_pages(pages: Iterable[Path], python: str = sys.executable) -> dict[Path, Outcome]:
    """Runs pages with an interpreter, one after the other."""
    pages = [page.resolve() for page in pages]
    with tempfile.TemporaryDirectory() as folder, running_hub() as hub:
        for name, golden in PUBLISHED.items():
            hub.publish(name, _files_of(GOLDENS / golden))
        folders = Path(folder)
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "TOKENIZERS_PARALLELISM": "0"}
        environment = hub_environment(folders / "home", **settings, PYTHONPATH=os.pathsep.join(paths))
        question = json.dumps({"pages": [str(page) for page in pages], "folder": str(folders)})
        command = [python, "-m", "support.pages", "--fork"]
        done = subprocess.run(command, input=question, env=environment, cwd=folder, capture_output=True, text=True)
        outcomes = {}
        for number, page in enumerate(pages):
            log = folders / f"{number}.log"
            printed = log.read_text(errors="replace") if log.exists() else done.stdout + done.stderr
            outcomes[page] = Outcome((folders / f"{number}.passed").exists(), printed)
        return outcomes


def _files_of(golden: Path) -> dict[str, bytes]:
    """A golden's checkpoint, as files of a repository; the target's chat template leaves no user's word in it."""
    wanted = (".json", ".safetensors", ".bin", ".pt")
    files = {path.name: path.read_bytes() for path in golden.iterdir() if path.suffix in wanted}
    files.pop("golden.safetensors", None)
    return files | ({"chat_template.jinja": CHAT.encode()} if golden.name == "tiny_target" else {})


# ------------------------------------------------------------------------------------------- in the process of its own


def _names() -> dict[str, Any]:
    """What the blocks of every page may use without having made it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .models import noisy_copy

    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "tiny_target").eval()
    ids = torch.tensor([json.loads((GOLDENS / "tiny_target" / "prompts.json").read_text())["prompts"][0]])
    return {
        "model": model,
        "draft": noisy_copy(model, noise=0.2),
        "tokenizer": AutoTokenizer.from_pretrained(GOLDENS / "tiny_target", padding_side="left"),
        "draft_tokenizer": AutoTokenizer.from_pretrained(GOLDENS / "tiny_target"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }


def _fork_for_each(pages: list[Path], folder: Path) -> None:
    """Forks, since importing torch and transformers takes longer than most pages."""
    import torch._dynamo  # which pages import by way of the library, and which takes longest  # noqa: F401

    names = _names()
    assert "hf_specdec" not in sys.modules  # else pages would not have to import it
    for number, page in enumerate(pages):
        child = os.fork()
        if child == 0:
            place = folder / str(number)
            log = os.open(place.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
            run_and_exit(partial(_run_page, page, place, names), log, log)
        os.waitpid(child, 0)


def _run_page(page: Path, place: Path, names: dict[str, Any]) -> None:
    """Runs a page in an empty folder, `place`; leaves `place`.passed if it came to its end."""
    place.mkdir()
    os.chdir(place)
    for name, golden in FOLDERS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(GOLDENS / golden)
    before = set(names)
    after = run_blocks(page, {"__name__": page.stem, **names})
    assert not blocks(page, "python") or after.keys() - {"__name__", "__builtins__"} > before, "nothing was made"
    place.with_suffix(".passed").touch()


def main(arguments: list[str]) -> int:
    if arguments == ["--fork"]:
        question = json.load(sys.stdin)
        _fork_for_each([Path(page) for page in question["pages"]], Path(question["folder"]))
        return 0
    plain = [page for page in runnable() if needs(page) == PLAIN]
    outcomes = run_pages([Path(argument) for argument in arguments] or plain)
    for page, outcome in outcomes.items():
        print(f"{page.relative_to(ROOT)}: {'ran' if outcome.passed else 'FAILED'}")
        if not outcome.passed:
            print(outcome.printed)
    return int(not all(outcome.passed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
