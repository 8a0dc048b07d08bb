"""The walks as operators of torch: plain PyTorch on the CPU, Triton on CUDA."""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix
from .naive import greedy_walk_naive, rejection_walk_naive, target_walk_naive
from .walks import Walks


RESULTS = ("path", "accepted", "next_tokens")


def _write(walks: Walks, *results: torch.Tensor) -> None:
    for result, found in zip(results, walks, strict=True):
        result.copy_(found)


@torch.library.custom_op(add_op_namespace_prefix("greedy_walk"), mutates_args=RESULTS, device_types="cpu")
def _greedy_walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    max_depth: int,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    path: torch.Tensor,
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
) -> None:
    walks = greedy_walk_naive(logits, tokens, parents, max_depth, end_tokens, active)
    _write(walks, path, accepted, next_tokens)


@_greedy_walk.register_kernel("cuda")
def _(logits, tokens, parents, max_depth, end_tokens, active, *results) -> None:
    from .triton import launch_target_walk  # triton is only needed where it runs

    with torch.cuda.device_of(logits):  # Triton launches on the current device
        launch_target_walk(logits, tokens, parents, None, max_depth, None, None, None, end_tokens, active, *results)


@torch.library.custom_op(add_op_namespace_prefix("target_walk"), mutates_args=RESULTS, device_types="cpu")
def _target_walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    max_depth: int,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    path: torch.Tensor,
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
) -> None:
    walks = target_walk_naive(
        logits, tokens, parents, uniforms, max_depth, temperature, top_k, top_p, end_tokens, active
    )
    _write(walks, path, accepted, next_tokens)


@_target_walk.register_kernel("cuda")
def _(*args) -> None:
    from .triton import launch_target_walk

    with torch.cuda.device_of(args[0]):
        launch_target_walk(*args)


@torch.library.custom_op(add_op_namespace_prefix("rejection_walk"), mutates_args=RESULTS, device_types="cpu")
def _rejection_walk(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    uniforms: torch.Tensor,
    max_depth: int,
    draft_index: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    end_tokens: torch.Tensor | None,
    active: torch.Tensor | None,
    path: torch.Tensor,
    accepted: torch.Tensor,
    next_tokens: torch.Tensor,
) -> None:
    walks = rejection_walk_naive(
        logits,
        draft_logits,
        tokens,
        parents,
        uniforms,
        max_depth,
        draft_index,
        draft_columns,
        draft_temperature,
        temperature,
        top_k,
        top_p,
        end_tokens,
        active,
    )
    _write(walks, path, accepted, next_tokens)


@_rejection_walk.register_kernel("cuda")
def _(*args) -> None:
    from .triton import launch_rejection_walk

    with torch.cuda.device_of(args[0]):
        launch_rejection_walk(*args)


for _operator in (_greedy_walk, _target_walk, _rejection_walk):
    _operator.register_fake(lambda *args: None)
