"""Arguments of `hf-specdec serve` that are refused before a model is loaded."""

from __future__ import annotations

import pytest
from support.benchmarking import on_tiny_target


for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
    pytest.importorskip(package)


def test_waiting_requests_count_towards_a_limit_alone() -> None:
    result = on_tiny_target("serve", "--disable-counts-waiting", "--host", "no.such.host.invalid")
    assert result.exit_code == 2
    assert "--disable-counts-waiting" in result.output and "belongs to --disable-by-batch-size" in result.output


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ssl-keyfile", "key.pem"], "belongs to --ssl-certfile"),
        (["--ssl-certfile", "no such file"], "cannot be used"),
        (["--api-key", " "], "an empty key is none"),
    ],
)
def test_access(options: list[str], message: str) -> None:
    result = on_tiny_target("serve", *options, "--port", "0")
    assert result.exit_code == 2 and message in result.output


def test_stages_before_models_are_loaded() -> None:
    """Imports take seconds: the first line comes before them."""
    result = on_tiny_target("serve", "--port", "0", "--tree", "no tree")
    assert result.exit_code == 2 and "no tree" in result.output
    assert "Importing PyTorch and transformers." in result.output
