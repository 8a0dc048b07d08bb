"""`NodeTopology`: which nodes follow which, as state layers read it; `Path`: nodes that are committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class NodeTopology:
    """
    The nodes of one forward, behind the committed tokens of every row. Nodes come after their ancestors.

    Args:
        ancestors (`torch.Tensor` of shape `[1 or batch, queries, nodes]`, bool): which nodes a query follows, itself
            included. The queries are the last of the nodes.
        counts (`list[int]`, *optional*): for a text, whose nodes are a chain: how many of the nodes of every row are
            its tokens; those after them are padding. None for a tree, of which a path is committed later.
        prompt_counts (`list[int]`, *optional*): how many of these tokens are of the prompt; those after them were
            written. All, if None.
        max_depth (`int`, *optional*): levels below the roots at most, if that is known without a look at the nodes.
    """

    def __init__(
        self,
        ancestors: torch.Tensor,
        counts: list[int] | None = None,
        prompt_counts: list[int] | None = None,
        max_depth: int | None = None,
    ):
        self.ancestors, self.counts, self.max_depth = ancestors, counts, max_depth
        self.prompt_counts = counts if prompt_counts is None else prompt_counts
        self._tables: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._copies: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def chain(cls, length: int, device: torch.device) -> NodeTopology:
        """A chain of nodes, as of a text."""
        return cls(torch.ones(1, length, length, dtype=torch.bool, device=device).tril())

    @property
    def num_queries(self) -> int:
        """Nodes that the forward runs."""
        return self.ancestors.shape[1]

    @property
    def offset(self) -> int:
        """Nodes that earlier forwards of the step have run."""
        return self.ancestors.shape[2] - self.ancestors.shape[1]

    def ancestors_on(self, device: torch.device) -> torch.Tensor:
        """`ancestors` on a layer's device."""
        if device not in self._copies:
            self._copies[device] = self.ancestors.to(device)
        return self._copies[device]

    def parents_on(self, device: torch.device) -> torch.Tensor:
        """
        The parent of every query, `[1 or batch, queries]` int64 on a layer's device: the last of the other nodes that
        it follows; -1: none.
        """
        places = torch.arange(self.ancestors.shape[2], device=device)
        is_other = self.ancestors_on(device) & (places < places[self.offset :, None])
        return torch.where(is_other, places, -1).amax(dim=2)

    def inputs_of_taps(self, width: int, device: torch.device) -> torch.Tensor:
        """
        The inputs of a convolution of `width` taps at every query, oldest first: `[1 or batch, queries, width]` int64
        places in the committed window of `width` inputs followed by the nodes.
        """
        key = width, device
        if key not in self._tables:
            self._tables[key] = self._find_inputs(width).to(device)
        return self._tables[key]

    def _find_inputs(self, width: int) -> torch.Tensor:
        # Levels between a query and each of its ancestors, which come in the order of their depths.
        ranks = self.ancestors.int().cumsum(dim=2)
        depths = ranks[:, :, -1:]
        taps = []
        for distance in range(width - 1, -1, -1):
            is_there = self.ancestors & (depths - ranks == distance)
            node = is_there.int().argmax(dim=2)
            # The root has one ancestor, itself, and follows the last input of the window.
            before = (width + depths[:, :, 0] - 1 - distance).clamp(max=width - 1)
            taps.append(torch.where(is_there.any(dim=2), width + node, before))
        return torch.stack(taps, dim=2)


@dataclass(frozen=True, eq=False)
class Path:
    """
    The nodes that are committed, from the root down.

    Args:
        nodes (`torch.Tensor` of shape `[batch, most]`, int64): node numbers; any where `is_on` is False.
        is_on (`torch.Tensor` of shape `[batch, most]`, bool): which of them are committed: the first ones of a row, or
            none.
    """

    nodes: torch.Tensor
    is_on: torch.Tensor

    @classmethod
    def of(cls, paths: list[list[int]], device: torch.device) -> Path:
        """The paths of all rows, the root included; an empty one commits nothing."""
        most = max(map(len, paths))
        nodes = [path + [0] * (most - len(path)) for path in paths]
        is_on = [[True] * len(path) + [False] * (most - len(path)) for path in paths]
        return cls(
            torch.tensor(nodes, dtype=torch.long, device=device), torch.tensor(is_on, dtype=torch.bool, device=device)
        )

    def to(self, device: torch.device) -> Path:
        """The path on a layer's device."""
        return self if self.nodes.device == device else Path(self.nodes.to(device), self.is_on.to(device))

    def of_nodes(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """What the nodes of the path have of `values`, whose dimension `dim` are all nodes."""
        shape = [1] * values.dim()
        shape[0], shape[dim] = self.nodes.shape
        sizes = list(values.shape)
        sizes[dim] = self.nodes.shape[1]
        return values.gather(dim, self.nodes.view(shape).expand(sizes))
