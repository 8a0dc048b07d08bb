"""The processes that run one target together (`tp_plan=`, under `torchrun`): what rank 0 decides holds for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from .models.structure import execution_device
from .trees import DraftTree, Topology


_READS_TEXT_ONLY = frozenset({EosTokenCriteria, MaxLengthCriteria, StopStringCriteria})


@dataclass(frozen=True, eq=False)
class Ranks:
    """
    The ranks that run one tensor-parallel target. Every rank has a part of every layer, so that all ranks must run the
    same forwards and decode the same text. Logits are equal on all ranks; draws, clocks and drafts need not be.
    Therefore rank 0 makes every decision, and the other ranks get it by a broadcast. A single process, or a process
    with prompts of its own beside others (`synced_gpus`), decides for itself: all methods then leave their arguments
    as they are.

    Args:
        group (`ProcessGroup`, *optional*): the ranks; None for a single process.
        device (`torch.device`): device of the broadcast tensors.
    """

    group: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ranks:
        """The ranks that run `model`."""
        mesh = getattr(model, "_device_mesh", None)
        if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
            return cls(None, execution_device(model))
        part = mesh["tp"] if mesh.mesh_dim_names else mesh  # a mesh of transformers 5.17 has no names
        return cls(part.get_group(), execution_device(model))

    @cached_property
    def are_several(self) -> bool:
        """Whether there are other ranks than this process."""
        return self.group is not None

    def agree(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Rank 0's tensor; all ranks pass equal shapes and dtypes. Waits only for a tensor on another device: else it can
        be captured in a CUDA graph.
        """
        if self.group is None:
            return tensor
        sent = tensor.to(self.device, copy=True).contiguous()
        dist.broadcast(sent, src=dist.get_global_rank(self.group, 0), group=self.group)
        return sent.to(tensor.device)

    def agree_on_parts(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank 0's tensors of integers or bools, in one broadcast."""
        if self.group is None:
            return list(parts)
        sent = self.agree(torch.cat([part.flatten().long() for part in parts]))
        pieces = sent.split([part.numel() for part in parts])
        return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]

    def agree_on(self, *numbers: float) -> list[float]:
        """Rank 0's `numbers`, as floats."""
        if self.group is None:
            return list(numbers)
        return self.agree(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist()

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        if self.group is None:
            return number
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def on_all(self, holds: bool) -> bool:
        """Whether something holds on all ranks."""
        return bool(self.least(int(holds)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """
        A context for a capture, which all ranks have or none: an exception on one rank is one on all. (The ranks must
        run the same forwards, and a capture runs one more.) Not so an exception amid the exchanges of the run before a
        capture, as when memory runs out there: the other ranks wait in theirs.

        Raises:
            RuntimeError: if another rank has failed.
        """
        try:
            yield
        except Exception:
            self.on_all(False)
            raise
        if not self.on_all(True):
            raise RuntimeError("another rank has failed")

    def agree_on_draft(self, draft: DraftTree) -> DraftTree:
        """Rank 0's draft tokens in rank 0's tree; all ranks' trees must have equally many nodes and levels."""
        if self.group is None or draft.num_nodes == 0:
            return draft
        topology = draft.topology
        parts = [draft.tokens]
        if not topology.is_static:
            parts.append(topology.parents)
        if draft.valid is not None:
            parts.append(draft.valid)
        agreed = self.agree_on_parts(parts)
        tokens = agreed.pop(0)
        if not topology.is_static:
            topology = Topology.of_parents(agreed.pop(0), topology.depth)
        return replace(draft, tokens=tokens, topology=topology, valid=agreed.pop() if agreed else None)

    def share_random_state(self) -> None:
        """Gives all ranks the random state of rank 0, so that they draw alike."""
        if self.group is None:
            return
        torch.set_rng_state(self.agree(torch.get_rng_state()))
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.agree(torch.cuda.get_rng_state(self.device)), self.device)

    def agreeing(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """
        Stopping criteria that agree on all ranks: those of `criteria` that may read more than the text (a clock) stop
        when rank 0's do.
        """
        if self.group is None:
            return criteria
        return StoppingCriteriaList(
            criterion if type(criterion) in _READS_TEXT_ONLY else _AgreedCriterion(criterion, self)
            for criterion in criteria
        )


class _AgreedCriterion(StoppingCriteria):
    """A criterion that stops on every rank when it does on rank 0."""

    def __init__(self, criterion: StoppingCriteria, ranks: Ranks):
        self._criterion, self._ranks = criterion, ranks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stops = torch.as_tensor(self._criterion(input_ids, scores, **kwargs), device=input_ids.device)
        return self._ranks.agree(stops.to(torch.uint8)).bool()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._criterion, name)  # such as `eos_token_id`, by which padding is decided


def is_sharded(model: PreTrainedModel) -> bool:
    """
    Whether a model's weights are sharded over processes with texts of their own (FSDP, ZeRO-3), which therefore must
    run their forwards at the same time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed import fsdp

    by_torch = getattr(fsdp, "FSDPModule", ())  # since torch 2.6
    by_deepspeed = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return isinstance(model, by_torch) or is_fsdp_managed_module(model) or by_deepspeed


def is_pipeline(model: PreTrainedModel) -> bool:
    """Whether a model's layers are spread over processes (pipeline parallelism)."""
    mesh = getattr(model, "_device_mesh", None)
    return mesh is not None and "pp" in (mesh.mesh_dim_names or ()) and mesh["pp"].size() > 1
