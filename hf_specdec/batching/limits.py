"""Limits of a manager: memory for K/V, requests at once, prompt tokens per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..cache.blocks import NUM_RESERVED
from ..compat import block_size_of
from ..forwards.chunks import chunk_size_for
from ..models.structure import execution_device
from .memory import (
    DEFAULT_SHARES,
    TOKEN_WITHOUT_KV,
    bytes_between_steps,
    bytes_of_scans,
    bytes_per_request,
    bytes_per_token,
    free_memory,
)


_KEPT = frozenset(
    {
        "page_size",
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "max_memory_percent",
        "max_requests_per_batch",
        "max_queue_size",
        "return_logprobs",
        "allow_block_sharing",
    }
)
_ABOUT_SPEED = frozenset(
    {
        "max_blocks_per_request",
        "use_async_batching",
        "use_cuda_graph",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "varlen_compile_config",
        "decode_compile_config",
        "default_compile_level",
        "auto_switch_to_flash",
        "disable_nccl_graph_mixing",
        "cpu_group_timeout",
        "max_cached_graphs",
        "use_default_compile_configs",
        "cpu_offload_space_safety_threshold",
        "per_request_processors",
        "drop_unsupported_processors",
    }
)
"""Options of transformers' `ContinuousBatchingConfig` that only tune its own implementation: ignored here."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """
    Limits of memory, batch size, prompt tokens per step and queue length, and what results have.

    Args:
        block_size (`int`): tokens per K/V block.
        num_blocks (`int`, *optional*): number of K/V blocks; by default as many as fit into `memory_share`.
        memory_share (`float`, *optional*): share of the free memory that K/V blocks may take, in (0, 1]; by default
            `DEFAULT_SHARES` of the device type, else 0.8.
        max_requests (`int`): most requests that run at once.
        chunk_size (`int`): most prompt tokens per step.
        max_queue_size (`int`): most waiting requests; 0 for any number.
        return_logprobs (`bool`): whether results have the log-probabilities of their tokens, by default.
        shares_prefixes (`bool`): whether requests whose texts begin alike share K/V blocks (`PrefixCache`).
        image_pixels (`int`): pixels of the largest image for which K/V blocks leave memory; 0 for none. A model whose
            images have one size, or that hears sound, takes what these need.

    Raises:
        ValueError: for a limit that lets nothing run.
    """

    block_size: int = 32
    num_blocks: int | None = None
    memory_share: float | None = None
    max_requests: int = 256
    chunk_size: int = 2048
    max_queue_size: int = 0
    return_logprobs: bool = False
    shares_prefixes: bool = True
    image_pixels: int = 4096 * 4096

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_requests", "chunk_size", "max_queue_size", "image_pixels"):
            value, least = getattr(self, name), int(name not in ("max_queue_size", "image_pixels"))
            if name == "num_blocks" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{_named(name)} must be an integer of {least} or more, but is {value!r}.")
        if not isinstance(self.shares_prefixes, bool):
            raise ValueError(f"{_named('shares_prefixes')} must be True or False, but is {self.shares_prefixes!r}.")
        share = self.memory_share
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{_named('memory_share')} must be above 0 and at most 1, but is {share!r}.")

    @classmethod
    def of(
        cls, config: ContinuousBatchingConfig | Limits | None, device: torch.device, num_parameters: int = 0
    ) -> Limits:
        """
        Limits from transformers' `ContinuousBatchingConfig`; `Limits` are returned unchanged. The default
        `chunk_size` is 256 on a CPU, and `chunk_size_for` a model of `num_parameters` elsewhere.

        Raises:
            ValueError: for an option of the config that is unknown or not supported with speculation.
        """
        defaults = cls(chunk_size=256 if device.type == "cpu" else chunk_size_for(num_parameters))
        if config is None or isinstance(config, Limits):
            return config or defaults
        _check(config)
        return cls(
            block_size=block_size_of(config),
            num_blocks=config.num_blocks,
            memory_share=config.max_memory_percent,
            max_requests=_or_default(config.max_requests_per_batch, defaults.max_requests),
            chunk_size=_or_default(config.max_batch_tokens, defaults.chunk_size),
            max_queue_size=config.max_queue_size,
            return_logprobs=bool(config.return_logprobs),
            shares_prefixes=config.allow_block_sharing,
        )

    def blocks(self, models: list[PreTrainedModel], num_nodes: int, for_prompts: int = 0) -> int:
        """
        Number of K/V blocks to allocate: `num_blocks` if given, else what fits on the device with least room, in steps
        of up to `num_nodes` draft nodes per request. They leave `for_prompts` bytes of the first model's device, but
        at most half of what is free.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        fitting = []
        for device, each in self._bytes(models, num_nodes).items():
            free = free_memory(device)
            if device == execution_device(models[0]):
                free -= min(for_prompts, free // 2)
            share = self.memory_share or DEFAULT_SHARES.get(device.type, 0.8)
            fitting.append(self._fitting(free * share - each.of_scans, each.per_block, each.per_request))
        return max(int(min(fitting)) - NUM_RESERVED, 1)

    def room_beside(self, models: list[PreTrainedModel], num_nodes: int, num_blocks: int) -> int:
        """Bytes that `num_blocks` blocks, and what running requests have beside them, leave of the target's device."""
        device = execution_device(models[0])
        each = self._bytes(models, num_nodes).get(device, _Bytes(0, 0, 0))
        running = min(self.max_requests, num_blocks) * each.per_request
        taken = (num_blocks + NUM_RESERVED) * each.per_block + running + each.of_scans
        return max(free_memory(device) - taken, 0)

    def _bytes(self, models: list[PreTrainedModel], num_nodes: int) -> dict[torch.device, _Bytes]:
        """What blocks and requests take on each device where blocks are."""
        features = bytes_per_request(models, self.max_requests)
        ends = bytes_between_steps(models) if self.shares_prefixes else Counter()
        scans = bytes_of_scans(models, self.max_requests, self.chunk_size, num_nodes + 1)
        per_token = bytes_per_token(models) or dict.fromkeys(features, TOKEN_WITHOUT_KV)
        return {
            device: _Bytes(size * self.block_size + ends[device], features.get(device, 0), scans.get(device, 0))
            for device, size in per_token.items()
        }

    def _fitting(self, memory: float, per_block: int, per_request: int) -> float:
        """Blocks that fit into `memory` bytes beside the bytes per running request; each has one block at least."""
        most = memory / (per_block + per_request)
        return most if most < self.max_requests else (memory - self.max_requests * per_request) / per_block


class _Bytes(NamedTuple):
    """Bytes of a block, of a running request, and of recurrences meanwhile."""

    per_block: int
    per_request: int
    of_scans: int


_NAMES = {
    "block_size": "page_size",
    "memory_share": "max_memory_percent",
    "max_requests": "max_requests_per_batch",
    "chunk_size": "max_batch_tokens",
    "shares_prefixes": "allow_block_sharing",
}
"""Names of limits in a `ContinuousBatchingConfig`, where they differ."""


def _named(name: str) -> str:
    return f"`{name}`" + (f" (`{_NAMES[name]}` of a ContinuousBatchingConfig)" if name in _NAMES else "")


def _or_default(value: int | None, default: Any) -> Any:
    return default if value is None else value


def _check(config: ContinuousBatchingConfig) -> None:
    defaults = ContinuousBatchingConfig()
    for name, remedy in (
        ("cpu_offload_space", "Leave it out: requests that lose their K/V compute them anew."),
        ("scheduler_type", "Leave it out: first come, first served."),
        ("seed", "Give seeds to requests: `add_request(…, seed=…)`."),
    ):
        value = getattr(config, name, None)
        if value != getattr(defaults, name, None):
            raise ValueError(f"`continuous_batching_config.{name}={value!r}` is not for speculation. {remedy}")
    known = _KEPT | _ABOUT_SPEED
    for name in set(vars(config)) - known:
        if getattr(config, name) != getattr(defaults, name, None):
            raise ValueError(
                f"`continuous_batching_config.{name}={getattr(config, name)!r}` is not known here. Leave it out."
            )
