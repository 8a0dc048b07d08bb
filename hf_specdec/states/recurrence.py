"""`Recurrence`: what a kind of recurrent layer must say, so that it runs over trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from .kernel import StateKernel
from .topology import NodeTopology


class Recurrence(ABC):
    """
    A kind of recurrence. One file holds one kind; `recurrences.RECURRENCES` lists them.

    What a node has is a dict of tensors `[batch, nodes, …]`: what `inputs` makes of the arguments of transformers'
    function, and what `score` keeps of it until the step is committed.
    """

    functions: ClassVar[tuple[str, ...]]
    """
    Names of transformers' functions for many tokens at once, which `inputs` takes the place of. In forwards over a
    tree mixers see no earlier state, so they call these, never those for one token.
    """
    kernel: ClassVar[StateKernel | None] = None
    """The kernels that compute the same on a GPU, if there are any."""
    state_dims: ClassVar[int] = 4
    """
    Dimensions of the state that one call of the function reads. A mixer whose cache holds one dimension more, after
    the rows, calls the function once for each of its entries (Zamba's heads).
    """
    constants: ClassVar[tuple[str, ...]] = ()
    """Names of what `inputs` gives that belongs to the layer, not to its nodes."""
    continues: ClassVar[bool] = True
    """Whether transformers' function takes an earlier state; else its forwards of several tokens forget it."""
    block: ClassVar[int] = 64
    """Nodes of a text that are scored at once; the work within a block grows with its square."""
    reads_at_once: ClassVar[bool] = False
    """Whether there is a `read`; else `score` and `advance` read all texts block by block."""
    block_at_once: ClassVar[int] = 64
    """Tokens of a block of `read`."""

    @abstractmethod
    def inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """
        What every node has, from the arguments of transformers' function, `[batch, nodes, …]` each, and `constants`.
        """

    def of_prompt(self, inputs: dict[str, Any], is_prompt: torch.Tensor) -> dict[str, Any]:
        """The inputs of a text, where transformers reads prompts otherwise than it writes (`[batch, nodes]` bool)."""
        return inputs

    @abstractmethod
    def first_state(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The state before any token, `[batch, …]`, in the dtype in which it is kept."""

    @abstractmethod
    def score(
        self,
        state: torch.Tensor,
        inputs: dict[str, Any],
        earlier: dict[str, torch.Tensor] | None,
        topology: NodeTopology,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """
        The outputs of the queries, and what they add to the state.

        Args:
            state (`torch.Tensor` of shape `[batch, …]`): the state at the committed tokens; it must not change.
            inputs (`dict`): what the queries have, `[batch, queries, …]` each.
            earlier (`dict`, *optional*): what was kept of the nodes before them, `[batch, topology.offset, …]` each.
            topology (`NodeTopology`): which nodes follow which.

        Returns:
            outputs `[batch, queries, …]`, and what is kept of the queries, `[batch, queries, …]` each.
        """

    @abstractmethod
    def advance(self, state: torch.Tensor, kept: dict[str, Any], is_on: torch.Tensor) -> torch.Tensor:
        """
        The state after a path.

        Args:
            state (`torch.Tensor` of shape `[batch, …]`): the state before it.
            kept (`dict`): what `score` kept of the nodes of the path, `[batch, most, …]` each, and the `constants`.
            is_on (`torch.Tensor` of shape `[batch, most]`, bool): which of these nodes count, the first ones of each
                row; what the others have may be NaN.
        """

    def bytes_of_reading(self, state: tuple[int, ...]) -> int:
        """Bytes that `read` takes for a token meanwhile, if there is such a form; `state` as in `transient_bytes`."""
        return 0

    def read(
        self, state: torch.Tensor, inputs: dict[str, Any], is_on: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Outputs over a text, `[batch, tokens, …]`, and the state behind it, with few launches.

        Args:
            state (`torch.Tensor` of shape `[batch, …]`): the state before the text.
            inputs (`dict`): what the tokens have, `[batch, tokens, …]` each, and the `constants`.
            is_on (`torch.Tensor` of shape `[batch, tokens]`, bool): which tokens enter the state, the first ones of
                each row; what the others have may be NaN, and so may their outputs.
        """
        raise NotImplementedError(f"{type(self).__name__} reads texts block by block.")

    def transient_bytes(self, state: tuple[int, ...], queries: int, nodes: int) -> int:
        """
        Most bytes that `score` takes for a row meanwhile, besides what is as small as its arguments; `advance` over as
        many nodes takes no more. Rows are followed in groups by it, and admission counts it; see `groups`.

        Args:
            state (`tuple[int, …]`): shape of the state of a row.
            queries (`int`), nodes (`int`): nodes that are scored, and all nodes.
        """
        return 0

    def returned(self, outputs: torch.Tensor, state: torch.Tensor) -> Any:
        """
        What transformers' function returns, from outputs `[batch, queries, …]`. `state` stands for the last state,
        which the mixer hands to the cache, where it is ignored.
        """
        return outputs, state
