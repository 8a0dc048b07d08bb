"""
The server on several GPUs or machines, by Ray Serve: replicas that come and go with the load, each with an engine of
its own, and requests that go where the beginning of their text is known.

    pip install -e ".[ray]"
    python examples/ray_serve.py --replicas 2
    python examples/ray_serve.py --target some/model --draft its/head --gpus 1 --min-replicas 1 --max-replicas 8

On a cluster, `ray start` machines first, and run it on one of them with `--address auto`. Clients use it as they use
`hf-specdec serve`; `/metrics` has all replicas.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import ray
from ray import serve

from hf_specdec import SpeculativeConfig
from hf_specdec.replicas import ReplicaOptions, application
from hf_specdec.serving.engine import EngineOptions
from hf_specdec.trees.text import parse_tree


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    start(options)
    print(f"http://{options.host}:{options.port}/v1 (Ctrl-C ends)", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--address", help="of a Ray cluster; default: a new one on this machine")
    options.add_argument("--target", help="Hub id or folder; default: SmolLM2-135M-Instruct from a package")
    options.add_argument("--draft", default="ngram", help="ngram, mtp, or Hub id or folder")
    options.add_argument("--tree", default="default")
    options.add_argument("--model-name", help="what clients call the model")
    options.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
    options.add_argument("--num-blocks", type=int, help="blocks of K/V memory of a replica; default: what fits")
    options.add_argument("--gpus", type=float, default=0, help="of a replica")
    options.add_argument("--cpus", type=float, default=1, help="of a replica")
    options.add_argument("--replicas", type=int, help="a fixed number, in place of the next two")
    options.add_argument("--min-replicas", type=int, default=1)
    options.add_argument("--max-replicas", type=int, default=4)
    options.add_argument("--target-requests", type=float, default=16, help="open requests of a replica on average")
    options.add_argument("--fronts", type=int, default=1, help="actors that take HTTP requests")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8000)
    return options


def start(options: argparse.Namespace) -> None:
    """Starts the application, and waits until it answers."""
    device = "cuda" if options.gpus else "cpu"
    engine = EngineOptions(
        target=options.target,
        draft=options.draft,
        speculative_config=SpeculativeConfig(tree=parse_tree(options.tree)),
        device=device,
        dtype=options.dtype or ("bfloat16" if options.gpus else "float32"),
        num_blocks=options.num_blocks,
    )
    scaling: dict[str, Any] = {"min_replicas": options.min_replicas, "max_replicas": options.max_replicas}
    scaling["target_ongoing_requests"] = options.target_requests
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(int(options.cpus), 1)))}
    resources = {"num_gpus": options.gpus, "num_cpus": options.cpus, "runtime_env": {"env_vars": threads}}
    ray.init(address=options.address, include_dashboard=False)
    serve.start(http_options={"host": options.host, "port": options.port})
    about = ReplicaOptions(engine, options.model_name)
    serve.run(
        application(about, replicas=options.replicas or scaling, fronts=options.fronts, resources=resources),
        route_prefix="/",
    )


if __name__ == "__main__":
    main()
