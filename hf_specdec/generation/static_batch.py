"""
A `generate` call by captured steps: its rows are requests of an engine, the same as in flight, which start together.
Calls with something that the host must look at in every step run by `SpeculativeCall` instead.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..attention import implementation_of
from ..attention.kernel import attends_by_kernel, first_slots_of
from ..compat import CACHE
from ..drafters.heads import dtype_in_use
from ..engine.engine import Engine
from ..engine.noises import Noises
from ..engine.prompt_inputs import PromptInputs
from ..engine.request import Request
from ..engine.request_options import RequestOptions
from ..graphs import obstacle_to_graphs
from ..kernels import DTYPES, kernels_are_installed
from ..metrics import SpeculationMetrics, set_last_metrics
from ..models.own_positions import preparation_of
from ..models.positions import num_positions
from ..models.prompt_masks import longest_in_chunks
from ..models.rope import length_dependent_ropes
from ..models.structure import execution_device, forward_parameters, inputs_of_every_step
from ..states import is_attention_free
from ..verification import NAN_LOGITS
from ..verification.choosing import NOTHING_TO_CHOOSE, NOTHING_TO_DRAW_FROM
from .arguments import CallArguments
from .engines import borrowed_engine
from .recording import Recorder, SpeculativeGenerateOutput
from .target import Target


_UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", CACHE, "cache_params")
"""Arguments for the model that rows without padding do not need, or that captured steps see to."""


class StaticBatch:
    """
    A speculative `generate` call whose rows run in captured steps.

    Args:
        call (`CallArguments`): the call.
    """

    def __init__(self, call: CallArguments):
        self.call = call
        self.num_streamed = 0
        """Columns of new tokens that the streamer has had."""
        visible = call.visible
        self._padding = [0] * len(call.input_ids) if visible is None else (~visible).sum(dim=1).tolist()

    # ---------------------------------------------------------------------------------------------------- eligibility

    def obstacle(self) -> str | None:
        """The reason why the rows cannot run in captured steps; None if they can."""
        if not self.call.drafter.grows_on_device:
            return f"{type(self.call.drafter).__name__} drafts on the host"
        return self._obstacle_of_options() or self._obstacle_of_models() or self._obstacle_of_inputs()

    def _obstacle_of_options(self) -> str | None:
        """What the host must look at in every step."""
        config = self.call.generation_config
        others = [one for one in self.call.stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        if others:
            return f"the stopping criterion {type(others[0]).__name__} is asked after every token"
        if self.call.max_length is None:
            return "the text has no maximum length"
        if recorded := Recorder.of_call(1, config, None).wanted:
            return f"{' and '.join(sorted(recorded))} are recorded"
        if self.call.synced_gpus:
            return "`synced_gpus` is on"
        if any(options.device_warpers is None for options in self._row_options):
            return "a logits processor is none of those of captured steps, in the order of `generate`"
        return None

    def _obstacle_of_models(self) -> str | None:
        """What keeps the forwards of target and draft from running within a captured step."""
        if self.call.plan.cuda_graphs is False:
            return "there are no CUDA graphs"
        if not kernels_are_installed():
            return "the Triton kernels are not installed"
        for part in (self.call.model, *self.call.drafter.parts):
            obstacle = obstacle_to_graphs(part, "auto")
            if obstacle is not None:
                return f"{type(part).__name__} {obstacle}"
            dtype = dtype_in_use(part, self.call.model)
            if dtype not in DTYPES:
                return f"the kernels do not take {dtype}"
            if execution_device(part) != self.call.input_ids.device:
                return f"{type(part).__name__} is on another device than the prompt"
        attends = not is_attention_free(self.call.model)
        if attends and not attends_by_kernel(self.call.model, implementation_of(self.call.model), is_paged=True):
            return f"{type(self.call.model).__name__} does not attend by the kernel"
        if length_dependent_ropes(self.call.model.config.get_text_config(decoder=True)):
            return "the rotary embedding changes with the length of the text"
        most = longest_in_chunks(self.call.model)
        if most is not None and self.call.input_ids.shape[1] > most:
            return "the target reads a prompt with another mask than what it writes"
        return None

    def _obstacle_of_inputs(self) -> str | None:
        """What the prompts have besides tokens, with padding on the left at most."""
        kwargs, ids, visible = self.call.model_kwargs, self.call.input_ids, self.call.visible
        cache: Any = self.call.cache
        is_filled = getattr(cache, "_is_user_defined", False) and cache.get_seq_length() > 0
        if is_filled or kwargs.get("inputs_embeds") is not None:
            return "the text goes on from a cache or from embeddings"
        if not self._takes_images and (others := self._inputs_beside_tokens):
            return f"{type(self.call.model).__name__} needs `{others[0]}`"
        if self._takes_images and (others := inputs_of_every_step(self.call.model, self._inputs_beside_tokens)):
            return f"{type(self.call.model).__name__} reads `{others[0]}` in every step"
        if visible is None:
            counted = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        else:
            if visible.shape != ids.shape or first_slots_of(visible) is None:
                return "padding is not on the left"
            if max(self._padding) == ids.shape[1]:
                return "a prompt is empty"
            counted = visible.long().cumsum(dim=1) - 1
        positions = kwargs.get("position_ids")
        if positions is not None and not self._is_read_whole and not self._are_counted(positions, counted):
            return "positions are given"
        known = self._known_length
        if known is not None and (known <= ids.shape[1] or (self.call.streamer and self.call.logits_processor)):
            return "the text is longer than the positions that the target knows"
        return None

    @cached_property
    def _row_options(self) -> list[RequestOptions]:
        return [self.call.options.for_row(row, padding) for row, padding in enumerate(self._padding)]

    @property
    def _inputs_beside_tokens(self) -> list[str]:
        """Names of the arguments that say more of the prompts than captured steps know."""
        given = self.call.model_kwargs.items()
        return [name for name, value in given if name not in _UNDERSTOOD and not (value is None or value is False)]

    @cached_property
    def _takes_images(self) -> bool:
        """Whether what the prompts have besides tokens may be images, which the target reads once."""
        model = self.call.model
        attends_to_encoder = model.config.is_encoder_decoder or "encoder_hidden_states" in self._inputs_beside_tokens
        return "pixel_values" in forward_parameters(model) and not attends_to_encoder

    @cached_property
    def _is_read_whole(self) -> bool:
        """Whether the prompts are read as plain `generate` does; see `PromptInputs`."""
        positions = self.call.model_kwargs.get("position_ids")
        has_axes = positions is not None and positions.dim() > 2
        return self._takes_images and (has_axes or bool(self._inputs_beside_tokens))

    @cached_property
    def _known_length(self) -> int | None:
        """
        Columns to which the target knows positions, the last column included, which is not forwarded, if the texts may
        become longer; else None. The row with the largest positions counts: plain `generate` goes on with rows that
        have finished.
        """
        known = num_positions(self.call.model)
        if known is None:
            return None
        columns = known - (preparation_of(self.call.model).first_position or 0) + min(self._padding) + 1
        return columns if columns < (self.call.max_length or 0) else None

    def _are_counted(self, positions: torch.Tensor, counted: torch.Tensor) -> bool:
        if positions.shape[-1] != counted.shape[1] or positions.dim() != 2:
            return False
        differ = positions != counted.to(positions.device)
        return not bool((differ if self.call.visible is None else differ & self.call.visible).any())

    # ------------------------------------------------------------------------------------------------------ the steps

    def run(self) -> torch.Tensor | SpeculativeGenerateOutput | None:
        """
        Generates until every row is finished. None, with nothing but `num_streamed` columns done, where the call must
        run by the host: memory is scarce, the logits of the model itself are not numbers, the target does not take the
        images, or a text is longer than the target has positions, where plain `generate` may fail or go on.

        Raises:
            RuntimeError: as in plain `generate`, if there was nothing to draw from.
        """
        requests = self._requests()
        most_slots = self.call.drafter.most_slots(self.call.plan)
        num_slots = max(request.max_length for request in requests) + most_slots
        with borrowed_engine(self.call.model, self.call.drafter, self.call.plan, len(requests), num_slots) as engine:
            if engine is None or engine.device_steps.has_failed:
                return None
            with engine.running():
                Noises(self.call.input_ids.device, self.call.noise_seed).give(requests)
                self._decode(engine, requests)
                errors = [request.error for request in requests if request.error is not None]
                goes_on = self._known_length is not None and any(one.finish_reason == "length" for one in requests)
                outputs = None if errors or goes_on else self._outputs(engine, requests)
                for request in requests:
                    engine.end(request)
        if set(errors) - {NAN_LOGITS, NOTHING_TO_CHOOSE}:
            return None  # by the host the target's own error comes
        if errors and (self.call.options.do_sample or set(errors) != {NAN_LOGITS}):
            raise RuntimeError(NOTHING_TO_DRAW_FROM)
        return outputs

    def _requests(self) -> list[Request]:
        """The rows as requests, without their padding."""
        most = self._known_length or self.call.max_length or 0
        call, inputs = self.call, None
        if self._is_read_whole:
            inputs = PromptInputs(
                call.model_kwargs, lambda values, _: (call.generation_config, values), call.input_ids
            )
        found = []
        for number, (tokens, first) in enumerate(zip(call.input_ids.tolist(), self._padding, strict=True)):
            options, device = self._row_options[number], call.input_ids.device
            request = Request(str(number), tokens[first:], options, device, inputs=inputs)
            request.max_length = most - first
            found.append(request)
        return found

    def _decode(self, engine: Engine, requests: list[Request]) -> None:
        """Runs the requests until all are over. Those of a call that returns a cache keep their K/V until then."""
        scheduler, pool = engine.scheduler, engine.pool
        chunk = self.call.generation_config.prefill_chunk_size
        engine.limit_prompt_tokens(None if chunk is None else chunk * len(requests))
        for request in requests:
            scheduler.add(request)
        scheduler.admit(len(requests))  # the engine has blocks for all their texts
        for request in requests:  # at once: steps read the block tables, which then stay the same
            pool.reserve(request.table, pool.num_slots // len(requests))
        ends_early = not self.call.returns_cache
        engine.runs_ahead = ends_early or not engine.target.cache.state_layers
        while not all(request.is_over for request in requests):
            for advanced in engine.step():
                if ends_early:
                    for request in advanced:
                        if request.is_over:
                            engine.end(request)
                self._stream(requests)
            if any(request.error is not None for request in requests):
                return

    def _stream(self, requests: list[Request]) -> None:
        """Streams the columns for which every row has a token or has ended; ended rows are padded."""
        if self.call.streamer is None or any(request.error is not None for request in requests):
            return
        new = [request.tokens[len(request.prompt) :] for request in requests]
        going = [len(row) for row, request in zip(new, requests, strict=True) if not request.is_over]
        for column in range(self.num_streamed, min(going) if going else max(map(len, new))):
            tokens = [row[column] if column < len(row) else self.call.pad_token for row in new]
            self.call.streamer.put(torch.tensor(tokens, device="cpu"))
            self.num_streamed = column + 1

    # ----------------------------------------------------------------------------------------------------- the outputs

    def _outputs(self, engine: Engine, requests: list[Request]) -> torch.Tensor | SpeculativeGenerateOutput:
        if self.call.streamer is not None:
            self.call.streamer.end()
        new: list[list[Any]] = [request.tokens[len(request.prompt) :] for request in requests]
        longest, pad = max(map(len, new)), self.call.pad_token
        padded = [row + [pad] * (longest - len(row)) for row in new]
        added = torch.tensor(padded, dtype=self.call.input_ids.dtype, device=self.call.input_ids.device)
        ids = torch.cat([self.call.input_ids, added], dim=1)
        metrics = SpeculationMetrics.sum_of(request.metrics for request in requests)
        metrics.seconds = dict(engine.metrics.seconds)
        set_last_metrics(metrics)
        if self.call.returns_cache:
            self._hand_back_cache(engine, requests, ids)
        if not self.call.generation_config.return_dict_in_generate:
            return ids
        return SpeculativeGenerateOutput(sequences=ids, speculation=metrics, **{CACHE: self.call.cache})

    def _hand_back_cache(self, engine: Engine, requests: list[Request], ids: torch.Tensor) -> None:
        """Fills the cache that `generate` made with the K/V of the rows, padding included."""
        sequences = self.call.sequences()
        target = Target(self.call, sequences, 0)
        engine.target.cache.copy_to(target.cache, [request.table for request in requests], self._padding)
        lengths = [first + len(request.tokens) for first, request in zip(self._padding, requests, strict=True)]
        sequences.take(ids, lengths, [True] * len(requests))
        target.hand_back_from(ids.shape[1])
