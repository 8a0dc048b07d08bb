"""
"tree_attention": attention over a tree of draft tokens, registered for attention and for masks.

While a call speculates, its models use it instead of the implementation they had. Where a forward carries a
`TreeContext` it attends along the tree; everywhere else (the prefill, other threads) it falls through to the
implementation the model had.
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
    What one tree forward may attend to. A query is a node; the keys are the slots of a `TreeCache`: the committed ones
    of its row, and behind them those of the tree's nodes.

    Args:
        lengths (`list[int]`): committed slots of every row.
        lengths_device (`torch.device`): where they are wanted as a tensor: that of the other tensors.
        visible (`torch.Tensor` of shape `[batch, prompt]`, bool, *optional*): which of the first slots hold tokens,
            where some hold padding.
        num_slots (`int`): slots the forward gets to see (keys).
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which nodes a query may attend to.
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64): depth of every query below the last
            committed slot + 1.
        node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64): depth of every node behind the committed
            slots.
        uniform_length (`int`, *optional*): the length, where all rows have the same.
        kernel_device (`torch.device`, *optional*): where layers attend by the kernel, and need no mask.
        first_slots (`torch.Tensor` of shape `[batch]`, int64, *optional*): for the kernel, what `visible` says.
        node_multiple (`int`): for the kernel, nodes are filled up to a multiple of this.
        device_lengths (`torch.Tensor` of shape `[batch]`, int64, *optional*): the lengths, where only the device knows
            them; then `lengths` says no more than how many rows there are.
        block_tables (`torch.Tensor` of shape `[batch, blocks]`, int64, *optional*): for the kernel, where the slots of
            a paged cache are.
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
        The same for a forward that gets to see more slots, of which those behind the nodes are nothing; with
        `node_multiple`, so that the levels of a tree can share a graph.
        """
        return replace(
            self, num_slots=num_slots, node_multiple=node_multiple, was_used=False, _masks={}, _kernel_inputs=None
        )

    @property
    def uses_kernel(self) -> bool:
        """Whether layers attend by the kernel."""
        return self.kernel_device is not None

    @property
    def kernel_inputs(self) -> KernelInputs:
        """What the kernel needs to know."""
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
        """What the model itself is given as its mask: without use where layers attend by the kernel."""
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
        """
        Whether there is but one query, which attends to every slot: the level of a chain, or a step without a tree.
        """
        if self.ancestors.shape[1] > 1 or self.uniform_length is None or self.visible is not None:
            return False
        if self.num_slots > self.uniform_length + self.ancestors.shape[2]:
            return False
        return self.ancestors.device.type == "cpu" and bool(self.ancestors.all())  # elsewhere the look would be a wait

    @cached_property
    def _allowed(self) -> torch.Tensor:
        """`[1 or batch, queries, slots]`, bool."""
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
        # Padding may be among the nodes, too: in the first forward of a head, whose nodes are a prompt's tokens.
        visible = torch.nn.functional.pad(
            self.visible, (0, max(self.num_slots - self.visible.shape[1], 0)), value=True
        )
        return allowed & visible[:, None, : self.num_slots]

    @cached_property
    def _nodes(self) -> torch.Tensor:
        """For every row and slot, the node in it (negative: committed), `[batch, slots]`."""
        lengths = self.device_lengths
        if lengths is None:
            lengths = torch.tensor(self.lengths, device=self.lengths_device)
        return torch.arange(self.num_slots, device=self.lengths_device) - lengths[:, None]

    @cached_property
    def _distances(self) -> torch.Tensor:
        """Positions from key to query, `[batch, queries, slots]`."""
        rows = len(self.lengths)
        depths = self.node_depths.expand(rows, -1).gather(1, self._nodes.clamp(0, self.node_depths.shape[1] - 1))
        return self.query_depths[:, :, None] - torch.where(self._nodes < 0, self._nodes, depths)[:, None]


@lru_cache(maxsize=16)
def mask_values(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What an additive mask holds for allowed and for hidden slots."""
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
    An attention layer whose config names the implementation it had: flash attention asks the config which of its
    kernels to run.
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
    The registered mask function: what the implementation the model had would make. Tree forwards bring their own.
    """
    implementation = _previous_implementation(config)
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)
    return None if make_mask is None else make_mask(*args, config=config, **kwargs)


def register() -> None:
    """Registers both functions with transformers, under one name."""
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
    # sdpa knows neither soft-capping nor attention sinks.
    return "eager" if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None else "sdpa"


def _attention_function(implementation: str, module: torch.nn.Module) -> Callable:
    if implementation == "eager":
        # Every model file has its own, as the interface's default; a subclass may live in another file.
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


@dataclass
class _Switch:
    config: PreTrainedConfig
    previous: str
    calls: int = 0


_lock = threading.Lock()
_switches: dict[int, _Switch] = {}
"""
By id of a config: what it said before, and how many calls want it switched. A config in here is alive: `_Switch` holds
it.
"""


def _previous_implementation(config: PreTrainedConfig) -> str:
    switch = _switches.get(id(config))
    if switch is not None:
        return switch.previous
    # A layer whose config was switched together with its parent's but is another object, or one that has just been
    # restored.
    name = config._attn_implementation
    return "sdpa" if name in (None, NAME) else name


def implementation_of(model: PreTrainedModel) -> str:
    """The attention implementation of a model when no call has switched it."""
    return _previous_implementation(model.config.get_text_config(decoder=True))


def supports_switching(model: PreTrainedModel) -> bool:
    """Whether the model's attention goes through transformers' `AttentionInterface`."""
    return bool(getattr(model, "_supports_attention_backend", False)) and model._can_set_attn_implementation()


def needs_context(model: PreTrainedModel) -> bool:
    """
    Whether the dense mask of a tree forward is not enough: for sliding windows, and for kernels that take no such
    mask.
    """
    config = model.config.get_text_config(decoder=True)
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "sliding_window", None
    )
    return bool(has_windows) or _previous_implementation(config) not in ("eager", "sdpa")


@contextmanager
def switched_to_tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Lets the model use `tree_attention` while inside. Calls of several threads on one model are counted: the first
    switches, the last restores. Setting the implementation on the configs costs microseconds,
    `set_attn_implementation` 200.
    """
    configs = _decoder_configs(model)
    with _lock:
        for config in configs:
            switch = _switches.get(id(config))
            if switch is None:
                switch = _switches[id(config)] = _Switch(config, config._attn_implementation or "eager")
                config._attn_implementation_internal = NAME
            switch.calls += 1
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                switch = _switches[id(config)]
                switch.calls -= 1
                if switch.calls == 0:
                    if config._attn_implementation == NAME:  # else somebody has set another one meanwhile
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
