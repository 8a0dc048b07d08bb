"""The decoder layers of a block head: transformers' own, and DFlash 2's convolutions around attention and MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from ..checkpoints.layer_fields import windows_of
from ..eagle.layers import Eagle3Layer
from ..head_layers import Layers, layers_of
from .configuration_block import BlockConfig


def block_layers_of(config: BlockConfig) -> Layers:
    """
    The building blocks of a block head.

    Raises:
        ValueError: for a kind of layer of which there are no such heads.
    """
    known: tuple[str, ...] = ("llama", "qwen2", "qwen3") if config.is_peagle else ("qwen3", "gemma4_text")
    if config.conv_kernel_size:
        known = ("qwen3",)
    return layers_of(config.text_config, known)


def build_layers(config: BlockConfig) -> nn.ModuleList:
    """The decoder layers of a head; each attention says whether it is causal, for kernels that take no mask."""
    text_config, kind = config.text_config, block_layers_of(config)
    layers: list[Any] = [kind.decoder(text_config, index) for index in range(text_config.num_hidden_layers)]
    if config.is_peagle:
        layers[0] = Eagle3Layer(config)
    elif config.conv_kernel_size:
        layers = [ConvolvedLayer(config, layer) for layer in layers]
    for layer, window in zip(layers, windows_of(text_config), strict=True):
        layer.self_attn.is_causal = is_causal_within(config, window)
    return nn.ModuleList(layers)


def is_causal_within(config: BlockConfig, window: int | None) -> bool:
    """Whether block rows see no later rows in a layer with this sliding window (None: without one)."""
    return config.is_peagle or config.causal or (window is not None and config.window_is_causal)


class BlockConvolution(nn.Module):
    """
    The convolutions along a block around one sublayer of DFlash 2, before and after it (z-lab/dflash; the names are
    those of its checkpoints). Their kernels are parameters plus what a projection of the sublayer's input adds, one
    number for every group of channels.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        taps, size = config.conv_kernel_size, config.hidden_size
        self.taps, self.group_size = taps, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // self.group_size), bias=False)

    def kernels(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both kernels for the sublayer's input `[batch, rows, H]`, `[batch, rows, taps, H]` each."""
        added = self.kernel_projection(inputs).unflatten(-1, (2, self.taps, -1))
        before, after = (self.base_kernel + added.repeat_interleave(self.group_size, dim=-1)).unbind(dim=2)
        return before, after


def convolve(states: torch.Tensor, kernel: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
    """
    Row i of the result is the sum over taps t of `kernel[i, t]` times row i - t; there are none before row 0 of a
    block. Where several blocks stand in a row, each has `num_rows`.
    """
    if num_rows is not None and num_rows < states.shape[1]:
        blocks = (states.unflatten(1, (-1, num_rows)).flatten(0, 1), kernel.unflatten(1, (-1, num_rows)).flatten(0, 1))
        return convolve(*blocks).view_as(states)
    rows = states.shape[1]
    result = kernel[:, :, 0] * states
    for tap in range(1, kernel.shape[2]):
        result = result + kernel[:, :, tap] * pad(states, (0, 0, tap, 0))[:, :rows]
    return result


class ConvolvedLayer(nn.Module):
    """A Qwen3 decoder layer with convolutions around attention and MLP, which share the kernels' projection each."""

    def __init__(self, config: BlockConfig, layer: Any):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Maps the states of a block, `[batch, rows, H]`, or of several in a row (`AnchoredBlocks`), to states."""
        anchored = kwargs.get("anchored")
        rows = None if anchored is None else anchored.num_rows
        inputs = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(inputs)
        attended = self.self_attn(hidden_states=convolve(inputs, before, rows), **kwargs)[0]
        states = states + convolve(attended, after, rows)
        inputs = self.post_attention_layernorm(states)
        before, after = self.mlp_conv.kernels(inputs)
        return states + convolve(self.mlp(convolve(inputs, before, rows)), after, rows)
