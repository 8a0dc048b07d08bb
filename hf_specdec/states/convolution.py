"""Short causal convolutions over the nodes of a tree: a node's inputs are those of its ancestors."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d
from transformers.activations import ACT2FN

from .kernel import KernelForward
from .topology import NodeTopology, Path


FUNCTION = "causal_conv1d_fn"
"""Name of transformers' function for many tokens at once."""


def convolve(
    window: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    topology: NodeTopology,
) -> torch.Tensor:
    """
    The convolution at every query, `[batch, channels, queries]`.

    Args:
        window (`torch.Tensor` of shape `[batch, channels, taps]`): the last committed inputs, the newest last.
        inputs (`torch.Tensor` of shape `[batch, channels, nodes]`): the inputs of the nodes.
        weight (`torch.Tensor` of shape `[channels, taps]`), bias (`torch.Tensor` of shape `[channels]`, *optional*),
            activation (`str`, *optional*): as transformers' function takes them.
        topology (`NodeTopology`): which nodes follow which.
    """
    known = torch.cat([window, inputs.to(window.dtype)], dim=2).to(weight.dtype)
    width, queries = weight.shape[1], topology.num_queries
    if topology.counts is not None:
        read, stride = known[:, :, window.shape[2] - width + 1 :], 1
    else:
        taps = topology.inputs_of_taps(width, known.device) + (window.shape[2] - width)
        places = taps.flatten(1)[:, None].expand(len(known), known.shape[1], -1)
        read, stride = known.gather(2, places), width
    outputs = conv1d(read, weight[:, None], bias, stride=stride, groups=len(weight))
    assert outputs.shape[2] == queries
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.to(inputs.dtype)


def advanced(window: torch.Tensor, inputs: torch.Tensor, path: Path) -> torch.Tensor:
    """The window after a path, for the `inputs` (`[batch, channels, nodes]`) of all nodes."""
    known = torch.cat([window, path.of_nodes(inputs, dim=2).to(window.dtype)], dim=2)
    ends = path.is_on.sum(dim=1, keepdim=True)  # of the inputs after the window
    places = ends + torch.arange(window.shape[2], device=window.device)
    return known.gather(2, places[:, None].expand(-1, known.shape[1], -1))


def convolve_by_kernel(
    window: torch.Tensor,
    pending: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    forward: KernelForward,
) -> torch.Tensor:
    """
    The convolution at every node by the kernel, `[batch, channels, nodes]`. It commits what is pending to the windows
    of all slots, `[slots, channels, taps]`, and leaves the inputs `pending`, `[slots, nodes, channels]`.
    """
    from hf_specdec_kernels import tree_conv

    device, is_silu = inputs.device, activation in ("silu", "swish")
    outputs = tree_conv(
        inputs.transpose(1, 2),
        weight,
        window,
        pending,
        forward.table(weight.shape[1], device),
        forward.rows(device),
        bias=bias,
        activation="silu" if is_silu else None,
    ).transpose(1, 2)
    return outputs if activation is None or is_silu else ACT2FN[activation](outputs)
