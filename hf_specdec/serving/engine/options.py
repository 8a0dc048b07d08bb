"""What an engine is started with, and why one cannot start. Imports little, see `start.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..defaults import MOST_IMAGE_PIXELS


if TYPE_CHECKING:
    from ...config import SpeculativeConfig


@dataclass(frozen=True)
class EngineOptions:
    """
    Options of an engine, which can be pickled for its process.

    Args:
        target (`str`, *optional*), draft (`str`): target and draft, as in `hf-specdec serve`.
        speculative_config (`SpeculativeConfig`): how requests speculate.
        device (`str`): device of the models.
        dtype (`str`): name of the models' dtype, a key of `loading.DTYPES`; on a CPU also `auto`.
        device_map (`str`, *optional*): accelerate's device map for the target, in place of `device`.
        max_requests (`int`, *optional*), max_batch_tokens (`int`, *optional*), num_blocks (`int`, *optional*),
            max_queue_size (`int`): limits of the manager (`max_batch_tokens` is `Limits.chunk_size`); by default those
            of `Limits.of`.
        with_images (`bool`): whether the target is loaded with what reads images.
        image_pixels (`int`): pixels of the largest image that requests may have; see `Limits`.
        adapters (`dict[str, str]`): Hub id or folder of each LoRA adapter that requests can choose, by name.
        shares_prefixes (`bool`): whether requests whose texts begin alike share K/V blocks.
        compile_cache (`str`, *optional*): folder in which compiled code is kept for later processes; see `KeptCode`.
        tells_more (`bool`): whether a line on stderr tells of each piece that is compiled and each graph that is
            captured.
    """

    target: str | None
    draft: str
    speculative_config: SpeculativeConfig
    device: str
    dtype: str
    device_map: str | None = None
    max_requests: int | None = None
    max_batch_tokens: int | None = None
    num_blocks: int | None = None
    max_queue_size: int = 0
    with_images: bool = False
    image_pixels: int = MOST_IMAGE_PIXELS
    adapters: dict[str, str] = field(default_factory=dict)
    shares_prefixes: bool = True
    compile_cache: str | None = None
    tells_more: bool = False


class StartError(Exception):
    """
    Raised when an engine cannot start.

    Args:
        option (`str`): the command-line argument at fault.
        reason (`str`): what is wrong with the argument.
    """

    def __init__(self, option: str, reason: str):
        super().__init__(reason)
        self.option, self.reason = option, reason
