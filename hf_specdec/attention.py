"""
"tree_attention": attention over a tree of draft tokens, registered with transformers as attention and mask function.

While a call speculates, its models use "tree_attention" instead of their own implementation. A forward that carries a
`TreeContext` attends along the tree; every other forward (prefill, other threads) falls through to the model's own
implementation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from packaging import version
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .grouped_attention import grouped_attention
from .kernels import NODES_PER_WORD, KernelInputs
from .modules import modules_of


NAME = "tree_attention"


@dataclass(eq=False)
class TreeContext:
    """
    Attention context of one tree forward: what its queries may attend to. Queries are nodes; keys are the slots of a
    `TreeCache`: the committed slots of the query's row, followed by the slots of the tree's nodes.

    Args:
        lengths (`list[int]`): number of committed slots of every row.
        lengths_device (`torch.device`): device on which masks and lengths are computed.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*): which of the first slots hold tokens,
            where some hold padding.
        num_slots (`int`): number of slots (keys) that the forward sees.
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which nodes a query may attend to.
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64): depth of every query; depth 0 is the
            position right after the committed slots.
        node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): depth of every node after the committed
            slots.
        uniform_length (`int`, *optional*): number of committed slots, if it is equal in all rows.
        kernel_device (`torch.device`, *optional*): device on which layers attend with the tree-attention kernel, which
            needs no mask; None: layers attend with a mask.
        first_slots (`torch.Tensor` of shape `[batch]`, int64, *optional*): for the kernel, the first slot of every row
            that holds a token.
        node_multiple (`int`): for the kernel, the number of nodes is padded to a multiple of this.
        device_lengths (`torch.Tensor` of shape `[batch]`, int64, *optional*): number of committed slots of every row,
            if the cache has it on the device. Where only the device knows it, `lengths` is good for its size alone.
        block_tables (`torch.Tensor` of shape `[batch, blocks]`, int64, *optional*): for the kernel, the block table of
            every row of a paged cache.
    """

    lengths: list[int]
    lengths_device: torch.device
    visible: torch.Tensor | None
    num_slots: int
    ancestors: torch.Tensor
    query_depths: torch.Tensor
    node_depths: torch.Tensor
    uniform_length: int | None = None
    kernel_device: torch.device | None = None
    first_slots: torch.Tensor | None = None
    node_multiple: int = 1
    device_lengths: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    was_used: bool = False
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)
    _kernel_inputs: KernelInputs | None = field(default=None, repr=False)

    def over(self, num_slots: int, node_multiple: int = NODES_PER_WORD) -> TreeContext:
        """
        A copy for a forward that sees `num_slots` slots, of which those after the nodes are masked out. The number of
        nodes is padded to a multiple of `node_multiple`, so that the levels of a tree can share a captured graph.
        """
        return replace(
            self, num_slots=num_slots, node_multiple=node_multiple, was_used=False, _masks={}, _kernel_inputs=None
        )

    @property
    def uses_kernel(self) -> bool:
        """Whether layers attend with the tree-attention kernel."""
        return self.kernel_device is not None

    @property
    def kernel_inputs(self) -> KernelInputs:
        """The tree-attention kernel's arguments for this forward, built on first use."""
        if self._kernel_inputs is None:
            self._kernel_inputs = self._make_kernel_inputs()
        return self._kernel_inputs

    def _make_kernel_inputs(self) -> KernelInputs:
        return KernelInputs.of(
            torch.tensor(self.lengths) if self.device_lengths is None else self.device_lengths,
            self.ancestors,
            self.query_depths,
            self.node_depths,
            self.first_slots,
            self.node_multiple,
            self.block_tables,
        ).to(self.kernel_device)

    def model_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask that the model itself is given: `mask`, or unused zeros where layers attend with the kernel."""
        if not self.uses_kernel:
            return self.mask(dtype, device)
        shape = (len(self.lengths), 1, self.ancestors.shape[1], self.num_slots)
        return torch.zeros(1, 1, 1, 1, dtype=dtype, device=device).expand(shape)

    def mask(self, dtype: torch.dtype, device: torch.device, window: int | None = None) -> torch.Tensor:
        """
        The additive mask `[1 or batch, 1, queries, slots]`: 0 where a query may attend, else the lowest value of
        `dtype`.

        Args:
            window (`int`, *optional*): a query attends to keys less than this many positions before it.
        """
        key = (dtype, device, window)
        if key not in self._masks and window is None and self._sees_all:
            self._masks[key] = torch.zeros(1, 1, self.ancestors.shape[1], self.num_slots, dtype=dtype, device=device)
        elif key not in self._masks:
            allowed = self._allowed if window is None else self._allowed & (self._distances < window)
            self._masks[key] = torch.where(allowed[:, None], *mask_values(dtype, allowed.device)).to(device)
        return self._masks[key]

    @property
    def _sees_all(self) -> bool:
        """Whether a single query attends to every slot: the level of a chain, or a step without a tree."""
        if self.ancestors.shape[1] > 1 or self.uniform_length is None or self.visible is not None:
            return False
        if self.num_slots > self.uniform_length + self.ancestors.shape[2]:
            return False
        return self.ancestors.device.type == "cpu" and bool(self.ancestors.all())  # elsewhere it would synchronize

    @cached_property
    def _allowed(self) -> torch.Tensor:
        """Which slots a query may attend to, `[1 or batch, queries, slots]` bool."""
        queries, num_nodes = self.ancestors.shape[1:]
        if self.uniform_length is not None and self.visible is None:
            behind = self.num_slots - self.uniform_length - num_nodes
            ancestors = torch.nn.functional.pad(self.ancestors, (0, behind), value=False) if behind else self.ancestors
            return torch.nn.functional.pad(ancestors, (self.uniform_length, 0), value=True)
        rows = len(self.lengths)
        nodes = self._nodes[:, None].expand(rows, queries, self.num_slots)
        in_tree = self.ancestors.expand(rows, -1, -1).gather(2, nodes.clamp(0, num_nodes - 1))
        allowed = (nodes < 0) | (in_tree & (nodes >= 0) & (nodes < num_nodes))
        if self.visible is None:
            return allowed
        # Nodes may be padding, too: in the prefill of a head, whose nodes are the prompt's tokens.
        visible = torch.nn.functional.pad(
            self.visible, (0, max(self.num_slots - self.visible.shape[1], 0)), value=True
        )
        return allowed & visible[:, None, : self.num_slots]

    @cached_property
    def _nodes(self) -> torch.Tensor:
        """Index of the node in every slot, `[batch, slots]` int64; negative for committed slots."""
        lengths = self.device_lengths
        if lengths is None:
            lengths = torch.tensor(self.lengths, device=self.lengths_device)
        return torch.arange(self.num_slots, device=self.lengths_device) - lengths[:, None]

    @cached_property
    def _distances(self) -> torch.Tensor:
        """Position of the query minus position of the key, `[batch, queries, slots]` int64."""
        rows = len(self.lengths)
        depths = self.node_depths.expand(rows, -1).gather(1, self._nodes.clamp(0, self.node_depths.shape[1] - 1))
        return self.query_depths[:, :, None] - torch.where(self._nodes < 0, self._nodes, depths)[:, None]


@lru_cache(maxsize=16)
def mask_values(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of an additive mask for allowed and for hidden slots."""
    return torch.zeros((), dtype=dtype, device=device), torch.full(
        (), torch.finfo(dtype).min, dtype=dtype, device=device
    )


# ------------------------------------------------------------------------------------------------ registered functions


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree_context: TreeContext | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The registered attention function (transformers' `AttentionInterface`): query `[batch, heads, nodes, head_dim]`,
    key and value `[batch, kv_heads, slots, head_dim]`.
    """
    implementation = _previous_implementation(module.config)
    if tree_context is None:
        function = _attention_function(implementation, module)
        return function(_AsBefore(module, implementation), query, key, value, attention_mask, **kwargs)
    tree_context.was_used = True
    if tree_context.uses_kernel:
        scale, window = kwargs.get("scaling"), layer_window(module, kwargs)
        return tree_context.kernel_inputs.attend(query, key, value, scale=scale, window=window), None
    attention_mask = tree_context.mask(query.dtype, query.device, layer_window(module, kwargs))
    implementation = _implementation_with_masks(implementation, kwargs)
    if implementation == "sdpa" and key.shape[1] < query.shape[1] and not module.training:
        return grouped_attention(query, key, value, attention_mask, kwargs.get("scaling")), None
    function = _attention_function(implementation, module)
    return function(module, query, key, value, attention_mask, **kwargs)


class _AsBefore:
    """
    Proxy of an attention layer (or its config) that reports the implementation from before the switch, because flash
    attention reads from the config which of its kernels to run.
    """

    def __init__(self, part: Any, implementation: str):
        self._part, self._implementation = part, implementation

    def __getattr__(self, name: str) -> Any:
        if name == "_attn_implementation":
            return self._implementation
        value = getattr(self._part, name)
        return _AsBefore(value, self._implementation) if name == "config" else value


def tree_attention_mask(*args, config: PreTrainedConfig, **kwargs) -> Any:
    """
    The registered mask function (transformers' `AttentionMaskInterface`): makes the mask of the implementation that
    the model had. Tree forwards bring a mask of their own.
    """
    implementation = _previous_implementation(config)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
    return None if make_mask is None else make_mask(*args, config=config, **kwargs)


def register() -> None:
    """Registers `tree_attention` and `tree_attention_mask` with transformers as "tree_attention"."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, tree_attention_mask)


def layer_window(module: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The sliding window of an attention layer, None for full attention."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    config, layer = module.config, getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is not None and layer is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _implementation_with_masks(implementation: str, kwargs: dict[str, Any]) -> str:
    """The implementation for a tree forward: the model's own if it takes a dense mask, else the nearest that does."""
    if implementation in ("eager", "sdpa"):
        return implementation
    # sdpa supports neither soft-capping nor attention sinks.
    return "eager" if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None else "sdpa"


def _attention_function(implementation: str, module: torch.nn.Module) -> Callable:
    if implementation == "eager":
        # Every model file defines its own eager attention; a subclass may live in another file.
        for kind in type(module).__mro__:
            function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
            if function is not None:
                return function
        raise ValueError(
            f"`assistant_model`: no eager attention found for {type(module).__name__}. Load the model with "
            "attn_implementation='sdpa'."
        )
    return ALL_ATTENTION_FUNCTIONS[implementation]


# --------------------------------------------------------------------------------------------------------- the switch


class SwitchedName(str):
    """
    The name "tree_attention" as a switched config holds it. A copy of the config that is made meanwhile (by
    `copy.deepcopy` or `pickle`) holds the previous implementation.
    """

    previous: str

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.previous,)


COPIES_ARE_AS_BEFORE = version.parse(torch.__version__).release >= (2, 13)
"""Whether configs are switched to a `SwitchedName`: no older torch.compile was seen to trace a subclass of `str`."""


@lru_cache(maxsize=16)  # one object per name: compiled forwards may check its identity
def switched_name(previous: str) -> str:
    """The name "tree_attention" for a config that had the implementation `previous`."""
    if not COPIES_ARE_AS_BEFORE:
        return NAME
    name = SwitchedName(NAME)
    name.previous = previous
    return name


@dataclass
class _Switch:
    config: PreTrainedConfig
    previous: str
    calls: int = 0


_lock = threading.Lock()
_switches: dict[int, _Switch] = {}
"""
Switched configs by `id(config)`: the previous implementation, and how many calls need the switch. Each `_Switch` holds
its config, so that the id stays valid.
"""


def _previous_implementation(config: PreTrainedConfig) -> str:
    switch = _switches.get(id(config))
    if switch is not None:
        return switch.previous
    # The config is not in `_switches` but may say "tree_attention": a separate object that was switched together with
    # its parent's config, or a config that has just been restored.
    name = config._attn_implementation
    if isinstance(name, SwitchedName):
        return name.previous
    return "sdpa" if name in (None, NAME) else name


def implementation_of(model: PreTrainedModel) -> str:
    """The attention implementation that a model has outside of speculative calls."""
    return _previous_implementation(model.config.get_text_config(decoder=True))


def is_exact(implementation: str) -> bool:
    """
    Whether an attention implementation is known to compute softmax attention, so that another one may take its place
    over trees: transformers' own, and kernels from the Hub, which have a repository's name.
    """
    name = implementation.rpartition("|")[2]  # "paged|sdpa" is sdpa
    return name in ("eager", "sdpa", "flex_attention") or name.startswith("flash_attention_") or "/" in name


def supports_switching(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through transformers' `AttentionInterface`."""
    return bool(getattr(model, "_supports_attention_backend", False)) and model._can_set_attn_implementation()


def needs_context(model: PreTrainedModel) -> bool:
    """
    Whether layers need the `TreeContext` because a dense mask is not enough: with sliding windows, and with
    implementations that take no dense mask.
    """
    config = model.config.get_text_config(decoder=True)
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "sliding_window", None
    )
    return bool(has_windows) or _previous_implementation(config) not in ("eager", "sdpa")


@contextmanager
def switched_to_tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Switches a model to `tree_attention` inside the context. Calls of several threads on one model are counted: the
    first call switches, the last call restores. Setting the implementation on the configs takes microseconds,
    `set_attn_implementation` 200 µs.
    """
    configs = _decoder_configs(model)
    with _lock:
        for config in configs:
            switch = _switches.get(id(config))
            if switch is None:
                previous = _previous_implementation(config) if config._attn_implementation else "eager"
                switch = _switches[id(config)] = _Switch(config, previous)
                config._attn_implementation_internal = switched_name(switch.previous)
            switch.calls += 1
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                switch = _switches[id(config)]
                switch.calls -= 1
                if switch.calls == 0:
                    if config._attn_implementation == NAME:  # else it was set anew meanwhile
                        config._attn_implementation_internal = switch.previous
                    del _switches[id(config)]


def _decoder_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that the decoder's attention layers read, each once."""
    text_config = model.config.get_text_config(decoder=True)
    configs = {id(text_config): text_config}
    for module in modules_of(model):
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and hasattr(module, "layer_idx"):
            configs.setdefault(id(config), config)
    return list(configs.values())


register()
