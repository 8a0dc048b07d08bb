"""The deployments together: fronts, replicas with an engine each, and a board for metrics."""

from __future__ import annotations

from typing import Any

from .board import Board
from .replica import Replica, ReplicaOptions


def application(
    options: ReplicaOptions,
    *,
    replicas: int | dict[str, Any] = 1,
    fronts: int = 1,
    most_ahead: int = 8,
    most_requests: int = 256,
    resources: dict[str, Any] | None = None,
) -> Any:
    """
    The server as an application of Ray Serve, for `serve.run`.

    Args:
        options (`ReplicaOptions`): of every replica.
        replicas (`int` or `dict`, *optional*, defaults to 1): how many; or Ray Serve's `autoscaling_config`.
        fronts (`int`, *optional*, defaults to 1): actors that take HTTP requests.
        most_ahead (`int`, *optional*, defaults to 8): see `PrefixTable`.
        most_requests (`int`, *optional*, defaults to 256): requests of a replica at once; others wait in the fronts.
        resources (`dict`, *optional*): Ray's `ray_actor_options` of a replica, such as `{"num_gpus": 1}`.

    Raises:
        ImportError: without ray.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise ImportError("Replicas need ray. Install with `pip install 'hf-specdec[ray]'`.") from error

    from .fronts import HttpFront
    from .router import PrefixRouter

    number: dict[str, Any] = (
        {"autoscaling_config": replicas} if isinstance(replicas, dict) else {"num_replicas": replicas}
    )
    quiet = {"enable_access_log": False}
    board = serve.deployment(Board, name="board", ray_actor_options={"num_cpus": 0}, logging_config=quiet).bind()
    engines = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=most_requests,
        ray_actor_options=resources or {},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": most_ahead}
        ),
        **number,
    ).bind(options, board)
    front = serve.deployment(
        HttpFront,
        name="front",
        num_replicas=fronts,
        max_ongoing_requests=most_requests * 64,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(engines, board)
