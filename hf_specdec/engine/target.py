"""The target of requests in flight: prefill and scoring forwards over the requests of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ..adapters import RequestAdapters
from ..cache import TreeCache
from ..cache.blocks import BlockPool
from ..cache.paged_cache import PagedCache
from ..cache.row_copies import copy_row, copy_start
from ..cache.sizes import num_cached_layers
from ..forwards.chunks import MOST_PADDED
from ..forwards.features import Features
from ..forwards.target import TreeTarget
from ..forwards.tree_forward import TreeForward
from ..forwards.whole_prompt import continues_alike, read_whole, shift_after
from ..graphs import GraphPool
from ..graphs.paged import PagedGraphs
from ..graphs.sizes import next_size
from ..models.own_positions import preparation_of
from ..models.positions import last_position, may_refuse
from ..models.structure import execution_device
from ..ranks import Ranks
from ..states import layer_kinds_of
from ..trees import DraftTree
from ..uploads import on_device
from .prompt_inputs import Content, PromptInputs, is_by_token
from .request import Request
from .scheduler import Chunk


class InFlightTarget(TreeTarget):
    """
    The target with its paged K/V cache.

    Args:
        model (`PreTrainedModel`): the target.
        pool (`BlockPool`): the blocks of its K/V.
        max_requests (`int`): most requests that run at once.
        cuda_graphs (`bool` or `"auto"`): see `SpeculativeConfig`.
        graph_pool (`GraphPool`, *optional*): memory shared with the CUDA graphs of other models.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: BlockPool,
        max_requests: int,
        cuda_graphs: bool | Literal["auto"] = False,
        graph_pool: GraphPool | None = None,
    ):
        super().__init__(model)
        self.device = execution_device(model)
        graphs, kinds = PagedGraphs.of(model, cuda_graphs, graph_pool), layer_kinds_of(model)
        self.cache = PagedCache(num_cached_layers(model), pool, self.device, graphs, kinds, max_requests)
        shift = torch.full((1,), preparation_of(model).first_position or 0, device=self.device)
        self.forward = TreeForward(model, self.cache, None, shift, max_position=last_position(model))
        self._shift_of_texts, self._are_shifted = shift, False
        self.adapters = RequestAdapters(model, self.device, next_size(max_requests), graphs is not None)
        self.forward.adapters = self.adapters.of_seated

    def widths(self) -> tuple[int, ...]:
        """Chunk widths in tokens for which there are CUDA graphs, rising; empty without graphs."""
        graphs = self.cache.graphs
        forward = self.forward
        can_run = forward.can_be_captured and forward.has_kernel and forward.takes_positions
        can_run = can_run and not self.cache.state_layers  # a text must be read once
        return graphs.prompt_widths if graphs is not None and graphs.works and can_run else ()

    def seat(self, requests: list[Request]) -> None:
        """Makes requests the rows of the next forwards."""
        self.cache.seat([request.table for request in requests])
        self.adapters.seat([request.adapter for request in requests])
        are_shifted = any(request.position_shift is not None for request in requests)
        if are_shifted or self._are_shifted:
            self.forward.shift_positions(self._shifts_of(requests) if are_shifted else self._shift_of_texts)
            self._are_shifted = are_shifted

    def _shifts_of(self, requests: list[Request]) -> torch.Tensor:
        """The position shifts of requests, `[…, batch]`, with as many leading dimensions as any of them has."""
        of_texts = self._shift_of_texts.cpu()
        shifts = [of_texts if request.position_shift is None else request.position_shift for request in requests]
        shape = torch.broadcast_shapes(*(shift.shape for shift in shifts))
        return torch.cat([shift.expand(shape) for shift in shifts], dim=-1).to(self.device)

    def read(self, chunk: Chunk) -> torch.Tensor:
        """Forwards a prefill chunk. Returns the logits at the last token of every row, `[batch, vocab]`."""
        self.seat(chunk.requests)
        if chunk.is_whole:
            return self._read_whole(chunk.requests, chunk.counts)
        starts, counts = self.cache.lengths, chunk.counts
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        is_padded = self._is_padded(chunk)
        firsts = starts if is_padded else [end - (chunk.width or 0) for end in ends]
        parts = [request.tokens[s:e] for request, s, e in zip(chunk.requests, firsts, ends, strict=True)]
        most = max(map(len, parts))
        tokens = on_device([part + [0] * (most - len(part)) for part in parts], self.device)
        if not is_padded:
            return self.read_chunk(tokens, ends).logits[:, -1]
        left = [max(len(request.prompt) - start, 0) for request, start in zip(chunk.requests, starts, strict=True)]
        # Prompts of all lengths share a graph, which returns all logits.
        widths = [width for width in self.widths()[:1] if most <= width and len(parts) * width <= MOST_PADDED]
        return self.read_padded(tokens, counts, list(map(min, left, counts)), *widths).logits[:, -1]

    def _read_whole(self, requests: list[Request], counts: list[int]) -> torch.Tensor:
        """
        Reads prompts with their inputs into a cache of their own, and copies its rows into the requests' blocks. One
        request may have the text before its images, and leave text behind them.
        """
        inputs, num_held = requests[0].inputs, self.cache.lengths[0]
        assert inputs is not None
        length, of_prompts = num_held + max(counts), [len(request.prompt) for request in requests]
        padding = [max(of_prompts) - own for own in of_prompts]
        tokens = torch.tensor([requests[0].prompt], device=self.device) if inputs.tokens is None else inputs.tokens
        tokens, is_cut = tokens[:, :length], length < max(of_prompts)
        with self.adapters.of_seated(len(tokens), tokens.shape[1], False):  # it may encode images
            number = 0 if inputs.content is None else inputs.content.num_held(num_held)
            if number and inputs.prepare_more is not None:
                config, model_kwargs = inputs.prepare_more(inputs.values, number, num_held, length)
            else:
                config, model_kwargs = inputs.prepare(inputs.values, length if is_cut else None)
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        cache = TreeCache(layers, len(requests), self.device, capacity=length, kinds=layer_kinds_of(self.model))
        if num_held:
            copy_start(self.cache, num_held, cache)
        with self.running(), self.adapters.of_seated(len(tokens), tokens.shape[1], False):
            outputs = read_whole(self.model, cache, tokens, config, model_kwargs, self.features is not None)
        if cache.lengths[0] != length:
            raise ValueError(
                f"`model_inputs`: {type(self.model).__name__} caches {cache.lengths[0]} positions for the prompt of "
                f"{length} tokens; `generate_batch` and its manager need one for each token. Use `generate`."
            )
        left = torch.tensor(padding, device="cpu")
        visible = torch.arange(length, device="cpu") >= left[:, None]
        shifts = shift_after(self.model, model_kwargs, visible.to(self.device), cache).cpu()
        shifts += preparation_of(self.model).added + left
        of_texts = self._shift_of_texts.cpu()
        for row, (request, first) in enumerate(zip(requests, padding, strict=True)):
            shift = shifts[..., row : row + 1]
            request.position_shift = None if bool((shift == of_texts).all()) else shift
            self.seat([request])
            copy_row(cache, row, first, self.cache, num_held)
        self.seat(requests)
        if self.features is not None and any(padding):
            self.features.drop_padding(padding)
        logits = outputs.logits[:, -1]
        if inputs.content is not None and len(requests) == 1:
            requests[0].shifts_between = self._shifts_between(inputs.content, model_kwargs, cache)
            self._try_cuts(inputs, inputs.content, cache, tokens, config, model_kwargs)
        return logits

    def _try_cuts(
        self,
        inputs: PromptInputs,
        content: Content,
        cache: TreeCache,
        tokens: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Finds out by the first prompts, which were read into `cache`, whether they may be read in parts."""
        leads, num_tokens, least = inputs.leads, tokens.shape[1], Ranks.of(self.model).least
        if leads.work is None and inputs.has_lead:
            start = content.first, inputs.prepare_start
            with self.adapters.of_seated(1, num_tokens, False):
                works = continues_alike(self.model, cache, *start, tokens, config, model_kwargs)
            leads.work = least(int(works)) == 1
        if leads.end is None and num_tokens > content.end:
            with self.adapters.of_seated(1, content.end, False):
                leads.end = least(int(self._ends_alike(inputs, content.end, cache, tokens, config, model_kwargs))) == 1
        if leads.more is None and content.parts:
            leads.more = least(int(self._continues_alike(inputs, content, cache, tokens))) == 1

    def _shifts_between(
        self, content: Content, model_kwargs: dict[str, Any], cache: TreeCache
    ) -> list[torch.Tensor | None]:
        """The position shifts behind each image but the last; see `Request.shifts_between`."""
        found, of_texts = list[torch.Tensor | None](), self._shift_of_texts.cpu()
        for part in content.parts[:-1]:
            end = part.end + 1  # with the first token behind it
            own = {name: value[..., :end] for name, value in model_kwargs.items() if name == "position_ids"}
            shift = shift_after(self.model, own, None, cache, end).cpu() + preparation_of(self.model).added
            found.append(None if bool((shift == of_texts).all()) else shift)
        return found

    def _continues_alike(self, inputs: PromptInputs, content: Content, cache: TreeCache, tokens: torch.Tensor) -> bool:
        """Whether the model reads the second image behind the first, which `cache` holds, as together with it."""
        first, end, prepare = content.parts[1].first, tokens.shape[1], inputs.prepare_more
        if prepare is None:
            return False
        with self.adapters.of_seated(1, end, False):
            try:
                config, model_kwargs = prepare(inputs.values, 1, first, end)
            except Exception:  # noqa: BLE001  (such as positions that need all images)
                return False
            start = first, lambda length: prepare(inputs.values, 0, 0, length, 1)
            return continues_alike(self.model, cache, *start, tokens, config, model_kwargs)

    def _ends_alike(
        self,
        inputs: PromptInputs,
        end: int,
        cache: TreeCache,
        tokens: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> bool:
        """
        Whether the model makes of the first tokens of a prompt, and of the text behind them, what it has made of all,
        which `cache` holds.
        """
        try:
            start = inputs.prepare(inputs.values, end)
        except Exception:  # noqa: BLE001  (such as inputs that go with all tokens)
            return False
        shift = shift_after(self.model, start[1], None, cache, end)
        if not torch.equal(shift, shift_after(self.model, model_kwargs, None, cache)):
            return False
        num_tokens = tokens.shape[1]
        images = {name for name, value in inputs.values.items() if not is_by_token(value, num_tokens)}
        of_text = {name: value for name, value in model_kwargs.items() if name not in images | {"mm_encoder_outputs"}}
        return continues_alike(self.model, cache, end, lambda _: start, tokens, config, of_text)

    def nodes_of(self, chunk: Chunk) -> list[list[int]]:
        """Nodes of each row that hold new tokens in the forward that `read` will run for a chunk."""
        if chunk.is_whole or self._is_padded(chunk):
            return [list(range(count)) for count in chunk.counts]
        assert chunk.width is not None
        return [list(range(chunk.width - count, chunk.width)) for count in chunk.counts]

    def _is_padded(self, chunk: Chunk) -> bool:
        """Whether rows are padded at their end; otherwise tokens before the new ones are forwarded again."""
        lengths = [self.cache.length_of(request.table) for request in chunk.requests]
        size = self.cache.pool.block_size
        own = [
            length + count - request.table.num_shared * size
            for length, count, request in zip(lengths, chunk.counts, chunk.requests, strict=True)
        ]
        return chunk.width is None or min(own) < chunk.width

    def score(self, requests: list[Request], draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """Forwards the root and the draft nodes of every request; see `score_nodes`."""
        self.seat(requests)
        self._longest = max(request.length for request in requests)
        return self.score_nodes(on_device([request.tokens[-1:] for request in requests], self.device), draft)

    def gives_up_positions(self, draft: DraftTree) -> bool:
        return may_refuse(self.model, self._longest, self._longest, draft.topology.depth)

    @contextmanager
    def recorded_features(
        self, for_compiler: bool = False, on_add: Callable[[], None] | None = None
    ) -> Iterator[Features | None]:
        """
        A context for a forward inside a captured step. Yields the `Features` that record its hidden states; None if
        none are recorded. See `Features.recorded` for the arguments.
        """
        features = self.features
        with self.running(), nullcontext() if features is None else features.recorded(for_compiler, on_add):
            yield features
