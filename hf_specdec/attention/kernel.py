"""
Tree attention by the Triton kernel, which replaces the dense mask: it reads the keys of every row up to its length,
once for all heads that share them, and takes a tree as bits. Models use it where it can run, on CUDA with Triton, and
where it computes what their own implementation computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from transformers import PreTrainedModel

from ..kernels import DEVICES, kernels_are_installed
from ..trees.token_tree import MAX_NODES
from .arithmetic import is_known


MOST_KERNEL_QUERIES = 1 + MAX_NODES
"""
Most queries per row that attend with the kernel: the root and the nodes of the largest tree. Longer prompt chunks do
as well with dense matrix products.
"""
NODES_PER_WORD = 64


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """
    Arguments of `hf_specdec_kernels.tree_attention` that describe one forward, by the names that they have there.

    Args:
        lengths (`torch.Tensor` of shape `[batch]`, int64).
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, words]`, int64).
        query_depths (`torch.Tensor` of shape `[1 or batch, queries]`, int64).
        node_depths (`torch.Tensor` of shape `[1 or batch, nodes]`, int64).
        first_slots (`torch.Tensor` of shape `[batch]`, int64).
        block_tables (`torch.Tensor` of shape `[batch, blocks]`, int64, *optional*).
        ancestors_in_windows (`torch.Tensor` of shape `[1 or batch, queries, words]`, int64, *optional*): the ancestors
            in layers with a sliding window, where they are others.
    """

    lengths: torch.Tensor
    ancestors: torch.Tensor
    query_depths: torch.Tensor
    node_depths: torch.Tensor
    first_slots: torch.Tensor
    block_tables: torch.Tensor | None = None
    ancestors_in_windows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: torch.Tensor,
        ancestors: torch.Tensor,
        query_depths: torch.Tensor,
        node_depths: torch.Tensor,
        first_slots: torch.Tensor | None,
        multiple: int = 1,
        block_tables: torch.Tensor | None = None,
        has_causal_windows: bool = False,
    ) -> KernelInputs:
        """
        Builds the inputs from a mask `ancestors`, `[1 or batch, queries, nodes]` bool, and pads the number of nodes to
        a multiple of `multiple` by nodes to which no query attends. With `has_causal_windows`, layers with a sliding
        window attend to no node that is deeper than the query.
        """
        from hf_specdec_kernels import pack_ancestors

        in_windows = None
        if has_causal_windows:
            in_windows = pack_ancestors(ancestors & (node_depths[:, None] <= query_depths[:, :, None]))

        num_padding = -ancestors.shape[2] % multiple
        if num_padding:
            node_depths = torch.nn.functional.pad(node_depths, (0, num_padding))
        if first_slots is None:
            first_slots = torch.zeros_like(lengths)
        packed = pack_ancestors(ancestors)
        return cls(lengths, packed, query_depths, node_depths, first_slots, block_tables, in_windows)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are not None, by field name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to(self, device: torch.device) -> KernelInputs:
        """The inputs with all tensors on `device`."""
        return KernelInputs(**{name: value.to(device) for name, value in self.tensors().items()})

    def for_batch(self, batch_size: int) -> KernelInputs:
        """A copy in memory of its own, with every tensor expanded to `batch_size` rows."""
        expanded = {name: value.expand(batch_size, *value.shape[1:]) for name, value in self.tensors().items()}
        return KernelInputs(**{name: value.clone() for name, value in expanded.items()})

    def copy_(self, source: KernelInputs) -> None:
        """Copies the values of another step's inputs into these tensors."""
        for name, value in self.tensors().items():
            value.copy_(getattr(source, name))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Runs the kernel.

        Args:
            query (`torch.Tensor` of shape `[batch, heads, queries, head_dim]`): queries of the nodes.
            key, value (`torch.Tensor` of shape `[batch, kv_heads, capacity, head_dim]`, or `[num_blocks, kv_heads,
                block_size, head_dim]` with block tables): the whole cache.
            scale (`float`, *optional*): factor of the scores; by default head_dim^-0.5.
            window (`int`, *optional*): a query sees keys less than this many positions before it.
            softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
            sinks (`torch.Tensor` of shape `[heads]`, *optional*): scores without a value in the softmax.

        Returns:
            `torch.Tensor` of shape `[batch, queries, heads, value_dim]`: the attended values.
        """
        from hf_specdec_kernels.tree_attention import unchecked

        return unchecked(
            query,
            key,
            value,
            self.lengths,
            self.ancestors if window is None or self.ancestors_in_windows is None else self.ancestors_in_windows,
            first_slots=self.first_slots,
            query_depths=self.query_depths,
            node_depths=self.node_depths,
            block_tables=self.block_tables,
            sinks=sinks,
            scale=scale,
            window=window,
            softcap=softcap,
        )


def attends_by_kernel(model: PreTrainedModel, implementation: str, is_paged: bool = False) -> bool:
    """
    Whether a model's forwards over trees can use the kernel instead of `implementation`.

    Args:
        is_paged (`bool`, *optional*, defaults to `False`): whether the kernel is to read a paged cache in place.
    """
    return (
        model.dtype in DEVICES.get(model.device.type, ())
        and kernels_are_installed()
        and is_known(model, implementation, is_paged)
    )


def first_slots_of(visible: torch.Tensor) -> torch.Tensor | None:
    """
    The first slot of every row that holds a token, `[batch]` int64, from `[batch, slots]` bool; None if there is
    padding anywhere but on the left. Waits for the device.
    """
    if bool((visible[:, 1:] < visible[:, :-1]).any()):
        return None
    return (~visible).sum(dim=1)
