"""Drafting with several MTP modules of the target in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..cache.block_ends import BlockEnds
from ..cache.pending_features import PendingFeatures
from ..forwards.node_inputs import causal_chain
from ..mtp import MtpHead
from ..trees import DraftTree, DynamicTree, TokenTree
from .drafting import MOST_UNREAD_TOKENS, nodes_of
from .features import CapturedFeatures, FeatureDrafting
from .growth import LevelNodes
from .mtp import MtpDrafter
from .request import DraftRequest


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
    from ..engine.request import Request


class SeveralMtpDrafter(MtpDrafter):
    """
    Drafts with several MTP modules. Row t of module k holds the output of module k - 1 in row t (the target's feature
    for module 0) and the token of position t + 1 + k, so a token is in row t + k of module 0 and in row t of module k:
    the cache of module k is k rows behind. Level k of a tree is drafted by module k, and those below the last module's
    by all modules in turn, over all nodes of the path that the module has not read.

    Args:
        head (`MtpHead`): the modules.
    """

    runs_in_graphs = True

    @property
    def tokens_ahead(self) -> int:
        # Those that the last slots of a block have in the last module, which is read behind the others.
        return self.head.config.num_modules

    block_ends: BlockEnds | None = None
    """Where the outputs of all modules are kept for the last slot of every block; None: nowhere."""

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
            missing, rows, own_tokens = self._missing(module), inputs, tokens
            if missing is not None:
                rows, own_tokens = _later(inputs, missing), _later(tokens[:, :, None], missing)[:, :, 0]
            states = self._run(module, own_tokens, rows, *chain, position_depths=position_depths)
            outputs.append(states if missing is None else _later(states, -missing))
        of_all = torch.cat(outputs, dim=2)
        if self.block_ends is not None:
            self.block_ends.write(self.forward.cache, of_all)
        return of_all

    def _missing(self, module: int) -> torch.Tensor | None:
        """How many of a module's next rows are before the text's first, `[batch]`; None if the host knows of none."""
        cache = self.forward.cache
        if not cache.is_on_device and min(cache.lengths) >= module:
            return None
        return (module - cache.lengths_tensor.to(self.device)).clamp(min=0)

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
        inputs = {"hidden_states": states, "inputs_embeds": self._embed(tokens), "module_index": module}
        options["inputs"] = inputs | {"logits_to_keep": None}
        with self.forward.cache.behind(module):
            return self.forward(tokens, *nodes, **options).hidden_states


def mtp_drafter(head: MtpHead) -> MtpDrafter:
    """The drafter for a head of one module or several."""
    return (MtpDrafter if head.config.num_modules == 1 else SeveralMtpDrafter)(head)


def _later(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`[batch, rows, …]` with every sequence's rows moved up by its number (down if it is negative), the ends kept."""
    index = torch.arange(rows.shape[1], device=rows.device) + numbers[:, None]
    return rows.gather(1, index.clamp(0, rows.shape[1] - 1)[:, :, None].expand(-1, -1, rows.shape[2]))


# ------------------------------------------------------------------------------------- for requests in flight


class CapturedSeveralMtp(CapturedFeatures):
    """Several MTP modules in a captured step: the outputs for the last token of every row stay on the device."""

    drafter: SeveralMtpDrafter

    def __init__(
        self,
        drafting: SeveralMtpDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        super().__init__(drafting, tree, rows, draft_request)
        self._outputs = drafting.outputs

    def read_rows(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, *depths: torch.Tensor | None
    ) -> torch.Tensor | None:
        rows, drafter = self.rows, self.drafter
        drafter.root_states = self._outputs.index_select(0, rows.places)[:, None]
        states = super().read_rows(tokens, features, counts, *depths)
        assert states is not None  # all modules' outputs
        is_read = (counts > 0) & (rows.slot_steps == 0) & (rows.places != PendingFeatures.DUMMY)
        places = torch.where(is_read, rows.places, PendingFeatures.TRASH)
        self._outputs.index_copy_(0, places, states[:, 0])
        return states

    def cache_rows(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: torch.Tensor, *depths: torch.Tensor | None
    ) -> None:
        self.read_rows(tokens, features, counts, *depths)


class SeveralMtpDrafting(FeatureDrafting):
    """Drafts with several MTP modules for requests in flight: keeps their outputs for the last token of each."""

    drafter: SeveralMtpDrafter
    captured_draft = CapturedSeveralMtp
    outputs: torch.Tensor
    """Outputs of all modules for the last token of every place in `features`, `[places, modules · H]`."""
    _keeps_block_ends = False
    block_ends: BlockEnds | None = None

    def make_store(self) -> None:
        if self.features is None:
            super().make_store()
            assert self.features is not None
            held = self.features.held
            self.outputs = held.new_zeros(len(held), self.drafter.head.config.size_between_steps)
            if self._keeps_block_ends:
                self.block_ends = self.drafter.block_ends = BlockEnds(self.cache.pool, self.outputs)

    def keep_block_ends(self) -> None:
        self._keeps_block_ends = True

    def _begin(self) -> None:
        super()._begin()
        self.drafter.block_ends = self.block_ends

    def take_prefix(self, request: Request, length: int) -> None:
        super().take_prefix(request, length)
        if length and request.options.plan is not None:
            assert self.block_ends is not None  # another request has read the blocks
            block = request.table.blocks[length // self.cache.pool.block_size - 1]
            self.outputs[self._places([request])] = self.block_ends.held[block]

    def _places(self, requests: list[Request]) -> torch.Tensor:
        assert self.features is not None
        return self.features.places(requests)

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        places = self._places(requests)
        self.drafter.ask(draft_request)
        self.catch_up(requests, MOST_UNREAD_TOKENS)
        self.drafter.first_states = self.outputs[places][:, None]
        draft = super().propose(requests, draft_request)
        if draft is not None:
            self.outputs[places] = self.drafter.root_states[:, 0]
        return draft

    def _read(self, requests: list[Request], features: torch.Tensor, nodes: list[list[int]], ends: list[int]) -> None:
        # What has been read is not read again: the outputs before it are gone.
        super()._read(requests, nodes_of(features, nodes), [list(range(len(new))) for new in nodes], ends)

    def _read_rows(
        self,
        requests: list[Request],
        tokens: torch.Tensor,
        features: torch.Tensor,
        depths: torch.Tensor,
        counts: list[int],
    ) -> None:
        places = self._places(requests)
        self.drafter.root_states = self.outputs[places][:, None]
        states = self.drafter.forward_features(tokens, features, depths)
        last = torch.tensor([min(count, tokens.shape[1]) - 1 for count in counts], device=places.device)
        own = states[torch.arange(len(states), device=places.device), last.clamp(min=0)]
        self.outputs[places] = torch.where(last[:, None] < 0, self.outputs[places], own)
