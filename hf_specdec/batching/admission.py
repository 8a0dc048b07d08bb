"""Making requests from callers' arguments, which are checked before a request enters the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from ..adapters import Choice
from ..cache.blocks import BlockPool
from ..config import SpeculativeConfig
from ..drafters import Drafter
from ..engine.prompt_inputs import Leads, PromptInputs
from ..engine.prompt_memory import PromptMemory
from ..engine.request import Request
from ..engine.request_options import RequestOptions
from ..generation.model_refusals import check_batching, check_target
from ..generation.refusals import check_inputs
from ..grammar import with_grammar
from ..models.own_positions import preparation_of
from ..models.positions import num_positions
from ..models.prompt_masks import longest_causal_prompt
from ..models.structure import execution_device, num_embeddings_of
from ..ranks import Ranks, is_sharded
from ..verification.log_probabilities import LogprobOptions, Mode
from .arguments import BaseConfig, check_kinds, checked_options, checked_prompt
from .content import content_of
from .model_inputs import checked_inputs, split_prompt
from .preparations import Preparations
from .preparing import Prepared
from .preparing_inputs import prepare_inputs, prepare_more_inputs, prepare_start_of
from .request_plans import RequestPlans


WARM_UP_PROMPT, WARM_UP_TOKENS = 4, 24
"""Tokens of the prompts of a warm-up's requests, and those that they write."""


class Admission:
    """
    Checks callers' arguments and makes requests from them.

    Args:
        model (`PreTrainedModel`): the target.
        assistant_model: the draft model, head or drafter as the user gave it.
        drafter (`Drafter`): the drafter made from `assistant_model`.
        generation_config (`GenerationConfig` or `BaseConfig`, *optional*): the default options of requests.
        config (`SpeculativeConfig`): how requests speculate.
        returns_logprobs (`bool`, *optional*, defaults to `False`): whether results have the log-probabilities of their
            tokens, by default.
        shares_prefixes (`bool`, *optional*, defaults to `False`): whether texts that begin alike share blocks.

    Raises:
        ValueError, TypeError: for a target, draft or option that cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: Any,
        drafter: Drafter,
        generation_config: GenerationConfig | BaseConfig | None,
        config: SpeculativeConfig,
        returns_logprobs: bool = False,
        shares_prefixes: bool = False,
    ):
        if is_sharded(model):
            raise ValueError(
                f"The weights of {type(model).__name__} are sharded (FSDP, ZeRO-3): all ranks would have to make the "
                "same number of steps. Use `generate(…, synced_gpus=True)`, or a whole model on every rank."
            )
        check_target(model)
        check_batching(model)
        self.model, self.assistant_model, self.drafter = model, assistant_model, drafter
        self.config, self.ranks, self._returns_logprobs = config, Ranks.of(model), returns_logprobs
        self._shares_prefixes = shares_prefixes
        self._stream: torch.cuda.Stream | None = None
        self._preparations, self.leads = Preparations(model), Leads()
        self._plans = RequestPlans(model, assistant_model, drafter, config)
        self.pool: BlockPool | None = None
        """The K/V blocks into which every request must fit; None until the manager has allocated them."""
        self.memory = PromptMemory(model)
        """What there is beside these blocks."""
        self.present_run: Callable[[], int | None] = lambda: None
        """Returns the number of the run of steps during which the models stay as they are; None if there is none."""
        self.vocab_size = model.config.get_text_config().vocab_size
        self.num_embeddings = num_embeddings_of(model)
        known = num_positions(model)
        self.max_positions = None if known is None else known - (preparation_of(model).first_position or 0)
        self._longest_in_chunks = longest_causal_prompt(model)
        self._defaults = BaseConfig.of(None)
        self.use_defaults(generation_config)

    def use_defaults(self, generation_config: GenerationConfig | BaseConfig | None) -> None:
        """
        Sets the default options of requests.

        Raises:
            ValueError, TypeError: if a request with these options cannot be served, be it because of the target or the
                draft.
        """
        before, self._defaults = self._defaults, BaseConfig.of(generation_config)
        try:  # stop strings need a tokenizer, which only requests have
            plan = self.request("check", [0], {"max_new_tokens": 1, "stop_strings": []}).options.plan
        except BaseException:
            self._defaults = before
            raise
        self.most_nodes = 0 if plan is None else min(plan.tree.num_nodes, self.config.max_step_nodes or sys.maxsize)
        """Most draft nodes of a request with the default options in a step."""

    @property
    def most_tokens(self) -> int:
        """Most tokens that the text of a request may have, prompt included."""
        bounds = [self.max_positions, None if self.pool is None else self.pool.num_slots]
        return min((bound for bound in bounds if bound is not None), default=sys.maxsize)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """
        A context whose device work runs on a CUDA stream of its own and is complete at its end. On the default stream
        each value that the caller's thread reads would wait for the steps queued before it. (Steps read tensors that a
        request keeps, and the host waits for the end of these steps before it drops the request.)
        """
        device = execution_device(self.model)
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def dummy_requests(self, count: int, do_sample: bool) -> list[Request]:
        """Requests of a warm-up, with prompts of `WARM_UP_PROMPT` tokens; none if these are too long."""
        most = self.most_tokens - WARM_UP_PROMPT
        options: dict[str, Any] = {"max_new_tokens": min(WARM_UP_TOKENS, most), "eos_token_id": -1}
        # Stop strings need a tokenizer, which only requests have.
        options |= {"do_sample": do_sample, "stop_strings": []}
        return [
            self.request(f"warm-up {number}", [0] * WARM_UP_PROMPT, options)
            for number in range(count if most > 1 else 0)
        ]

    def request(
        self,
        request_id: str,
        input_ids: Iterable[int] | Mapping[str, Any],
        options: dict[str, Any],
        *,
        tree: Any = None,
        speculate: bool = True,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        model_inputs: Mapping[str, Any] | None = None,
        adapter: Choice = ...,
        top_logprobs: int | None = None,
        logprobs_mode: Mode | None = None,
        priority: int = 0,
        run: Hashable | None = None,
    ) -> Request:
        """
        Makes a request, with the processors and criteria that `generate` would make of its options; for the arguments
        see `SpeculativeBatchingManager.add_request`. Models are checked, and equal options prepared and checked, once
        in a `run` (*optional*, any value; by default the engine's present one), in which nobody changes the models.

        Raises:
            ValueError, TypeError: if the request cannot be served.
        """
        check_kinds(request_id, speculate, seed, priority)
        logprobs = LogprobOptions.of(top_logprobs, logprobs_mode, self._returns_logprobs)
        tokens, values = split_prompt(input_ids, model_inputs)
        prompt, options = checked_prompt(tokens, self.num_embeddings), checked_options(options)
        values = checked_inputs(self.model, len(prompt), values)
        most = self._longest_in_chunks
        is_whole = bool(values) or (most is not None and len(prompt) > most)
        prepare = partial(prepare_inputs, self.model, prompt)
        prepare_start = partial(prepare_start_of, self.model, prompt)
        inputs = PromptInputs(values, prepare, leads=self.leads, prepare_start=prepare_start) if is_whole else None
        if inputs is not None and self._shares_prefixes and most is None:
            inputs.content = content_of(self.model, prompt, values)
            count = 0 if inputs.content is None else len(inputs.content.parts)
            inputs.prepare_more = partial(prepare_more_inputs, self.model, prompt, count) if count else None
        base = self._defaults
        if generation_config is not None:
            base, tree = BaseConfig.of(generation_config), self._plans.own_tree(tree, generation_config)
        options = with_grammar(self.model, base.config, base.overrides | options)
        run = self.present_run() if run is None else run
        prepared = self._prepare(prompt, base, options, run)
        plan = self._plans.of(prepared, tree, seed, run)
        check_inputs(self.model, prepared.config, torch.empty(1, len(prompt), device="meta"), {}, shares_steps=True)
        how = RequestOptions(
            prepared.processors,
            prepared.criteria,
            bool(prepared.config.do_sample),
            plan if speculate else None,
            seed,
            prepared.clock,
            logprobs,
            self.model.config.get_text_config(decoder=True).vocab_size,
        )
        with self._beside_steps():
            request = Request(
                request_id,
                prompt,
                how,
                execution_device(self.model),
                streaming,
                record_timestamps,
                self.max_positions,
                inputs,
                adapter,
                priority,
            )
            _ = how.device_warpers  # here, and not in the thread of steps, tokens are read from the device
        self._check_fits(request)
        self.memory.check(len(prompt), values)
        return request

    def needed_by(self, prompts: Iterable[Any], memory: PromptMemory) -> int:
        """
        Most bytes that the device needs to read any of these prompts, see `PromptMemory`; those that are refused count
        for nothing.
        """
        most = 0
        for prompt in prompts:
            if isinstance(prompt, Mapping):
                with suppress(TypeError, ValueError):
                    tokens, values = split_prompt(prompt, None)
                    most = max(most, memory.needed(len(tokens), checked_inputs(self.model, len(tokens), values)))
        return most

    def _prepare(self, prompt: list[int], base: BaseConfig, options: dict[str, Any], run: Hashable | None) -> Prepared:
        """What `generate` prepares for a prompt, with the stopping criteria of the request."""
        ends = options["eos_token_id"] != -1 if "eos_token_id" in options else base.ends
        if not ends:
            options = {name: value for name, value in options.items() if name != "eos_token_id"}
        with self._beside_steps():
            prepared = self._preparations.prepare(prompt, base.config, options, run)
        criteria = prepared.criteria
        if not ends:
            criteria = StoppingCriteriaList(c for c in criteria if type(c) is not EosTokenCriteria)
        return prepared._replace(criteria=self.ranks.agreeing(criteria))

    def _check_fits(self, request: Request) -> None:
        """
        Raises a `ValueError` for a request whose text may become longer than memory allows, or whose prompt is longer
        than positions allow.
        """
        length = len(request.prompt)
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"`input_ids`: the prompt of {length} tokens is longer than the {self.max_positions} positions that "
                "the model knows. Shorten it."
            )
        if self.pool is not None and self.pool.blocks_for(request.max_length) > self.pool.num_blocks:
            raise ValueError(
                f"The prompt of {length} tokens with `max_new_tokens={request.max_length - length}` can never fit: "
                f"there is memory for {self.pool.num_slots} tokens. Ask for fewer, or raise `num_blocks` or "
                "`max_memory_percent`."
            )
