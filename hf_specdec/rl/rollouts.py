"""`rollouts`: a context in which the calls by which a trainer asks its policy for texts speculate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..batching.keeping import keep
from ..batching.methods import METHODS
from ..config import SpeculativeConfig
from ..drafters import as_drafter
from ..engine.request import SpeculativeGenerationOutput
from ..generation.named_drafts import named_draft
from ..metrics import SpeculationMetrics
from ..trees import TokenTree
from .online_head import OnlineHead
from .policy import Shapes, base_of, writing


TRAINERS_SHARE = 0.5
"""Share of a GPU's free memory that K/V take where no config says it, as with TRL: training needs the rest."""

_open: WeakKeyDictionary[PreTrainedModel, Rollouts] = WeakKeyDictionary()
"""The rollouts of every model in whose context we are. Not an attribute: trainers copy their models."""


def open_rollouts(model: PreTrainedModel) -> Rollouts | None:
    """The rollouts in whose context a model's `generate_batch` is called; None outside."""
    return _open.get(model)


class Rollouts:
    """
    See `rollouts`, which makes it. As a function of prompts and a trainer it is a `rollout_func` of TRL's trainers.

    Args:
        model (`PreTrainedModel`), assistant_model, config (`SpeculativeConfig`), continuous_batching_config
            (`ContinuousBatchingConfig`, *optional*), warmup (`bool`): as there, the draft loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: Any,
        config: SpeculativeConfig,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        warmup: bool = False,
    ):
        self.model, self.assistant_model, self.config = model, assistant_model, config
        self.continuous_batching_config, self.warmup = continuous_batching_config, warmup
        self.metrics: list[SpeculationMetrics] = []
        """Speculation counts of every call so far, all its texts together."""

    def __enter__(self) -> Rollouts:
        if self.model in _open:
            raise ValueError("`model` is in a context of `rollouts` already. Leave it first.")
        self._shapes = Shapes(self.model)
        _open[self.model] = self
        return self

    def __exit__(self, *_: Any) -> None:
        _open.pop(self.model, None)
        METHODS["destroy_cached_continuous_batching_manager"](self.model)

    def generate_batch(
        self,
        inputs: list[list[int] | Mapping[str, Any]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *args: Any,
        **options: Any,
    ) -> dict[str, SpeculativeGenerationOutput]:
        """
        The model's `generate_batch` with the draft of the context, the model ready to write and the manager kept.

        Raises:
            ValueError, TypeError: for a call that cannot be served, or a policy of other shapes than before.
            RuntimeError: if a step or a request fails: nothing is trained on half a text.
        """
        self._shapes.check(self.model)
        limits = continuous_batching_config or self._limits()
        draft = {"assistant_model": self.assistant_model, "speculative_config": self.config}
        with writing(self.model):
            if self.warmup:
                manager = METHODS["init_continuous_batching"](self.model, generation_config, limits, **draft)
                if not manager.was_kept:
                    manager.warmup(at_once=True)
                keep(manager)
            options |= {"persistent_manager": True}
            outputs = METHODS["generate_batch"](
                self.model, inputs, generation_config, limits, *args, **options, **draft
            )
            for number, output in enumerate(outputs.values()):
                if output.error is not None:
                    raise RuntimeError(f"`rollouts`: the text after prompt {number} has failed: {output.error}")
            self.metrics.append(SpeculationMetrics.sum_of(output.speculation for output in outputs.values()))
            if isinstance(self.assistant_model, OnlineHead):
                texts = [(output.prompt_ids, output.generated_tokens) for output in outputs.values()]
                self.assistant_model.learn(self.model, texts)
        return outputs

    def _limits(self) -> ContinuousBatchingConfig | None:
        if self.continuous_batching_config is not None or self.model.device.type == "cpu":
            return self.continuous_batching_config
        return ContinuousBatchingConfig(max_memory_percent=TRAINERS_SHARE)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """
        A `rollout_func` of TRL's `GRPOTrainer`: a text for every prompt, with the log-probabilities of its tokens as
        they were drawn, after temperature and filters.

        Args:
            prompts (`list`): what the trainer's data set has as prompts, each as often as it is to be answered.
            trainer (`GRPOTrainer`): the trainer, whose policy is the model of the context.

        Returns:
            `dict`: `prompt_ids`, `completion_ids` and `logprobs`, lists with an entry for every prompt.

        Raises:
            ValueError: outside the context, for another policy, or prompts with images.
        """
        if _open.get(self.model) is not self:
            raise ValueError("`rollout_func`: train inside the context: `with rollouts(…) as rollout_func:`.")
        prompt_ids, images, inputs = trainer._tokenize_prompts(prompts)
        if images is not None or inputs:
            raise ValueError("`rollout_func`: prompts with images are not served. Leave `rollout_func` out.")
        with ExitStack() as stack:
            policy = base_of(stack.enter_context(_whole(trainer)))
            if policy is not self.model:
                raise ValueError(
                    "`rollout_func`: the trainer's policy is not the model of the context. Give `rollouts` the model "
                    "that the trainer got."
                )
            stack.enter_context(torch.no_grad())
            stack.enter_context(trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False))
            config, limits = trainer.generation_config, trainer.continuous_batching_config
            outputs = list(self.generate_batch(prompt_ids, config, limits, top_logprobs=0).values())
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [output.generated_tokens for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }


def rollouts(
    model: Any,
    assistant_model: Any,
    tree: Any = None,
    *,
    speculative_config: SpeculativeConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    warmup: bool = False,
) -> Rollouts:
    """
    A context in which `model.generate_batch` without a draft of its own speculates with this one: that of a trainer
    which is left as it is (TRL's `GRPOConfig(use_transformers_continuous_batching=True)`), or the context itself as
    TRL's `rollout_func`. The manager stays between the calls, with its memory and its CUDA graphs; only those over
    weights that have moved are captured again, and K/V that texts share are dropped when weights have changed. The
    model writes in evaluation mode, and in the dtype of its weights, whatever autocast it trains with.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the policy, the very object that is trained.
        assistant_model: a head, draft model, drafter, Hub id or folder; an `OnlineHead` learns from every call.
        tree (*optional*, defaults to `"auto"`): as in `generate_batch`, unless there is a `speculative_config`.
        speculative_config (`SpeculativeConfig`, *optional*): how requests speculate.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*): limits of calls that give none; by default
            half of a GPU's free memory.
        warmup (`bool`): whether a manager captures and times its steps before its first texts, for up to
            `max_requests_per_batch` rows (256 by default), instead of as they come.

    Returns:
        `Rollouts`: the context. Its `metrics` has the `SpeculationMetrics` of every call.

    Raises:
        ValueError, TypeError: for a model or draft that cannot be served.
    """
    policy = base_of(model)
    if isinstance(assistant_model, str | PathLike):
        assistant_model = named_draft(policy, assistant_model)
    drafter = as_drafter(assistant_model)
    options = GenerationConfig()
    options.tree, options.speculative_config = tree, speculative_config
    config = SpeculativeConfig.from_generation_config(options) or SpeculativeConfig(tree="auto")
    drafter.check(policy, TokenTree.chain(1))
    return Rollouts(policy, assistant_model, config, continuous_batching_config, warmup)


def _whole(trainer: Any) -> Any:
    """TRL's context with the policy out of its wrappers, and whole where processes have parts of it."""
    from trl.models import unwrap_model_for_generation

    return unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
