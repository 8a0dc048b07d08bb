"""Drafting with an EAGLE head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

from ..cache import TreeCache
from ..cache.blocks import BlockPool
from ..cache.paged_cache import PagedCache
from ..cache.waiting_features import WaitingFeatures
from ..eagle import EagleHead
from ..forwards.chunks import LONGEST_FORWARD, WIDTHS
from ..forwards.node_inputs import causal_chain
from ..forwards.tree_forward import TreeForward
from ..graphs import GraphPool, GraphStore
from ..graphs.paged import PagedGraphs
from ..models.structure import decoder_layers, execution_device
from ..sequences import Rows, Sequences, StepRows
from ..trees import DraftTree, DynamicTree, TokenTree, Tree, as_tree
from .base import Drafter, DraftRequest
from .captured import GrowingDraft
from .drafting import MOST_UNREAD_TOKENS, CachedDrafting, can_be_captured, nodes_of
from .growth import LevelNodes, Warp, grow
from .heads import Borrowed, ModelRefs, borrowed_lm_head, in_dtype_of


if TYPE_CHECKING:
    from ..engine.captured.rows import InFlightRows
    from ..engine.request import Request
    from ..forwards.target import TreeTarget

MOST_UNPADDED_ROWS = 16
"""Most waiting rows that are forwarded unpadded, by graphs of their exact number: steps leave so few, prompts more."""
MOST_WAITING = 4096
"""Most features that wait for a forward while speculation is off, counted as steps times rows: bounds their memory."""


class EagleDrafter(Drafter):
    """
    Drafts with an EAGLE head. Row t of the head's input pairs the target's feature of position t with the token of
    position t + 1. The head's cache keeps only rows computed from the target's own features: every step first forwards
    the newly accepted tokens with the features of the target's last forward, then grows the tree from the head's own
    hidden states, whose K/V the next step overwrites.

    Args:
        head (`EagleHead`): the head.
    """

    has_probabilities = reads_noise = True

    def __init__(self, head: EagleHead):
        self.head = head

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        return (self.head,)

    @property
    def default_tree(self) -> Tree:  # type: ignore[override]
        """
        The tree that the head's config names; else SafeAILab's dynamic tree of 60 nodes (59 draft tokens), or a
        smaller one on a CPU.
        """
        if self.head.config.default_tree is not None:
            return as_tree(self.head.config.default_tree)
        depth, top_k, num_nodes = (5, 4, 15) if self.head.device.type == "cpu" else (8, 10, 59)
        top_k = min(top_k, self.num_tokens)
        return DynamicTree(depth=depth, top_k=top_k, num_nodes=min(num_nodes, top_k + (depth - 1) * top_k**2))

    @property
    def prior(self) -> tuple[float, ...] | None:  # type: ignore[override]
        """Agreement with the target on held-out texts, by depth, as the head's config tells of its training."""
        found = (self.head.config.recipe or {}).get("held_out_top1")
        if not isinstance(found, list | tuple) or not found:
            return None
        are_rates = all(isinstance(rate, int | float) and 0.0 <= rate <= 1.0 for rate in found)
        return tuple(found) if are_rates else None

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.head.config.num_draft_tokens

    def check(self, target: PreTrainedModel, tree: TokenTree | DynamicTree) -> None:
        config, text_config = self.head.config, target.config.get_text_config(decoder=True)
        name, its_name = type(self.head).__name__, type(target).__name__
        if config.vocab_size != text_config.vocab_size:
            raise ValueError(
                f"`assistant_model`: the {name} is for a vocabulary of {config.vocab_size} tokens, but the target "
                f"{its_name} has {text_config.vocab_size}. Use a head that was trained for this target."
            )
        target_size = config.target_hidden_size or config.hidden_size
        if target_size != text_config.hidden_size:
            raise ValueError(
                f"`assistant_model`: the {name} reads hidden states of size {target_size}, but those of the target "
                f"{its_name} have {text_config.hidden_size}. Use a head that was trained for this target."
            )
        if self.head.embed_tokens is None and config.hidden_size != text_config.hidden_size:
            raise ValueError(
                f"`assistant_model`: the {name} has hidden size {config.hidden_size} and no token embeddings, but the "
                f"target's are of size {text_config.hidden_size}. Use a checkpoint that holds `embed_tokens.weight`."
            )
        if self.head.lm_head is None and config.hidden_size != text_config.hidden_size:
            raise ValueError(
                f"`assistant_model`: the {name} has hidden size {config.hidden_size} and no lm_head, but the target's "
                f"reads hidden states of size {text_config.hidden_size}. Use a head that was trained for this target."
            )
        if config.aux_boundaries(text_config.num_hidden_layers):
            decoder_layers(target)

    # ------------------------------------------------------------------------------------------------------- a call

    def for_call(self, target: PreTrainedModel) -> EagleDrafter:
        drafter: Any = super().for_call(target)
        drafter._model_refs = ModelRefs(self.head, target)
        drafter.refresh()
        return drafter

    def refresh(self) -> None:
        """Takes over changes of head and target since `for_call` made the drafter."""
        models = self._model_refs.models()
        if models is None:
            return
        target = models[1]
        self.head = in_dtype_of(*models)
        self._embedding, self._lm_head = self.head.embed_tokens, None
        if self._embedding is None:
            self._embedding = Borrowed(target.get_input_embeddings(), target.dtype)
        if self.head.lm_head is None:
            self._lm_head = borrowed_lm_head(self.head, target)

    @contextmanager
    def watching(self, target: TreeTarget) -> Iterator[None]:
        num_layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
        boundaries = self.head.config.aux_boundaries(num_layers)
        with target.watched(boundaries) as self._features:
            yield

    def take_features(self) -> torch.Tensor:
        """What forwards of the target have computed since the last time, `[batch, tokens, feature_size]`."""
        return self._features.take(execution_device(self.head), self.head.dtype)

    def start(self, sequences: Sequences, request: DraftRequest) -> None:
        self.ask(request)
        self.sequences: Any = sequences
        device = execution_device(self.head)
        features = self.take_features()
        # Tokens whose K/V was handed in with the call have no features. Inputs that are no tokens (`inputs_embeds`)
        # make one row only, which pairs their last feature with the first token.
        first = max(sequences.prompt_length - features.shape[1], -1)
        features = features[:, features.shape[1] - (sequences.prompt_length - first) :]
        visible = None
        shift = torch.full((sequences.batch_size,), first, device=device)
        if sequences.visible is not None:
            shift -= (~sequences.visible).sum(dim=1).to(device)
            visible = sequences.visible[:, max(first, 0) :].to(device)
        layers = self.head.config.text_config.num_hidden_layers
        storage = request.storage(self.head, sequences)
        cache = TreeCache(layers, sequences.batch_size, device, 2 * features.shape[1] + 256, storage)
        self.begin(cache, visible, shift, first)
        self._waiting = [(features, [features.shape[1]] * sequences.batch_size)]

    def ask(self, request: DraftRequest) -> None:
        """Sets the request for the trees that follow, with its warpers translated to the head's draft vocabulary."""
        self.target_ids = self.head.target_ids
        self.request = _in_draft_vocabulary(request, self.target_ids)

    def begin(self, cache: TreeCache, visible: torch.Tensor | None, shift: torch.Tensor, first: int) -> None:
        """
        Prepares for forwards into an empty cache; see `TreeForward` for `visible` and `shift` (`position_shift`). The
        first row pairs the feature of token `first` with the token after it.
        """
        self.device, self.cache, self.first = execution_device(self.head), cache, first
        self.forward = TreeForward(self.head, cache, visible, shift, shift_of_all=first if visible is None else None)
        self._waiting = []
        self.root_states: Any = None
        self.root_logits: Any = None

    def commit(self, paths: list[list[int] | None]) -> None:
        features = self.take_features()
        kept = [[] if path is None else [0, *path] for path in paths]
        most = max(map(len, kept))
        if kept[0] != list(range(features.shape[1])) or len(kept) > 1:
            padded = [row + [0] * (most - len(row)) for row in kept]
            nodes = torch.tensor(padded, dtype=torch.long, device=self.device)
            features = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[2]))
        self._waiting.append((features, [len(row) for row in kept]))
        if len(self._waiting) * len(paths) >= MOST_WAITING:
            self.catch_up(self.sequences)

    def wipe(self) -> None:
        self.cache.wipe()

    # ------------------------------------------------------------------------------------------------------- propose

    def propose(self, sequences: Rows) -> DraftTree | None:
        room = [sequences.room(row) for row in range(sequences.batch_size)]
        tree = self.tree_within(room)
        if tree is None:
            return None
        self.catch_up(sequences)
        self.states = self.root_states
        noise = self.request.noise(sequences.lengths, self.target_ids)
        draft = grow(tree, self.root_logits, self.run_level, max(room), self.request.warp_if_drawn, noise)
        draft = draft.in_vocabulary(self.target_ids, self.request.vocab_size)
        return draft.to(sequences.device).within(room)

    def propose_from(self, sequences: Rows, features: torch.Tensor, counts: list[int]) -> DraftTree | None:
        """
        `propose` for sequences whose features are kept elsewhere: `features` (`[batch, rows, feature_size]`), of which
        the first `counts` of every sequence have not been forwarded. Nothing is kept of them here. If it returns None,
        they have not been forwarded.
        """
        self.root_states, self._waiting = None, [(features, counts)]
        draft = self.propose(sequences)
        self.sequences, self._waiting = None, []  # requests that are over are not kept alive
        return draft

    def catch_up(self, sequences: Rows) -> None:
        """
        Forwards the rows whose features came in since the last call, and keeps hidden state and logits of every
        sequence's last row, which pairs the root's embedding with the feature before the root.
        """
        self.sequences = sequences
        if not self._waiting:
            return
        done = self.cache.lengths
        counts = [sum(counts) for counts in zip(*(counts for _, counts in self._waiting), strict=True)]
        # A sequence that ended within an accepted path has more features than tokens.
        most = [length - 1 - self.first for length in self.sequences.lengths]
        counts = [min(count, end - start) for count, end, start in zip(counts, most, done, strict=True)]
        features = self._features_in_order()
        self._waiting = []
        for start in range(0, max(counts), LONGEST_FORWARD):
            self._forward_rows(features, done, counts, start, min(start + LONGEST_FORWARD, max(counts)))

    def _features_in_order(self) -> torch.Tensor:
        """The waiting features of every sequence without gaps, `[batch, rows, feature_size]`."""
        if len(self._waiting) == 1:
            return self._waiting[0][0]
        all_features = torch.cat([features for features, _ in self._waiting], dim=1)
        places: list[list[int]] = [[] for _ in self.sequences.lengths]
        offset = 0
        for features, counts in self._waiting:
            for of_sequence, count in zip(places, counts, strict=True):
                of_sequence.extend(range(offset, offset + count))
            offset += features.shape[1]
        most = max(map(len, places))
        padded = [of_sequence + [0] * (most - len(of_sequence)) for of_sequence in places]
        index = torch.tensor(padded, dtype=torch.long, device=self.device)
        return all_features.gather(1, index[:, :, None].expand(-1, -1, all_features.shape[2]))

    def _forward_rows(self, features: torch.Tensor, done: list[int], counts: list[int], start: int, end: int) -> None:
        """
        Forwards waiting rows `start` to `end` of every sequence, which has `done` rows in the cache and `counts`
        waiting. The K/V of surplus rows, where fewer wait, lies after the rows that count.
        """
        lengths = self.sequences.lengths
        starts = [rows + self.first + 1 + start for rows in done]
        self.cache.set_lengths([rows + min(start, count) for rows, count in zip(done, counts, strict=True)])
        width = self._width(end - start)
        begins, ends = torch.tensor([starts, lengths], device=self.sequences.device)[:, :, None]
        positions = (begins + torch.arange(width, device=self.sequences.device)).minimum(ends - 1)
        tokens = self.sequences.gather(positions).to(self.device)
        features, depths = features[:, start:end], None
        if width > end - start:
            features = torch.nn.functional.pad(features, (0, 0, 0, width - (end - start)))
            depths = torch.arange(width, device=self.device).clamp(max=end - start - 1)[None]
        states = self.forward_features(tokens, features, depths)
        self.cache.set_lengths([rows + min(end, count) for rows, count in zip(done, counts, strict=True)])
        last = [count - 1 - start if start < count <= end else -1 for count in counts]
        index = torch.tensor(last, device=self.device)[:, None, None]
        root_states = states.gather(1, index.clamp(min=0).expand(-1, 1, states.shape[2]))
        if min(last) < 0 and self.root_states is not None:
            root_states = torch.where(index < 0, self.root_states, root_states)
        self.root_states = root_states
        if end == max(counts):
            self.root_logits = self.logits(root_states)[:, 0]

    def _width(self, count: int) -> int:
        """
        Rows to forward for `count` waiting ones: more than `MOST_UNPADDED_ROWS` are padded to a width with CUDA
        graphs, if it fits.
        """
        storage, forward = self.cache.storage, self.forward
        if not isinstance(storage, GraphStore) or not storage.works or count <= MOST_UNPADDED_ROWS:
            return count
        if not forward.can_be_captured or not forward.has_kernel or forward.visible is not None:
            return count
        room = storage.capacity - max(self.cache.lengths)
        return min((width for width in WIDTHS if count <= width <= room), default=count)

    def forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Hidden states `[batch, rows, H]` of consecutive rows that pair tokens (`[batch, rows]` int64) with the target's
        features before these tokens (`[batch, rows, feature_size]`); see `TreeForward` for `position_depths`.
        """
        return self._forward_features(tokens, features, position_depths).hidden_states

    def cache_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None = None
    ) -> None:
        """Writes only the K/V of rows from which nothing is drafted; see `forward_features` for the arguments."""
        self._forward_features(tokens, features, position_depths, only_cache=True)

    def _forward_features(
        self, tokens: torch.Tensor, features: torch.Tensor, position_depths: torch.Tensor | None, **options: bool
    ) -> Any:
        inputs = {"features": features, "inputs_embeds": self._embed(tokens), "logits_to_keep": None, **options}
        chain = causal_chain(tokens.shape[1], self.device)
        return self.forward(tokens, *chain, position_depths=position_depths, inputs=inputs)

    def run_level(self, nodes: LevelNodes) -> torch.Tensor:
        """Logits `[batch, queries, draft vocab]` of one level's nodes, from the states of their parents."""
        tokens = nodes.tokens if self.target_ids is None else self.target_ids[nodes.tokens]
        queries, states = tokens.shape[1], self.states
        if queries > 1 or states.shape[1] > 1:
            parents = nodes.parents[:, :, None].expand(len(tokens), -1, states.shape[2])
            states = states.gather(1, parents)
        inputs = {"hidden_states": states, "inputs_embeds": self._embed(tokens), "logits_to_keep": None}
        query_depths = nodes.node_depths[:, -queries:]
        output = self.forward(
            tokens, nodes.ancestors, query_depths, nodes.node_depths, offset=nodes.offset, inputs=inputs
        )
        self.states = output.hidden_states
        return self.logits(self.states)

    @property
    def held_rows(self) -> Any:
        """Copied rows (weight, bias) of the target's lm_head for the draft vocabulary; None if there is no copy."""
        return getattr(self._lm_head, "rows", None)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[batch, tokens, H]` in the head's dtype."""
        return self._embedding(tokens).to(self.head.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, rows, draft vocab]` of hidden states."""
        return self.head.compute_logits(states, self._lm_head)


def _in_draft_vocabulary(request: DraftRequest, target_ids: torch.Tensor | None) -> DraftRequest:
    """The request for a head with the draft vocabulary `target_ids`: warpers name columns instead of tokens."""
    if target_ids is None:
        return request
    warpers = LogitsProcessorList()
    for warper in request.warpers:
        if isinstance(warper, SuppressTokensLogitsProcessor):
            columns = torch.isin(target_ids, warper.suppress_tokens.to(target_ids.device)).nonzero()[:, 0].tolist()
            if columns:
                warpers.append(SuppressTokensLogitsProcessor(columns, device=target_ids.device))
        else:
            warpers.append(warper)
    return replace(request, warpers=warpers)


# ------------------------------------------------------------------------------------- for requests in flight


class CapturedHead(GrowingDraft):
    """
    An EAGLE head, whose cache has a row for every token but the first after the step, each read with the feature of
    the token before it. Without a tree the head only catches up.
    """

    def __init__(
        self, drafting: Any, tree: TokenTree | DynamicTree | None, rows: InFlightRows, asked: DraftRequest | None
    ):
        super().__init__(drafting, tree, rows, asked)
        drafter = self.drafter
        self._waiting = drafting.features.held[:, : rows.size.lag]
        self.held = [self.held, drafter.held_rows, getattr(drafter, "target_ids", None)]

    def propose(self, warp: Warp | None) -> DraftTree:
        rows, drafter = self.rows, self.drafter
        # For each token of a row's tail, the target's feature of the token before it.
        starts, features = rows.lengths - 1 - rows.counts, self._waiting.index_select(0, rows.places)
        if self.tree is None:
            self.read(starts, rows.tail, features)
            return DraftTree.empty(rows.size.rows, rows.device)
        self.cache.at(starts)
        states = drafter.forward_features(rows.tail, features)
        last = (rows.counts - 1)[:, None, None].expand(-1, 1, states.shape[2])
        drafter.states = states.gather(1, last)
        self.cache.at(rows.lengths - 1)
        draft = self._grown(drafter.logits(drafter.states)[:, 0], warp)
        return draft.in_vocabulary(drafter.target_ids, drafter.request.vocab_size)

    def read(
        self,
        starts: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_depths: torch.Tensor | None = None,
    ) -> None:
        """
        Lets the head read tokens with their features, without drafting from them; see `EagleDrafter.cache_features`.

        Args:
            starts (`torch.Tensor` of shape `[rows]`, int64): first slot of each row in the head's cache to write.
            tokens (`torch.Tensor` of shape `[rows, nodes]`, int64): the tokens.
            features (`torch.Tensor` of shape `[rows, nodes, size]`): features of the tokens before them.
            position_depths (`torch.Tensor` of shape `[rows, nodes]`, int64, *optional*): positions, counted from the
                first token; by default 0, 1, 2, ….
        """
        self.cache.at(starts)
        self.drafter.cache_features(tokens, features, position_depths)


class EagleDrafting(CachedDrafting):
    """
    Drafts with an EAGLE head. The head reads each prompt chunk right after the target; features of generated tokens
    wait until a tree is proposed, or until there are too many of them.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        self._max_requests = max_requests
        device = execution_device(drafter.head)
        num_layers = drafter.head.config.text_config.num_hidden_layers
        self._cache = PagedCache(num_layers, pool, device, PagedGraphs.of(drafter.head, cuda_graphs, graph_pool))
        self.attach(drafter)

    def _begin(self, drafter: Any) -> None:
        drafter.begin(self._cache, None, torch.zeros(1, dtype=torch.long, device=self._cache.device), 0)

    def refresh(self) -> None:
        self.drafter.refresh()

    def watching(self, target: TreeTarget) -> AbstractContextManager[Any]:
        return self.drafter.watching(target)

    def knows(self, request: Request) -> bool:
        return self._num_waiting(request) > 0

    def observe_prompts(self, requests: list[Request], kept: list[list[int]]) -> None:
        features, own, kept = self._take(requests, kept)
        if not own:
            return
        assert self.features is not None
        counts = [len(nodes) for nodes in kept]
        ends = [self.cache.length_of(request.table) + count for request, count in zip(own, counts, strict=True)]
        # The last feature of a prompt waits for the next token, with which it is read.
        begin = [row for row, (request, end) in enumerate(zip(own, ends, strict=True)) if end == request.length]
        self._read(own, features, kept, ends)
        if begin:
            last = torch.tensor([kept[row][-1] for row in begin], device=features.device)
            rows = torch.tensor(begin, device=features.device)
            self.features.put([own[row] for row in begin], features[rows, last][:, None], [1] * len(begin))

    def observe(self, requests: list[Request], kept: list[list[int]], features: torch.Tensor | None = None) -> None:
        assert features is None  # captured steps write features to the store themselves
        taken, own, kept = self._take(requests, kept)
        if not own:
            return
        store: Any = self.features
        nodes, size = nodes_of(taken, kept), store.capacity // 2
        for start in range(0, nodes.shape[1], size):
            rows = [row for row, kept_nodes in enumerate(kept) if len(kept_nodes) > start]
            counts = [min(len(kept[row]) - start, size) for row in rows]
            these = [own[row] for row in rows]
            self.make_room(these, max(counts))
            store.put(these, nodes[rows, start : start + size], counts)

    def _take(
        self, requests: list[Request], kept: list[list[int]]
    ) -> tuple[torch.Tensor, list[Request], list[list[int]]]:
        """
        Takes the recorded features of the target for the requests that speculate and keep nodes: the features `[rows,
        nodes, size]`, these requests, and their kept nodes.
        """
        features = self.drafter.take_features()
        if self.features is None:
            most = min(self._max_requests, self.cache.pool.num_blocks)  # each has a block at least
            size, dtype = features.shape[2], self.drafter.head.dtype
            capacity = WaitingFeatures.capacity_for(self._max_requests, size * dtype.itemsize)
            self.features = WaitingFeatures(most, size, self.drafter.device, dtype, capacity)
        rows = [
            row
            for row, (request, nodes) in enumerate(zip(requests, kept, strict=True))
            if nodes and request.options.plan is not None
        ]
        if len(rows) < len(requests):
            features = features[rows]
        return features, [requests[row] for row in rows], [kept[row] for row in rows]

    def propose(self, requests: list[Request], asked: DraftRequest) -> DraftTree | None:
        self.drafter.ask(asked)
        self.catch_up(requests, MOST_UNREAD_TOKENS)
        counts = self.lags(requests)
        assert self.features is not None
        self.cache.seat([request.table for request in requests])
        rows = StepRows(requests, self.drafter.device, self.cache.lengths)
        draft = self.drafter.propose_from(rows, self.features.of(requests, max(counts)), counts)
        if draft is not None:
            for request in requests:
                self.features.set_count(request, 0)
        return draft

    def _num_waiting(self, request: Request) -> int:
        return 0 if self.features is None else self.features.count(request)

    def _read_waiting(self, requests: list[Request]) -> None:
        """Lets the head read all waiting features of some requests but the last, which stays for the next tree."""
        if not requests:
            return
        assert self.features is not None
        counts = [self._num_waiting(request) for request in requests]
        ends = [self.cache.length_of(request.table) + count for request, count in zip(requests, counts, strict=True)]
        features = self.features.of(requests, self.features.width_for(max(counts)))
        self._read(requests, features, [list(range(count)) for count in counts], [end - 1 for end in ends])
        self.features.keep_last(requests)

    def _read(self, requests: list[Request], features: torch.Tensor, nodes: list[list[int]], ends: list[int]) -> None:
        """
        Forwards features (`[batch, width, size]`) through the head, each with the token after it. `nodes` are the
        consecutive new nodes of each request. Afterwards the head's cache has `ends` rows of a request, but at most
        one fewer than its text has tokens, because no token is after the last one.
        """
        width, device = features.shape[1], self.drafter.device
        starts = [self.cache.length_of(request.table) - new[0] for request, new in zip(requests, nodes, strict=True)]
        last = torch.tensor([new[-1] for new in nodes], device=device)[:, None]
        depths = torch.arange(width, device=device).minimum(last)
        parts = [
            request.tokens[start + 1 : start + 1 + width] for request, start in zip(requests, starts, strict=True)
        ]
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=device)
        self.cache.seat([request.table for request in requests])
        for first in range(0, width, LONGEST_FORWARD):
            self.cache.set_lengths([start + first for start in starts])
            piece = slice(first, first + LONGEST_FORWARD)
            self.drafter.cache_features(tokens[:, piece], features[:, piece], depths[:, piece] - first)
        self.cache.set_lengths([min(end, request.length - 1) for end, request in zip(ends, requests, strict=True)])

    def forget(self, request: Request) -> None:
        if self.features is not None:
            self.features.forget(request)
        self.cache.forget(request.table)

    # ----------------------------------------------------------------- in steps that run on the device as a whole

    captured_draft = CapturedHead
    most_levels = WaitingFeatures.LEAST_CAPACITY - 2  # beside a waiting feature, the root's and one per level

    @property
    def can_be_captured(self) -> bool:
        return type(self.drafter) is EagleDrafter and can_be_captured(self.drafter.forward)

    def catch_up(self, requests: list[Request], most: int) -> None:
        self._read_waiting([request for request in requests if self._num_waiting(request) > most])

    def lags(self, requests: list[Request]) -> list[int]:
        return [self._num_waiting(request) for request in requests]

    def make_room(self, requests: list[Request], count: int) -> None:
        store = self.features
        if store is not None and max(store.counts(requests), default=0) + count > store.capacity:
            most = min(store.capacity // 2, store.capacity - count)  # rows that will soon be full catch up as well
            self._read_waiting([request for request in requests if store.count(request) > most])

    def note_features(self, requests: list[Request], counts: list[int]) -> None:
        store: Any = self.features  # requests that do not speculate have no place in it
        store.add(requests, counts)

    def note_read(self, requests: list[Request], ends: list[int]) -> None:
        for request, end in zip(requests, ends, strict=True):
            if request.options.plan is not None:
                self.cache.note_length(request.table, min(end, request.length - 1))
                if end == request.length and self.features is not None:
                    self.features.set_count(request, 1)

    def note_proposed(self, requests: list[Request]) -> None:
        assert self.features is not None
        for request in requests:
            self.features.set_count(request, 0)
            self.cache.note_length(request.table, request.length - 1)
