"""Making requests from callers' arguments, which are checked before a request enters the queue."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..config import SpeculationPlan, SpeculativeConfig
from ..drafters import Drafter
from ..forwards.models import execution_device
from ..generation.refusals import check_call, check_inputs
from ..ranks import Ranks, is_sharded
from ..verification.copying import deep_copy, kept_whole
from ..verification.processor_kinds import READS_OWN_HISTORY, READS_SCORES_ONLY
from .blocks import BlockPool
from .preparing import Preparations
from .request import Request, RequestOptions


_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer")
_OUTPUTS = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)


class Admission:
    """
    Checks callers' arguments and makes requests from them.

    Args:
        model (`PreTrainedModel`): the target.
        assistant_model: the draft model, head or drafter as the user gave it.
        drafter (`Drafter`): the drafter made from `assistant_model`.
        generation_config (`GenerationConfig`, *optional*): the default options of requests.
        config (`SpeculativeConfig`): how requests speculate.

    Raises:
        ValueError, TypeError: for a target, draft or option that cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: Any,
        drafter: Drafter,
        generation_config: GenerationConfig | None,
        config: SpeculativeConfig,
    ):
        if is_sharded(model):
            raise ValueError(
                f"The weights of {type(model).__name__} are sharded (FSDP, ZeRO-3): all ranks would have to make the "
                "same number of steps. Use `generate(…, synced_gpus=True)`, or a whole model on every rank."
            )
        self.model, self.assistant_model, self.drafter = model, assistant_model, drafter
        self.config, self.ranks = config, Ranks.of(model)
        self._stream: torch.cuda.Stream | None = None
        self._preparations = Preparations(model)
        self.pool: BlockPool | None = None
        """The K/V blocks into which every request must fit; None until the manager has allocated them."""
        self.present_run: Callable[[], int | None] = lambda: None
        """Returns the number of the run of steps during which the models stay as they are; None if there is none."""
        self._checked_in: Hashable | None = None
        """The run in which the models were checked last."""
        self.vocab_size = model.config.get_text_config().vocab_size
        self.num_embeddings = model.get_input_embeddings().num_embeddings
        self.max_positions = _num_learned_positions(model)
        self._known_options = set(vars(GenerationConfig())) - {"tree", "speculative_config"} | set(_OBJECTS)
        self.generation_config: GenerationConfig | None = None
        self._ends = True
        self.use_defaults(generation_config)

    def use_defaults(self, generation_config: GenerationConfig | None) -> None:
        """
        Sets the default options of requests.

        Raises:
            ValueError, TypeError: if a request with these options cannot be served, be it because of the target or the
                draft.
        """
        before = self.generation_config, self._ends
        self.generation_config, self._ends = _plain(generation_config), _ends(generation_config)
        try:  # stop strings need a tokenizer, which only requests have
            self.request("check", [0], {"max_new_tokens": 1, "stop_strings": []})
        except BaseException:
            self.generation_config, self._ends = before
            raise

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

    def request(
        self,
        request_id: str,
        input_ids: Iterable[int],
        options: dict[str, Any],
        *,
        tree: Any = None,
        speculate: bool = True,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        run: Hashable | None = None,
    ) -> Request:
        """
        Makes a request, with the processors and criteria that `generate` would make of its options; for the arguments
        see `SpeculativeBatchingManager.add_request`. Models are checked, and equal options prepared and checked, once
        in a `run` (*optional*, any value; by default the engine's present one), in which nobody changes the models.

        Raises:
            ValueError, TypeError: if the request cannot be served.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"`request_id` must be a string, but is {type(request_id).__name__}: {request_id!r}.")
        if not isinstance(speculate, bool):
            raise TypeError(f"`speculate` must be True or False, but is {type(speculate).__name__}: {speculate!r}.")
        prompt = self._checked_prompt(input_ids)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"`seed` must be an integer, but is {type(seed).__name__}: {seed!r}.")
        options = self._checked_options(options)
        if generation_config is None:
            base, ends = self.generation_config, self._ends
        else:
            base, ends = _plain(generation_config), _ends(generation_config)
        if "eos_token_id" in options:
            ends = options["eos_token_id"] != -1
            if not ends:
                del options["eos_token_id"]
        run = self.present_run() if run is None else run
        with self._beside_steps():
            config, processors, criteria, found = self._preparations.prepare(prompt, base, options, run)
        if not ends:
            criteria = StoppingCriteriaList(c for c in criteria if type(c) is not EosTokenCriteria)
        criteria = self.ranks.agreeing(criteria)
        plan = None if found is None or tree is not None or seed is not None else found.get("plan")
        if plan is None:
            self._check_config(config)
            plan = self._plan(config, tree, seed if config.do_sample else None, run)
            if found is not None and tree is None and seed is None:
                found["plan"] = plan
        check_inputs(self.model, config, torch.empty(1, len(prompt), device="meta"), {}, shares_steps=True)
        with self._beside_steps():
            request = Request(
                request_id,
                prompt,
                RequestOptions(processors, criteria, bool(config.do_sample), plan if speculate else None, seed),
                execution_device(self.model),
                streaming,
                record_timestamps,
            )
        if self.max_positions is not None and request.max_length > self.max_positions:
            raise ValueError(
                f"The prompt of {len(prompt)} tokens with `max_new_tokens={request.max_length - len(prompt)}` is "
                f"longer than the {self.max_positions} positions that the model knows. Ask for fewer."
            )
        if self.pool is not None and self.pool.blocks_for(request.max_length) > self.pool.num_blocks:
            raise ValueError(
                f"The prompt of {len(prompt)} tokens with `max_new_tokens={request.max_length - len(prompt)}` can "
                f"never fit: there is memory for {self.pool.num_slots} tokens. Ask for fewer, or raise `num_blocks` "
                "or `max_memory_percent`."
            )
        return request

    def _checked_prompt(self, input_ids: Iterable[int]) -> list[int]:
        if isinstance(input_ids, (str, bytes)) or not isinstance(input_ids, Iterable):
            raise TypeError(
                f"`input_ids` must be a list of tokens, but is {type(input_ids).__name__}: {input_ids!r}. For "
                "`generate_batch`, give a list of such lists."
            )
        given = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else list(input_ids)
        try:
            prompt = list(map(operator.index, given))
        except TypeError:
            prompt = []
        if not prompt:
            raise ValueError(
                f"`input_ids` must be a list of one token or more, which are integers, but is {_shorten(given)}."
            )
        if min(prompt) < 0 or max(prompt) >= self.num_embeddings:
            raise ValueError(
                f"`input_ids` must be tokens from 0 to {self.num_embeddings - 1}, which the model knows, but is "
                f"{_shorten(prompt)}."
            )
        return prompt

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that are not None."""
        unknown = sorted(set(options) - self._known_options)
        if unknown:
            given = repr(options[unknown[0]])
            raise ValueError(
                f"`{unknown[0]}={given if len(given) <= 80 else type(options[unknown[0]]).__name__}` is not known "
                f"here. A request takes the options of a `GenerationConfig`, "
                f"{', '.join(f'`{name}`' for name in _OBJECTS)}."
            )
        _check_lengths(options)
        ends = options.get("eos_token_id")
        if isinstance(ends, str):
            raise TypeError(f"`eos_token_id` must be a token, or a list of tokens, but is {ends!r}.")
        for name in ("logits_processor", "stopping_criteria"):
            if options.get(name) is not None and not isinstance(options[name], (list, tuple)):
                raise TypeError(f"`{name}` must be a list, but is {type(options[name]).__name__}. Put it into one.")
        return {name: value for name, value in options.items() if value is not None}

    def _check_config(self, config: GenerationConfig) -> None:
        _check_lengths(vars(config))
        for name in _OUTPUTS:
            if getattr(config, name, None):
                raise ValueError(f"`{name}=True`: requests return tokens alone. Use `generate`, or leave it out.")
        if (config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"`num_return_sequences={config.num_return_sequences}`: add as many requests instead, each with a "
                "`seed` of its own."
            )
        mode = config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"The generation mode '{mode.value}' is not for requests that share their steps: they are decoded "
                "greedily or sampled. Leave the option that asks for it out (`num_beams`, `penalty_alpha`, …)."
            )

    def _plan(self, config: GenerationConfig, tree: Any, seed: int | None, run: Hashable | None) -> SpeculationPlan:
        """The `SpeculationPlan` of a request."""
        own = self.config if tree is None else replace(self.config, tree=tree)
        if seed is not None:
            if own.verification == "rejection":
                raise ValueError(
                    f"`seed={seed}` with `verification='rejection'`: what is kept would depend on the drafts, and so "
                    "on what else runs. Use verification='auto', or leave `seed` out."
                )
            own = replace(own, verification="target")
        config.tree, config.speculative_config = None, own
        call = {"assistant_model": self.assistant_model}
        is_checked = run is not None and run == self._checked_in
        check_call(self.model, GenerationMode.ASSISTED_GENERATION, config, call, checks_models=not is_checked)
        self._checked_in = run
        return SpeculationPlan.of_call(config, own, self.drafter, self.vocab_size)


def with_own_objects(options: dict[str, Any]) -> dict[str, Any]:
    """
    Options with copies of their logits processors, stopping criteria and `prefix_allowed_tokens_fn`, for a further
    request with the same options. Those of transformers that remember nothing are shared.

    Raises:
        ValueError: if one of them cannot be copied.
    """
    lists = {name: list(options[name]) for name in ("logits_processor", "stopping_criteria") if options.get(name)}
    function = options.get("prefix_allowed_tokens_fn")
    memo = kept_whole([*lists.values(), function])
    own: dict[str, Any] = {name: [_own(name, part, memo) for part in parts] for name, parts in lists.items()}
    if function is not None:
        own["prefix_allowed_tokens_fn"] = _own("prefix_allowed_tokens_fn", function, memo)
    return options | own


_REMEMBER_NOTHING = READS_SCORES_ONLY | READS_OWN_HISTORY
_REMEMBER_NOTHING |= {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}


def _own(name: str, part: Any, memo: dict[int, Any]) -> Any:
    if type(part) in _REMEMBER_NOTHING:
        return part
    try:
        return deep_copy(part, memo)
    except Exception as error:  # whatever a user's class raises while it is copied
        raise ValueError(
            f"`{name}`: {type(part).__name__} cannot be copied for each of the requests ({error}). Give it a "
            "`__deepcopy__`, or add the requests one by one, each with one of its own."
        ) from error


def _num_learned_positions(model: PreTrainedModel) -> int | None:
    """Number of learned position embeddings, past which a whole step would fail; None for a model without them."""
    decoder = model.get_decoder()
    tables = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Embedding)]
    tables += [name for name, _ in decoder.named_buffers()]
    for name in tables:
        if name.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings", "position_embedding"):
            return model.config.get_text_config(decoder=True).max_position_embeddings
    return None


def _check_lengths(options: dict[str, Any]) -> None:
    for name in ("max_new_tokens", "max_length"):
        value = options.get(name)
        if value is not None and not hasattr(value, "__index__"):
            raise TypeError(f"`{name}` must be an integer, but is {value!r}.")


def _plain(generation_config: GenerationConfig | None) -> GenerationConfig | None:
    """A copy of a config without speculation, from which `generate` prepares a plain call."""
    if generation_config is None:
        return None
    if not isinstance(generation_config, GenerationConfig):
        raise TypeError(
            f"`generation_config` must be a GenerationConfig, but is {type(generation_config).__name__}. Give its "
            "options by name, or `GenerationConfig(**options)`."
        )
    plain = copy.deepcopy(generation_config)
    plain.tree = plain.speculative_config = None
    if plain.eos_token_id == -1:
        plain.eos_token_id = None
    return plain


def _ends(generation_config: GenerationConfig | None) -> bool:
    """Whether end tokens end the texts of a config: not with `eos_token_id=-1`, as with transformers' manager."""
    return generation_config is None or generation_config.eos_token_id != -1


def _shorten(tokens: list[Any]) -> str:
    return repr(tokens) if len(tokens) <= 8 else f"{tokens[:4]!r}"[:-1] + ", …, " + f"{tokens[-3:]!r}"[1:]
