"""Continuous batching with speculation, behind the interface of transformers' `ContinuousBatchingManager`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..building import is_building
from ..cache.blocks import BlockPool
from ..config import SpeculativeConfig
from ..drafters import as_drafter
from ..engine.engine import Engine
from ..engine.policy import LoadPolicy
from ..engine.prompt_memory import PromptMemory
from ..forwards.chunks import busy_at
from ..generation.model_refusals import check_foreign_hooks
from ..models.modules import num_parameters_of
from ..models.prompt_memory import has_towers
from ..models.structure import execution_device, num_embeddings_of
from ..ranks import Ranks
from .adding import AddsRequests
from .admission import Admission
from .arguments import BaseConfig
from .limits import Limits
from .loop import RequestLoop
from .reading import ReadsResults
from .state import ManagerState
from .thread import HasThread
from .warming_up import WarmUp


class SpeculativeBatchingManager(AddsRequests, HasThread, ReadsResults):
    """
    Runs requests with in-flight batching and speculation, in a thread of its own. Made by
    `model.init_continuous_batching(assistant_model=…, tree=…)`; as a context manager it starts and stops its thread.

    Args:
        model (`PreTrainedModel`): the target.
        generation_config (`GenerationConfig` or `BaseConfig`, *optional*): the default options of requests.
        continuous_batching_config (`ContinuousBatchingConfig` or `Limits`, *optional*): limits of memory, batch size,
            prompt tokens per step and queue length.
        assistant_model: the draft model, head or drafter, as in `generate`.
        speculative_config (`SpeculativeConfig`, *optional*): how requests speculate.
        prompts (`list`, *optional*): the prompts that are going to come, so that K/V blocks leave memory for their
            images. By default they leave it for an image of `Limits.image_pixels`.

    Raises:
        ValueError, TypeError: for a target, draft or option that cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | BaseConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | Limits | None = None,
        *,
        assistant_model: Any,
        speculative_config: SpeculativeConfig | None = None,
        prompts: Sequence[list[int] | Mapping[str, Any]] | None = None,
    ):
        config = SpeculativeConfig() if speculative_config is None else speculative_config
        self.model = model
        drafter = as_drafter(assistant_model)
        self._limits = Limits.of(continuous_batching_config, model.device, num_parameters_of(model))
        self._admission = Admission(
            model,
            assistant_model,
            drafter,
            generation_config,
            config,
            self._limits.return_logprobs,
            self._limits.shares_prefixes,
        )
        self._ranks = Ranks.of(model)
        models, most_nodes, memory = [model, *drafter.models], self._admission.most_nodes, PromptMemory(model)
        if prompts is None:
            for_prompts = memory.needed_for_pixels(self._limits.image_pixels)
        else:
            for_prompts = self._admission.needed_by(prompts, memory)
        num_blocks = self._ranks.least(self._limits.blocks(models, most_nodes, for_prompts))
        if has_towers(model):
            memory.room = self._ranks.least(self._limits.room_beside(models, most_nodes, num_blocks))
        self._admission.memory = memory
        pool = self._admission.pool = BlockPool(num_blocks, self._limits.block_size)
        self.engine = Engine(
            model,
            drafter,
            pool,
            LoadPolicy(
                disable_by_batch_size=config.disable_by_batch_size, counts_waiting=config.disable_counts_waiting
            ),
            max_requests=self._limits.max_requests,
            chunk_size=self._limits.chunk_size,
            busy_at=busy_at(num_parameters_of(model)),
            max_step_nodes=config.max_step_nodes,
            cuda_graphs=config.cuda_graphs,
            compiles=config.compile,
            shares_prefixes=self._limits.shares_prefixes,
        )
        engine = self.engine
        engine.prompt_memory = memory
        self._admission.present_run = lambda: engine.present_run
        engine.check_models = partial(check_foreign_hooks, model, drafter, config)
        self._made_for = self._models_now()
        self.was_kept = False
        """Whether the manager has served an earlier call, after which the model kept it."""
        self._loop = RequestLoop(self.engine)
        self._warm_up: WarmUp | None = None
        self._numbers = itertools.count()

    # ---------------------------------------------------------------------------------------------- before its start

    def warmup(self, *, at_once: bool = False) -> None:
        """
        Makes the thread capture CUDA graphs when it starts. Before it serves requests it captures a few, in which any
        number of requests can run: of steps for greedy and for sampled requests, with the manager's tree (under "auto"
        one that it chooses from) and without, and of prompt chunks. Further graphs (more numbers of rows, the other
        trees of "auto", which are timed, longer texts) follow one by one when no request is open, or when few are
        open, none waits for its first token, and they have wanted one often. Each takes up to half a second. Without
        CUDA graphs the warm-up does nothing.

        Args:
            at_once (`bool`): whether all graphs are captured before requests are served, which takes minutes.

        Raises:
            RuntimeError: if the manager is running.
        """
        if self.is_running():
            raise RuntimeError("`warmup`: the manager is running already. Call it before `start`.")
        # No reference cycle: K/V must be freed with the manager.
        admission, loop = self._admission, weakref.proxy(self._loop)
        self._warm_up = WarmUp(
            self.engine, lambda *kind: admission.dummy_requests(*kind), lambda: loop.may_go_on, at_once
        )
        self._loop.prepare, self._loop.use_spare_time = self._warm_up.run, self._warm_up.use_spare_time

    def serves(
        self,
        assistant_model: Any,
        speculative_config: SpeculativeConfig | None,
        continuous_batching_config: ContinuousBatchingConfig | Limits | None,
    ) -> bool:
        """Whether the manager is idle and equal to one that would be made of these arguments."""
        config = SpeculativeConfig() if speculative_config is None else speculative_config
        limits = Limits.of(continuous_batching_config, self.model.device, num_parameters_of(self.model))
        admission = self._admission
        is_alike = admission.assistant_model is assistant_model and admission.config == config
        is_alike = is_alike and self._limits == limits and self._made_for == self._models_now()
        is_idle = not self.is_running() and not self._loop.inbox
        return is_alike and is_idle and self._loop.fatal_error is None

    def has_room_for(self, prompts: Sequence[list[int] | Mapping[str, Any]]) -> bool:
        """Whether there is memory to read the images of each of these prompts."""
        room = self.engine.prompt_memory.room
        return room is None or self._admission.needed_by(prompts, self.engine.prompt_memory) <= room

    def _models_now(self) -> list[Any]:
        """Vocabulary size, dtypes and devices of the models, for which K/V memory and CUDA graphs were made."""
        models = (self.model, *self._admission.drafter.models)
        places = [(model.dtype, execution_device(model)) for model in models]
        return [num_embeddings_of(self.model), *places]

    def renew(self, generation_config: GenerationConfig | BaseConfig | None) -> None:
        """
        Prepares a kept manager for another call: sets its default options, and drops results that were not read and
        draft temperatures that earlier calls have learnt, so that a seed reproduces the call.
        """
        self._admission.use_defaults(generation_config)
        self._loop.results.clear()
        self.engine.forget_temperatures()
        self.was_kept = True

    def reset_prefix_cache(self) -> None:
        """
        Forgets the K/V that texts share with later ones. New weights are noticed when the manager starts or a pause
        ends, unless they were written by `weight.data` and only few values are others.
        """
        self.engine.prefixes.forget()

    # ------------------------------------------------------------------------------------------------------------ load

    @property
    def most_tokens(self) -> int:
        """Most tokens of a request's text, its prompt included."""
        return self._admission.most_tokens

    @property
    def progress(self) -> tuple[tuple[int, ...], bool]:
        """
        Counts of which one grows with every forward that ends, and whether the manager warms up, or the process
        compiles or captures, instead. Cheaper than `state`.
        """
        engine = self.engine
        counts = (engine.num_steps, engine.num_tokens_read, engine.num_tokens_generated)
        return counts, self._loop.is_preparing or is_building()

    @property
    def is_warm(self) -> bool:
        """Whether no warm-up is to come, or runs."""
        return self._loop.prepare is None and not self._loop.is_preparing

    @property
    def state(self) -> ManagerState:
        """The manager's present load and counts. Dummy requests of a warm-up do not count."""
        num_left = 0 if self._warm_up is None else self._warm_up.num_left
        return ManagerState.of(self.engine, len(self._loop.inbox), self._loop.is_preparing, num_left)
