"""Drafting with a smaller language model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache import TreeCache
from ..cache.blocks import BlockPool
from ..cache.paged_cache import PagedCache
from ..cache.sizes import num_cached_layers
from ..forwards.chunks import LONGEST_FORWARD
from ..forwards.node_inputs import causal_chain
from ..forwards.tree_forward import TreeForward
from ..forwards.vocabulary import ForwardOfShared, SharedVocabulary
from ..graphs import GraphPool
from ..graphs.paged import PagedGraphs
from ..models.encoders import encoder_arguments
from ..models.positions import num_positions, said_positions
from ..models.structure import execution_device, num_decoder_layers
from ..sequences import Rows, Sequences, StepRows
from ..states import layer_kinds_of
from ..states.kernel import MOST_NODES
from ..trees import DraftTree, DynamicTree, TokenTree
from .base import CachedDrafter
from .captured import GrowingDraft
from .drafting import MOST_UNREAD_TOKENS, CachedDrafting
from .growth import LevelNodes, RereadNodes, Warp, grow, num_forwarded
from .request import DraftRequest


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
    from ..engine.request import Request

MOST_TOKENS = 8192
"""Most tokens of all rows, padding included, that a draft model forwards at once when it catches up."""
MOST_WITH_LOGITS = 64
"""Most unread tokens per row in a forward of rows of different lengths, which computes the logits of all tokens."""


class DraftModelDrafter(CachedDrafter):
    """
    Drafts with a causal language model, by raw forwards. The first forward of a step takes all tokens accepted in the
    last step and the new root at once, so that the draft's cache never misses the bonus token; each deeper level is
    one more forward.

    Args:
        model (`PreTrainedModel`): the draft model; it may be the target itself.
    """

    has_probabilities = reads_noise = runs_in_graphs = True
    default_tree = TokenTree.chain(5)
    shared: SharedVocabulary | None = None
    """What the draft shares with the target of a call, if their vocabularies are padded to different sizes."""
    reads: dict[str, Any] = {}
    """Keyword arguments of every forward by which the draft reads an encoder."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.model.config.get_text_config(decoder=True).vocab_size

    def check_vocabulary(self, target: PreTrainedModel) -> None:
        """Raises a `ValueError` for a target of another vocabulary."""
        SharedVocabulary.of(self.model, target)

    def for_call(self, target: PreTrainedModel) -> Self:
        drafter = super().for_call(target)
        drafter.shared = SharedVocabulary.of(self.model, target)
        return drafter

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return (self.model,)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        super().start(sequences, request)
        device = execution_device(self.model)
        visible = None if sequences.visible is None else sequences.visible.to(device)
        shift = torch.zeros(sequences.batch_size, dtype=torch.long, device=device)
        if visible is not None:
            shift = visible.sum(dim=1) - visible.shape[1]
        self.reads = encoder_arguments(self.model, request.encoder)
        capacity = 2 * sequences.prompt_length + 256
        storage = request.storage(self.model, sequences, self.most_slots(request.plan))
        kinds = layer_kinds_of(self.model)
        layers = num_decoder_layers(self.model)
        self.begin(TreeCache(layers, sequences.batch_size, device, capacity, storage, kinds), visible, shift)
        if sequences.prompt_length > 0:
            self._prefill(sequences, visible)

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor) -> None:
        """
        Prepares for forwards into an empty cache; see `TreeForward` for `visible` and `shift` (`position_shift`).
        """
        self.device, self.cache = execution_device(self.model), cache
        # Without a table, those of the config: drafts past them are worth little, and the model may refuse them.
        known = num_positions(self.model)
        self.max_positions = said_positions(self.model) if known is None else known
        max_position = None if self.max_positions is None else self.max_positions - 1
        is_padded = visible is not None
        self._shift = shift.tolist() if is_padded else None
        kind: type[TreeForward] = TreeForward if self.shared is None else ForwardOfShared
        self.reread = RereadNodes()
        self.forward = kind(
            self.model,
            cache,
            visible,
            shift,
            model_kwargs=self.reads,
            max_position=max_position,
            shift_of_all=None if is_padded else 0,
            encoder_cache=DynamicCache() if self.reads else None,
        )
        if self.shared is not None and isinstance(self.forward, ForwardOfShared):
            self.forward.vocabulary = self.shared

    def _prefill(self, sequences: Sequences, visible: torch.Tensor | None) -> None:
        """Lets the model read the prompts."""
        ids = sequences.columns(sequences.prompt_length).contiguous().to(self.device)
        length = ids.shape[1]
        if self.shared is not None:
            ids = self.shared.readable(ids)
        if visible is None:
            positions = torch.arange(length, device=self.device).expand(ids.shape)
        else:
            positions = (visible.long().cumsum(dim=1) - 1).clamp(min=0)
        if self.forward.max_position is not None:
            positions = positions.clamp(max=self.forward.max_position)
        self.forward.prefill(ids, positions, visible, self.request.prefill_chunk_size)

    def wipe(self) -> None:
        self.cache.wipe()

    # ------------------------------------------------------------------------------------------------------- propose

    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [self._room(sequences, row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        self.catch_up(sequences)
        return self._grown(tree, sequences, room)

    def _grown(self, tree: TokenTree | DynamicTree, sequences: Rows, room: list[int]) -> DraftTree | None:
        """The tree of every row, after `catch_up`."""
        noise = self.request.noise(sequences.lengths)
        limits = self.request.limits(sequences)
        draft = grow(tree, self.root_logits, self.run_level, max(room), self.request.warp_if_drawn, noise, limits)
        draft = draft.to(sequences.device).within(room)
        if self.shared is None or not self.shared.draft_lacks_some:
            return draft
        last = torch.tensor(sequences.lengths, device=sequences.device)[:, None] - 1
        return self.after_known(draft, sequences.gather(last))

    def after_known(self, draft: DraftTree, roots: torch.Tensor) -> DraftTree:
        """The draft without nodes in rows whose root (`roots`, `[batch, 1]`, int64) the draft model does not have."""
        shared = self.shared
        return draft if shared is None or not shared.draft_lacks_some else draft.where(shared.known(roots))

    def _room(self, sequences: Rows, row: int) -> int:
        """Levels of draft tokens that a row can use, within its room and the positions that the draft model knows."""
        room = sequences.room(row)
        if self.max_positions is None:
            return room
        shift = 0 if self._shift is None else self._shift[row]
        return min(room, self.max_positions - 1 - (sequences.lengths[row] - 1 + shift))

    def catch_up(self, sequences: Rows) -> None:
        """
        Forwards the tokens of every row that are not yet cached, up to the root; keeps the root's logits,
        `[batch, vocab]`.
        """
        lengths, before = sequences.lengths, self.cache.lengths
        # A row that did not grow forwards its root again.
        seen = [min(cached, length - 1) for cached, length in zip(before, lengths, strict=True)]
        counts = [length - start for start, length in zip(seen, lengths, strict=True)]
        while max(counts) > (LONGEST_FORWARD if min(counts) == max(counts) else MOST_WITH_LOGITS):
            seen = self.read_chunk(sequences, seen)
            counts = [length - start for start, length in zip(seen, lengths, strict=True)]
        uniform = min(counts) == max(counts)
        # States have followed a root that is forwarded again, as keys and values may be written again.
        new = [0 if cached == length else count for cached, length, count in zip(before, lengths, counts, strict=True)]
        logits = self.forward_from(sequences, seen, max(counts), new, logits_to_keep=1 if uniform else 0)
        self.cache.set_lengths(lengths)
        if uniform:
            self.root_logits = logits[:, -1]
        else:
            last = torch.tensor(counts, device=self.device) - 1
            self.root_logits = logits[torch.arange(len(counts), device=self.device), last]

    def read_chunk(self, sequences: Rows, starts: list[int], widths: Sequence[int] = ()) -> list[int]:
        """
        Reads the next tokens of every row before its root, at most `LONGEST_FORWARD`, from `starts` on; returns where
        each row stands then. A forward is padded to the first of `widths` that is no narrower.
        """
        lengths = sequences.lengths
        ends = [min(start + LONGEST_FORWARD, length - 1) for start, length in zip(starts, lengths, strict=True)]
        new = [end - start for start, end in zip(starts, ends, strict=True)]
        most = max(new)
        width = min((width for width in widths if width >= most), default=most)
        self.forward_from(sequences, starts, width, new, logits_to_keep=1)
        return ends

    def forward_from(
        self, sequences: Rows, starts: list[int], count: int, new: list[int], logits_to_keep: int
    ) -> torch.Tensor:
        """
        Logits of a forward of `count` tokens per row, from its place in `starts` on, of which the first `new` of each
        row have not been read. Where a row ends before, copies of its root follow. What is read enters the states.
        """
        lengths = sequences.lengths
        if min(lengths) == max(lengths) == min(starts) + count == max(starts) + count:
            tokens = sequences.last_tokens(count)
        else:
            first, end = (torch.tensor(values, device=sequences.device)[:, None] for values in (starts, lengths))
            tokens = sequences.gather(torch.minimum(first + torch.arange(count, device=sequences.device), end - 1))
        self.cache.set_lengths(starts)
        chain, tokens = causal_chain(count, self.device), tokens.to(self.device)
        if self.forward.has_state_kernels and count <= MOST_NODES:
            logits = self.forward(tokens, *chain, logits_to_keep=logits_to_keep).logits
            self.cache.keep_chain(new)
            return logits
        logits = self.forward(tokens, *chain, logits_to_keep=logits_to_keep, counts=new).logits
        if self.cache.state_layers:
            self.cache.settle_text()
        return logits

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, vocab]` of one level's nodes."""
        queries = nodes.tokens.shape[1]
        if self.forward.has_state_kernels:
            nodes = self.reread.with_level(nodes)
        depths = nodes.node_depths[:, -nodes.tokens.shape[1] :]
        found = self.forward(nodes.tokens, nodes.ancestors, depths, nodes.node_depths, offset=nodes.offset).logits
        return found[:, -queries:]


# ------------------------------------------------------------------------------------- for requests in flight


class CapturedDraftModel(GrowingDraft):
    """A draft model, whose cache has all tokens after the step, root included."""

    drafter: DraftModelDrafter

    def __init__(
        self,
        drafting: DraftModelDrafting,
        tree: TokenTree | DynamicTree | None,
        rows: InFlightRows,
        draft_request: DraftRequest | None,
    ):
        super().__init__(drafting, tree, rows, draft_request)
        self.cache.note_static(self.chain[0])
        is_static = isinstance(self.tree, TokenTree)
        self.drafter.reread = RereadNodes(self.cache.note_static if is_static else None)

    def propose(self, warp: Warp | None) -> DraftTree:
        rows = self.rows
        self.cache.at(rows.lengths - rows.counts)
        self.cache.max_depth = rows.size.lag - 1
        logits = self.drafter.forward(rows.tail, *self.chain).logits
        self.cache.keep_chain(rows.counts)
        self.cache.max_depth = None if self.tree is None else max(self.tree.depth - 2, 0)
        self.cache.at(rows.lengths)
        last = torch.arange(len(logits), device=logits.device), rows.counts - 1
        return self.drafter.after_known(self._grown(logits[last], warp), rows.tail[last][:, None])


class DraftModelDrafting(CachedDrafting):
    """Drafts with a draft model. Tokens that are not in its cache yet are forwarded when a tree is proposed."""

    drafter: DraftModelDrafter

    def __init__(
        self,
        drafter: DraftModelDrafter,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        graphs = PagedGraphs.of(drafter.model, cuda_graphs, graph_pool)
        device, kinds = execution_device(drafter.model), layer_kinds_of(drafter.model)
        self.cache = PagedCache(num_cached_layers(drafter.model), pool, device, graphs, kinds, max_requests)
        self.attach(drafter)

    def _begin(self) -> None:
        self.drafter.begin(self.cache, None, torch.zeros(1, dtype=torch.long, device=self.cache.device))

    def propose(self, requests: list[Request], draft_request: DraftRequest) -> DraftTree | None:
        self.drafter.ask(draft_request)
        self.catch_up(requests, MOST_UNREAD_TOKENS)
        self.cache.seat([request.table for request in requests])
        starts = [min(seen, request.length - 1) for seen, request in zip(self.cache.lengths, requests, strict=True)]
        return self.drafter.propose(StepRows(requests, self.drafter.device, starts))

    def _read(self, requests: list[Request]) -> None:
        """Forwards all tokens of some requests that the draft has not read, except the roots."""
        while left := [request for request in requests if self.cache.length_of(request.table) < request.length - 1]:
            own = _fitting(left, [request.length - 1 - self.cache.length_of(request.table) for request in left])
            self.cache.seat([request.table for request in own])
            starts, graphs = self.cache.lengths, self.cache.graphs
            widths = graphs.prompt_widths if graphs is not None and graphs.works else ()
            self.cache.set_lengths(self.drafter.read_chunk(StepRows(own, self.drafter.device, starts), starts, widths))

    def forget(self, request: Request) -> None:
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    captured_draft = CapturedDraftModel

    def can_grow(self, tree: TokenTree | DynamicTree) -> bool:
        return not self.cache.state_layers or num_forwarded(tree) <= MOST_NODES

    def room(self, request: Request) -> int:
        most = self.drafter.max_positions
        return request.room if most is None else min(request.room, most - request.length)

    def catch_up(self, requests: list[Request], most: int) -> None:
        self._read([request for request in requests if request.length - self.cache.length_of(request.table) > most])

    def lags(self, requests: list[Request]) -> list[int]:
        return [request.length - min(self.cache.length_of(request.table), request.length - 1) for request in requests]

    def note_proposed(self, requests: list[Request]) -> None:
        for request in requests:
            self.cache.note_length(request.table, request.length)

    def note_dropped(self, requests: list[Request]) -> None:
        self.note_proposed(requests)  # the tokens that were read are of the texts


def _fitting(requests: list[Request], counts: list[int]) -> list[Request]:
    """The first requests, of `counts` tokens each, that padded to the longest fit into a forward of `MOST_TOKENS`."""
    longest = 0
    for number, count in enumerate(counts):
        longest = max(longest, min(count, LONGEST_FORWARD))
        if number > 0 and (number + 1) * longest > MOST_TOKENS:
            return requests[:number]
    return requests
