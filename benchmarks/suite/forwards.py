"""Single forwards of a step, and the matmuls that are their lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from hf_specdec.attention import switched_to_tree_attention
from hf_specdec.cache import DeviceCache, TreeCache
from hf_specdec.compat import CACHE
from hf_specdec.compiling.layers import MOST_SHAPES
from hf_specdec.forwards.tree_forward import TreeForward
from hf_specdec.graphs import GraphStore
from hf_specdec.models.structure import keeping_one_logit
from hf_specdec.trees import TokenTree, Topology


@contextmanager
def forward_after(
    model: PreTrainedModel, ids: torch.Tensor, tree: TokenTree | None, compiles: bool = False
) -> Iterator[Callable[[], object]]:
    """
    Yields the forward of the root and a tree's nodes after a context, as steps run it, with random tokens.

    The forward may be repeated, because it commits nothing.

    Args:
        model (`PreTrainedModel`): the model.
        ids (`torch.Tensor` of shape `[1, tokens]`, int64): the context.
        tree (`TokenTree`, *optional*): the tree; None for the root alone.
        compiles (`bool`, *optional*, defaults to `False`): whether the forward is compiled.
    """
    topology, length = Topology.of_tree(tree, model.device), ids.shape[1]
    nodes = topology.num_nodes + 1
    store = GraphStore(length + nodes)
    cache = TreeCache(model.config.num_hidden_layers, 1, model.device, capacity=length + nodes, storage=store)
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    tokens = torch.randint(model.config.vocab_size, (1, nodes), device=model.device)
    with (
        torch.no_grad(),
        switched_to_tree_attention(model),
        torch._dynamo.config.patch(recompile_limit=MOST_SHAPES),
    ):
        model(input_ids=ids, use_cache=True, **{CACHE: cache}, **keeping_one_logit(model))
        cache.adopt_prefill()
        device_cache, forward = DeviceCache(cache), TreeForward(model, cache, None, zero)
        device_cache.at(cache.lengths_tensor)
        visible = None if forward.has_kernel else torch.ones(1, cache.capacity, dtype=torch.bool, device=model.device)
        forward = forward.over(device_cache, zero, visible, zero)
        forward.compiles = compiles
        yield lambda: forward(tokens, topology.ancestors, topology.depths)


def matmuls(model: PreTrainedModel, num_tokens: int) -> Callable[[], object]:
    """
    A function that multiplies random inputs for `num_tokens` tokens by every weight matrix of a model, the lm_head
    included, once each.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weight = layers[0].weight
    inputs = {
        size: torch.randn(num_tokens, size, dtype=weight.dtype, device=weight.device)
        for size in {layer.in_features for layer in layers}
    }

    def run() -> None:
        with torch.no_grad():
            for layer in layers:
                torch.nn.functional.linear(inputs[layer.in_features], layer.weight)

    return run
