"""
A `generate` call by captured steps: its rows are requests of an engine, the same as in flight, which start together.
Calls with something that the host must look at in every step run by `SpeculativeCall` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..attention import implementation_of
from ..attention.kernel import attends_by_kernel, first_slots_of
from ..compat import CACHE
from ..config import SpeculationPlan
from ..drafters import Drafter, DraftModelDrafter, EagleDrafter
from ..drafters.heads import dtype_for
from ..eagle import EagleHead
from ..engine.engine import Engine
from ..engine.request import Request, RequestOptions
from ..engine.stopping import end_tokens_of, max_length_of
from ..graphs import obstacle_to_graphs
from ..kernels import DTYPES, kernels_are_installed
from ..metrics import SpeculationMetrics, set_last_metrics
from ..models.own_positions import preparation_of
from ..models.positions import num_positions
from ..models.prompt_masks import longest_in_chunks
from ..models.rope import length_dependent_ropes
from ..models.structure import execution_device
from ..sequences import Sequences
from ..verification import NAN_LOGITS
from ..verification.choosing import NOTHING_TO_DRAW_FROM
from ..verification.device_warpers import Warpers
from .engines import borrowed_engine
from .recording import Recorder, SpeculativeGenerateOutput
from .target import Target


_CAPTURED = (DraftModelDrafter, EagleDrafter)
"""Exact types of drafters that draft in captured steps; subclasses may do anything."""
_UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", CACHE)
"""Arguments for the model that rows without padding do not need, or that captured steps see to."""


class StaticBatch:
    """
    A speculative `generate` call whose rows run in captured steps.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
        drafter (`Drafter`): proposes the trees.
        plan (`SpeculationPlan`): how this call speculates.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`), generation_config
            (`GenerationConfig`), synced_gpus (`bool`), streamer (`BaseStreamer`, *optional*), model_kwargs (`dict`):
            as `generate` hands them to a decoding method.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        drafter: Drafter,
        plan: SpeculationPlan,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
        streamer: Any = None,
    ):
        self.model, self.input_ids, self.drafter, self.plan = model, input_ids, drafter, plan
        self.processors, self.criteria, self.generation_config = logits_processor, stopping_criteria, generation_config
        self.model_kwargs, self.synced_gpus, self.streamer = model_kwargs, synced_gpus, streamer
        self.num_streamed = 0
        """Columns of new tokens that the streamer has had."""
        self.max_length = max_length_of(stopping_criteria, input_ids.shape[1])
        mask = model_kwargs.get("attention_mask")
        self._visible = None if mask is None or bool(mask.all()) else mask.bool()
        self._padding = [0] * len(input_ids) if self._visible is None else (~self._visible).sum(dim=1).tolist()

    # ---------------------------------------------------------------------------------------------------- eligibility

    def obstacle(self) -> str | None:
        """The reason why the rows cannot run in captured steps; None if they can."""
        if type(self.drafter) not in _CAPTURED:
            return f"{type(self.drafter).__name__} drafts on the host"
        return self._obstacle_of_options() or self._obstacle_of_models() or self._obstacle_of_inputs()

    def _obstacle_of_options(self) -> str | None:
        """What the host must look at in every step."""
        config = self.generation_config
        others = [one for one in self.criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        if others:
            return f"the stopping criterion {type(others[0]).__name__} is asked after every token"
        if self.max_length is None:
            return "the text has no maximum length"
        if recorded := Recorder.of_call(1, config, None).wanted:
            return f"{' and '.join(sorted(recorded))} are recorded"
        if self.synced_gpus:
            return "`synced_gpus` is on"
        if self.plan.draws_by_position:
            return "random numbers belong to positions"
        warpers = Warpers.of(self.processors)
        if warpers is None or (warpers.values and not config.do_sample):
            return "a logits processor is not plain temperature, top-k or top-p, in this order"
        return None

    def _obstacle_of_models(self) -> str | None:
        """What keeps the forwards of target and draft from running within a captured step."""
        if self.plan.cuda_graphs is False:
            return "there are no CUDA graphs"
        if not kernels_are_installed():
            return "the Triton kernels are not installed"
        for part in (self.model, *self.drafter.models):
            obstacle = obstacle_to_graphs(part, "auto")
            if obstacle is not None:
                return f"{type(part).__name__} {obstacle}"
            dtype = dtype_for(part, self.model) if isinstance(part, EagleHead) else part.dtype
            if dtype not in DTYPES:
                return f"the kernels do not take {dtype}"
            if execution_device(part) != self.input_ids.device:
                return f"{type(part).__name__} is on another device than the prompt"
        if not attends_by_kernel(self.model, implementation_of(self.model), is_paged=True):
            return f"{type(self.model).__name__} does not attend by the kernel"
        if length_dependent_ropes(self.model.config.get_text_config(decoder=True)):
            return "the rotary embedding changes with the length of the text"
        most = longest_in_chunks(self.model)
        if most is not None and self.input_ids.shape[1] > most:
            return "the target reads a prompt with another mask than what it writes"
        return None

    def _obstacle_of_inputs(self) -> str | None:
        """What the prompts have besides tokens, with padding on the left at most."""
        kwargs = self.model_kwargs
        cache: Any = kwargs.get(CACHE)
        is_filled = getattr(cache, "_is_user_defined", False) and cache.get_seq_length() > 0
        if is_filled or kwargs.get("inputs_embeds") is not None:
            return "the text goes on from a cache or from embeddings"
        others = [
            name for name, value in kwargs.items() if name not in _UNDERSTOOD and not (value is None or value is False)
        ]
        if others:
            return f"{type(self.model).__name__} needs `{others[0]}`"
        if self._visible is None:
            counted = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand(self.input_ids.shape)
        else:
            if self._visible.shape != self.input_ids.shape or first_slots_of(self._visible) is None:
                return "padding is not on the left"
            if max(self._padding) == self.input_ids.shape[1]:
                return "a prompt is empty"
            counted = self._visible.long().cumsum(dim=1) - 1
        positions = kwargs.get("position_ids")
        if positions is not None and not self._are_counted(positions, counted):
            return "positions are given"
        known = self._known_length()
        if known is not None and (known <= self.input_ids.shape[1] or (self.streamer and self.processors)):
            return "the text is longer than the positions that the target knows"
        return None

    def _known_length(self) -> int | None:
        """
        Columns to which the target knows positions, the last column included, which is not forwarded, if the texts may
        become longer; else None. The row with the largest positions counts: plain `generate` goes on with rows that
        have finished.
        """
        known = num_positions(self.model)
        if known is None:
            return None
        columns = known - (preparation_of(self.model).first_position or 0) + min(self._padding) + 1
        return columns if columns < (self.max_length or 0) else None

    def _are_counted(self, positions: torch.Tensor, counted: torch.Tensor) -> bool:
        if positions.shape[-1] != counted.shape[1] or positions.dim() != 2:
            return False
        differ = positions != counted.to(positions.device)
        return not bool((differ if self._visible is None else differ & self._visible).any())

    # ------------------------------------------------------------------------------------------------------ the steps

    def run(self) -> torch.Tensor | SpeculativeGenerateOutput | None:
        """
        Generates until every row is finished. None, with nothing but `num_streamed` columns done, where the call must
        run by the host: memory is scarce, the logits of the model itself are not numbers, or a text is longer than the
        target has positions, where plain `generate` may fail or go on.

        Raises:
            RuntimeError: as in plain `generate`, if there was nothing to draw from.
        """
        requests = self._requests()
        most_slots = max(self.plan.tree.num_nodes, *(tree.num_slots for tree in self.plan.trees))
        num_slots = max(request.max_length for request in requests) + most_slots
        with borrowed_engine(self.model, self.drafter, self.plan, len(requests), num_slots) as engine:
            if engine is None or engine.device_steps.has_failed:
                return None
            with engine.running():
                self._decode(engine, requests)
                errors = [request.error for request in requests if request.error is not None]
                goes_on = self._known_length() is not None and any(one.finish_reason == "length" for one in requests)
                outputs = None if errors or goes_on else self._outputs(engine, requests)
                for request in requests:
                    engine.end(request)
        if errors and (self.generation_config.do_sample or set(errors) != {NAN_LOGITS}):
            raise RuntimeError(NOTHING_TO_DRAW_FROM)
        return outputs

    def _requests(self) -> list[Request]:
        """The rows as requests, without their padding."""
        options = RequestOptions(self.processors, self.criteria, bool(self.generation_config.do_sample), self.plan)
        most = self._known_length() or self.max_length or 0
        found = []
        for number, (tokens, first) in enumerate(zip(self.input_ids.tolist(), self._padding, strict=True)):
            request = Request(str(number), tokens[first:], options, self.input_ids.device)
            request.max_length = most - first
            found.append(request)
        return found

    def _decode(self, engine: Engine, requests: list[Request]) -> None:
        """Runs the requests until all are over. Those of a call that returns a cache keep their K/V until then."""
        scheduler, pool = engine.scheduler, engine.pool
        chunk = self.generation_config.prefill_chunk_size
        engine.limit_prompt_tokens(None if chunk is None else chunk * len(requests))
        for request in requests:
            scheduler.add(request)
        scheduler.admit()
        for request in requests:  # at once: steps read the block tables, which then stay the same
            pool.reserve(request.table, pool.num_slots // len(requests))
        ends_early = not self._returns_cache
        while not all(request.is_over for request in requests):
            for told in engine.step():
                if ends_early:
                    for request in told:
                        if request.is_over:
                            engine.end(request)
                self._stream(requests)
            if any(request.error is not None for request in requests):
                return

    def _stream(self, requests: list[Request]) -> None:
        """Streams the columns for which every row has a token or has ended; ended rows are padded."""
        if self.streamer is None or any(request.error is not None for request in requests):
            return
        new = [request.tokens[len(request.prompt) :] for request in requests]
        going = [len(row) for row, request in zip(new, requests, strict=True) if not request.is_over]
        for column in range(self.num_streamed, min(going) if going else max(map(len, new))):
            tokens = [row[column] if column < len(row) else self._pad_token for row in new]
            self.streamer.put(torch.tensor(tokens, device="cpu"))
            self.num_streamed = column + 1

    @property
    def _pad_token(self) -> int | None:
        token = getattr(self.generation_config, "_pad_token_tensor", None)
        return None if token is None else int(token.flatten()[0])

    @property
    def _returns_cache(self) -> bool:
        """Whether the caller gets the cache, with K/V of all but the last token."""
        cache = self.model_kwargs.get(CACHE)
        returns = self.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        return cache is not None and bool(returns)

    # ----------------------------------------------------------------------------------------------------- the outputs

    def _outputs(self, engine: Engine, requests: list[Request]) -> torch.Tensor | SpeculativeGenerateOutput:
        if self.streamer is not None:
            self.streamer.end()
        new: list[list[Any]] = [request.tokens[len(request.prompt) :] for request in requests]
        longest, pad = max(map(len, new)), self._pad_token
        padded = [row + [pad] * (longest - len(row)) for row in new]
        added = torch.tensor(padded, dtype=self.input_ids.dtype, device=self.input_ids.device)
        ids = torch.cat([self.input_ids, added], dim=1)
        metrics = _joined([request.metrics for request in requests], engine.metrics.seconds)
        set_last_metrics(metrics)
        if self._returns_cache:
            self._hand_back_cache(engine, requests, ids)
        if not self.generation_config.return_dict_in_generate:
            return ids
        return SpeculativeGenerateOutput(sequences=ids, speculation=metrics, **{CACHE: self.model_kwargs.get(CACHE)})

    def _hand_back_cache(self, engine: Engine, requests: list[Request], ids: torch.Tensor) -> None:
        """Fills the cache that `generate` made with the K/V of the rows, padding included."""
        sequences = Sequences(self.input_ids, self._visible, self.max_length, end_tokens_of(self.criteria))
        target = Target(self.model, sequences, self._visible, self.generation_config, self.model_kwargs, 0)
        engine.target.cache.copy_to(target.cache, [request.table for request in requests], self._padding)
        lengths = [first + len(request.tokens) for first, request in zip(self._padding, requests, strict=True)]
        sequences.take(ids, lengths, [True] * len(requests))
        target.hand_back_from(ids.shape[1])


def _joined(of_rows: list[SpeculationMetrics], seconds: dict[str, float]) -> SpeculationMetrics:
    """The counts of a call, from those of its rows."""
    found = SpeculationMetrics(seconds=dict(seconds))
    for row in of_rows:
        found.accepted_per_step += row.accepted_per_step
        found.num_drafts += row.num_drafts
        found.num_draft_tokens += row.num_draft_tokens
        found.num_accepted_tokens += row.num_accepted_tokens
        missing = len(row.num_accepted_per_position) - len(found.num_accepted_per_position)
        found.num_accepted_per_position += [0] * missing
        for position, count in enumerate(row.num_accepted_per_position):
            found.num_accepted_per_position[position] += count
    return found
