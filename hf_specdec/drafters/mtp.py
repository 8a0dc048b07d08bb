"""Drafting with the MTP modules of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..cache import TreeCache
from ..forwards.node_inputs import causal_chain
from ..mtp import MtpHead
from ..sequences import Rows
from ..trees import DraftTree
from .base import DraftRequest
from .eagle import EagleDrafter
from .features import FeatureDrafting
from .growth import LevelNodes


if TYPE_CHECKING:
    from ..engine.request import Request


class MtpDrafter(EagleDrafter):
    """
    Drafts with one MTP module. Rows and trees are those of an EAGLE head: the module runs once for a level, over its
    own outputs.

    Args:
        head (`MtpHead`): the module.
    """

    head: Any
    runs_in_graphs = True

    @classmethod
    def of(cls, head: MtpHead) -> MtpDrafter:
        """The drafter for a head of one module or several."""
        return (cls if head.config.num_modules == 1 else SeveralMtpDrafter)(head)


class SeveralMtpDrafter(MtpDrafter):
    """
    Drafts with several MTP modules. Row t of module k holds the output of module k - 1 in row t (the target's feature
    for module 0) and the token of position t + 1 + k, so a token is in row t + k of module 0 and in row t of module k:
    the cache of module k is k rows behind. Level k of a tree is drafted by module k, and those below the last module's
    by all modules in turn, over all nodes of the path that the module has not read.

    Args:
        head (`MtpHead`): the modules.
    """

    runs_in_graphs = False
    tokens_ahead = None

    first_states: torch.Tensor | None = None
    """Outputs of all modules for the last token that each sequence's cache holds, `[batch, 1, modules · H]`."""

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor, first: int) -> None:
        super().begin(cache, visible, shift, first)
        self.forward.can_be_captured = False

    def forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As in `FeatureDrafter`; outputs of all modules, `[batch, rows, modules · H]`, each in its token's row."""
        count, inputs = self.head.config.num_modules, features
        outputs: list[torch.Tensor] = []
        zeros = features.new_zeros(len(features), 1, count * features.shape[2])
        before = (zeros if self.root_states is None else self.root_states).chunk(count, dim=2)
        chain = causal_chain(tokens.shape[1], self.device)
        for module in range(count):
            if module > 0:
                inputs = torch.cat([before[module - 1], outputs[-1]], dim=1)[:, :-1]
            # Rows before the text's first do not exist: a module's first rows are those of later tokens.
            missing = [max(module - length, 0) for length in self.cache.lengths]
            rows, own_tokens = _later(inputs, missing), _later(tokens[:, :, None], missing)[:, :, 0]
            states = self._run(module, own_tokens, rows, *chain, position_depths=position_depths)
            outputs.append(_later(states, [-number for number in missing]))
        return torch.cat(outputs, dim=2)

    def cache_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> None:
        self.forward_features(tokens, features, position_depths)

    def begin_tree(self, states: torch.Tensor | None, roots: torch.Tensor, depth: int) -> torch.Tensor:
        assert states is not None
        self._outputs = list(states.chunk(self.head.config.num_modules, dim=2))  # of the root and the nodes run so far
        self._drafted_from, self._level, self._num_above = self._outputs[0], 0, 0
        return self.logits(self._outputs[0])[:, 0]

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, draft vocab]` after one level's nodes, by the module whose turn it is."""
        self._level += 1
        module, offset, queries = self._level % self.head.config.num_modules, nodes.offset, nodes.tokens.shape[1]
        parents = nodes.parents.expand(len(nodes.tokens), -1)
        if self._level == 1:
            self._tokens, self._parents, self._ancestors = nodes.tokens, parents, nodes.ancestors
        else:
            above = offset - self._num_above + 1  # the root comes first
            self._tokens = torch.cat([self._tokens, nodes.tokens], dim=1)
            self._parents = torch.cat([self._parents, parents + above], dim=1)
            earlier = torch.nn.functional.pad(self._ancestors, (0, queries)).expand(len(nodes.ancestors), -1, -1)
            self._ancestors = torch.cat([earlier, nodes.ancestors.expand(len(earlier), -1, -1)], dim=1)
        self._num_above = queries
        first = self._outputs[module].shape[1] - 1
        sources = self._drafted_from if module == 0 else self._outputs[module - 1]
        places = self._parents[:, first:, None].expand(-1, -1, sources.shape[2])
        states = self._run(
            module,
            self._tokens[:, first:],
            sources.gather(1, places),
            self._ancestors[:, first:],
            nodes.node_depths[:, first:],
            nodes.node_depths,
            offset=first,
        )
        self._outputs[module] = torch.cat([self._outputs[module], states], dim=1)
        self._drafted_from = torch.cat([self._drafted_from, states[:, -queries:]], dim=1)
        return self.logits(states[:, -queries:])

    def _run(self, module: int, tokens: torch.Tensor, states: torch.Tensor, *nodes: Any, **options: Any) -> Any:
        """Outputs of a module for rows of the states of parents and tokens, which follow its own cache."""
        lengths = self.cache.lengths
        inputs = {"hidden_states": states, "inputs_embeds": self._embed(tokens), "module_index": module}
        options["inputs"] = inputs | {"logits_to_keep": None}
        self.cache.set_lengths([max(length - module, 0) for length in lengths])
        try:
            output = self.forward(tokens, *nodes, **options)
        finally:
            self.cache.set_lengths(lengths)
        return output.hidden_states

    def propose_from(self, sequences: Rows, features: torch.Tensor, counts: list[int]) -> DraftTree | None:
        self.root_states, self._waiting = self.first_states, [(features, counts)]
        draft = self.propose(sequences)
        self.sequences, self._waiting = None, []
        return draft


def _later(rows: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """`[batch, rows, …]` with every sequence's rows moved up by its number (down if it is negative), the ends kept."""
    if not any(numbers):
        return rows
    index = torch.arange(rows.shape[1], device=rows.device) + torch.tensor(numbers, device=rows.device)[:, None]
    return rows.gather(1, index.clamp(0, rows.shape[1] - 1)[:, :, None].expand(-1, -1, rows.shape[2]))


# ------------------------------------------------------------------------------------- for requests in flight


class SeveralMtpDrafting(FeatureDrafting):
    """Drafts with several MTP modules for requests in flight: keeps their outputs for the last token of each."""

    drafter: SeveralMtpDrafter

    def __init__(self, *args: Any, **kwargs: Any):
        self._states: dict[Request, torch.Tensor] = {}
        super().__init__(*args, **kwargs)

    def propose(self, requests: list[Request], asked: DraftRequest) -> DraftTree | None:
        self.drafter.ask(asked)
        self.drafter.first_states = self._states_of(requests)
        draft = super().propose(requests, asked)
        if draft is not None:
            self._keep(requests, self.drafter.root_states)
        return draft

    def _read_rows(
        self,
        requests: list[Request],
        tokens: torch.Tensor,
        features: torch.Tensor,
        depths: torch.Tensor,
        counts: list[int],
    ) -> None:
        self.drafter.root_states = self._states_of(requests)
        states = self.drafter.forward_features(tokens, features, depths)
        last = [min(count, tokens.shape[1]) - 1 for count in counts]
        for row, (request, place) in enumerate(zip(requests, last, strict=True)):
            if place >= 0:
                self._states[request] = states[row : row + 1, place : place + 1]

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)
        super().forget(request)

    def _states_of(self, requests: list[Request]) -> torch.Tensor | None:
        head = self.drafter.head
        size = head.config.num_modules * head.config.hidden_size
        zeros = torch.zeros(1, 1, size, device=self.drafter.device, dtype=head.dtype)
        return torch.cat([self._states.get(request, zeros) for request in requests])

    def _keep(self, requests: list[Request], states: torch.Tensor) -> None:
        self._states.update(zip(requests, states.split(1), strict=True))
