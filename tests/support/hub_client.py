"""
A process of its own that loads and pushes heads, since the Hub's address and the offline switch are read at import.

Run as a program it takes one call a line on stdin, and answers each with a line on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def hub_environment(home: Path, **more: str) -> dict[str, str]:
    """
    Variables for a process that reads a Hub of this machine.

    Args:
        home (`Path`): in place of the user's ~/.cache/huggingface.
        more (`str`): further variables, such as `HF_ENDPOINT`.
    """
    settings = {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    return kept | settings | more


class HubClient:
    """
    Args:
        home (`Path`): in place of the user's ~/.cache/huggingface.
        environment (`str`): further variables, such as `HF_ENDPOINT`.
    """

    def __init__(self, home: Path, **environment: str):
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=hub_environment(home, **environment, PYTHONPATH=os.pathsep.join(paths)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """What `load` or `push` below returns, or `{"error": name of the exception, "message": its text}`."""
        self._process.stdin.write(json.dumps({"name": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The client ended: {self._process.stderr.read()}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


class OfflineClient:
    """The same in this process, which has been offline since it began."""

    def __init__(self) -> None:
        from huggingface_hub import constants

        assert constants.HF_HUB_OFFLINE

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return _answer({"name": name, "arguments": arguments})


def load(repo: str, **options: Any) -> dict[str, Any]:
    """Loads a head, and says enough of it to tell it from another."""
    from hf_specdec.eagle import EagleHead

    head = EagleHead.from_pretrained(repo, **options)
    weights = {key: tensor.double().sum().item() for key, tensor in head.state_dict().items()}
    return {"weights": weights, "target": head.config.target_name, "name": head.name_or_path}


def push(folder: str, repo: str, target: str | None = None, measured: float | None = None, **options: Any) -> Any:
    """Pushes the head in a folder."""
    from hf_specdec import EagleHead, Measurement

    head = EagleHead.from_pretrained(folder, target_name=target)
    if measured is not None:
        measurement = Measurement(dataset="a set", tree="[(0,)]", mean_acceptance_length=measured)
        options["card"] = head.model_card(repo, measurements=[measurement])
    return {"url": head.push_to_hub(repo, **options)}


def save_and_push(folder: str, output: str, **options: Any) -> Any:
    """The same through `save_pretrained`."""
    from hf_specdec.eagle import EagleHead

    EagleHead.from_pretrained(folder).save_pretrained(output, push_to_hub=True, **options)
    return {}


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    calls = {"load": load, "push": push, "save_and_push": save_and_push}
    try:
        return calls[call["name"]](**call["arguments"])
    except Exception as error:  # it is the test that judges it
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": type(error).__name__, "kinds": kinds, "message": str(error)}


def _serve() -> None:
    from huggingface_hub import constants

    constants.DOWNLOAD_CHUNK_SIZE = 4096  # these files are smaller than one piece of a real one
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
