"""One page with the metrics of all replicas."""

from __future__ import annotations

import pytest


pytest.importorskip("prometheus_client")

from hf_specdec.replicas.board import SECONDS_TO_FORGET, Board  # noqa: E402


PAGE = """# HELP vllm:generation_tokens_total Tokens generated.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m"} %d
# HELP vllm:num_requests_running Requests in the batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} %d
"""


def test_every_replica_has_a_label() -> None:
    now = [0.0]
    board = Board(lambda: now[0])
    board.note("a", PAGE % (5, 1))
    now[0] = 1.0
    board.note("b", PAGE % (7, 2))
    board.note("b", PAGE % (8, 2))
    page = board.page()
    assert page.count("# TYPE vllm:generation_tokens_total counter") == 1
    for replica, tokens, running in (("a", 5, 1), ("b", 8, 2)):
        assert f'vllm:generation_tokens_total{{model_name="m",replica="{replica}"}} {tokens}.0' in page
        assert f'vllm:num_requests_running{{model_name="m",replica="{replica}"}} {running}.0' in page
    now[0] = SECONDS_TO_FORGET + 0.5
    assert 'replica="a"' not in board.page() and 'replica="b"' in board.page(), "one that says nothing is no more"
