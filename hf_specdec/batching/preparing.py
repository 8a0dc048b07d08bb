"""What `generate` prepares of a request's options, so that defaults, checks and errors are its own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ..generation.inherited import idle_options_of, log_set_aside
from ..models.structure import execution_device
from ..plan import SpeculationPlan
from ..verification.processor_kinds import READS_SCORES_ONLY
from .stop_strings import with_stop_strings


OF_THE_MANAGER = ("tree", "speculative_config")
"""Options that `generate` does not prepare for a request."""


@dataclass
class Found:
    """
    What follows from options that are kept.

    Args:
        plan (`SpeculationPlan`, *optional*): plan of the requests without a tree or seed of their own; None if there
            has been none.
    """

    plan: SpeculationPlan | None = None


class Prepared(NamedTuple):
    """
    What `generate` hands to a decoding method.

    Args:
        config (`GenerationConfig`), processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`): config,
            logits processors and stopping criteria for one prompt.
        clock (`MaxTimeCriteria`, *optional*): the criterion of the option `max_time`.
        found (`Found`, *optional*): what follows from these options, for later requests to find; None for options that
            are not kept.
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    clock: MaxTimeCriteria | None = None
    found: Found | None = None

    @property
    def serves_all_prompts(self) -> bool:
        """Whether other prompts differ in `max_length` alone, and nothing here remembers what it has seen."""
        return (
            isinstance(self.config.max_new_tokens, int)
            and not (self.config.min_new_tokens or self.config.min_length)
            and all(type(processor) in READS_SCORES_ONLY for processor in self.processors)
            and all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in self.criteria)
        )

    def to_keep(self) -> Prepared:
        """
        Returns the same for later prompts. End tokens lie on the host, where requests look for them: to read them from
        the device would take as long as the work that is queued there.
        """
        criteria = StoppingCriteriaList(
            EosTokenCriteria(criterion.eos_token_id.cpu()) if type(criterion) is EosTokenCriteria else criterion
            for criterion in self.criteria
        )
        return Prepared(copy.copy(self.config), self.processors, criteria, found=Found())

    def for_length(self, prompt_length: int) -> Prepared:
        """Returns the same for a prompt of this many tokens; see `serves_all_prompts`."""
        config = copy.copy(self.config)
        config.max_length = prompt_length + config.max_new_tokens
        criteria = StoppingCriteriaList(
            MaxLengthCriteria(config.max_length, criterion.max_position_embeddings)
            if type(criterion) is MaxLengthCriteria
            else criterion
            for criterion in self.criteria
        )
        # A list of its own: rows are processed together by their values, or else by their lists; see `sharing_key`.
        return Prepared(config, LogitsProcessorList(self.processors), criteria, found=self.found)


def prepare_options(
    model: Any, prompt: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
) -> Prepared:
    """
    Config, logits processors and stopping criteria that `generate` hands to a decoding method for this prompt.
    `generate` itself prepares them, so that defaults, checks and errors are its own.

    Raises:
        ValueError: for options that `generate` refuses.
    """
    generation_config, options = with_stop_strings(model, generation_config, dict(options))
    for name in OF_THE_MANAGER:
        if getattr(model.generation_config, name) is not None:
            options[name] = None  # overrides the model's own
    given = {} if generation_config is None else vars(generation_config)
    idle = {  # set aside before `generate` makes a cache by them
        name: value
        for name, value in idle_options_of(model).items()
        if name not in options and given.get(name) is None
    }
    log_set_aside(idle)
    options |= idle
    if generation_config is not None:  # what is set goes into the config: beside it, transformers warns of both
        own = {
            name: options.pop(name)
            for name in set(options) & set(vars(generation_config))
            if options[name] is not None
        }
        generation_config = copy.copy(generation_config)
        for name, value in own.items():  # `generate` checks them, with the model's defaults
            setattr(generation_config, name, value)
    prepared = handed_over(model, prompt, generation_config, options)
    config, processors = prepared["generation_config"], prepared["logits_processor"]
    criteria, of_caller = prepared["stopping_criteria"], options.get("stopping_criteria") or ()
    clocks = [one for one in criteria if type(one) is MaxTimeCriteria and one not in of_caller]
    return Prepared(config, processors, criteria, clocks[0] if clocks else None)


def handed_over(
    model: Any, prompt: list[int], generation_config: GenerationConfig | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments that `generate` hands to a decoding method."""

    def keep(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return prepared

    ids = torch.tensor([prompt], device=execution_device(model))
    # With an explicit mask of ones, padding tokens in the prompt count as tokens.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model.generate(**inputs, generation_config=generation_config, custom_generate=keep, **options)
