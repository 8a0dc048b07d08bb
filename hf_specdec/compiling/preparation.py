"""What torch's compiler needs before it can compile anything, done beside other work."""

from __future__ import annotations

from transformers.utils import logging


logger = logging.get_logger(__name__)


def prepare_compiler() -> None:
    """
    Imports Dynamo and Inductor, and starts the processes that compile kernels. Each takes seconds, which the first
    graph would else wait for. To be called after `KeptCode.use`, whose folder these processes inherit.
    """
    try:
        from torch._inductor import async_compile

        start_processes = getattr(async_compile, "maybe_warm_pool", None)  # torch 2.6 and later
        if start_processes is not None:
            start_processes()
    except Exception as error:  # whatever it is: compiling meets it again, and says so
        logger.info(f"torch's compiler could not be prepared: {type(error).__name__}: {error}")
