"""`CallArguments`: a speculative `generate` call as it reaches the decoding method."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from ..compat import cache_name_of
from ..drafters import Drafter
from ..engine.request_options import RequestOptions
from ..engine.stopping import end_tokens_of, max_length_of
from ..models.encoders import EncoderInputs
from ..plan import SpeculationPlan
from ..sequences import Sequences
from ..verification import NoiseSeed
from .stopping import have_end_tokens


@dataclass(frozen=True, eq=False)
class CallArguments:
    """
    The arguments of a call.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
        drafter (`Drafter`): proposes the trees.
        plan (`SpeculationPlan`): how this call speculates.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`), generation_config
            (`GenerationConfig`), model_kwargs (`dict`), synced_gpus (`bool`), streamer (`BaseStreamer`, *optional*),
            inputs_tensor (`torch.Tensor`, *optional*): as `generate` hands them to a decoding method.
        noise_seed (`NoiseSeed`): of the rows' noise, if they draw by position, however the call runs.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    drafter: Drafter
    plan: SpeculationPlan
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    synced_gpus: bool = False
    streamer: Any = None
    inputs_tensor: torch.Tensor | None = None
    noise_seed: NoiseSeed = field(default_factory=NoiseSeed)

    @property
    def encoder(self) -> EncoderInputs | None:
        """What the encoder of an encoder-decoder model has read; None for other models."""
        if not self.model.config.is_encoder_decoder:
            return None
        mask = self.model_kwargs.get("attention_mask")
        return EncoderInputs(self.model, self.inputs_tensor, self.model_kwargs["encoder_outputs"], mask)

    @cached_property
    def options(self) -> RequestOptions:
        """The decoding options of the rows."""
        do_sample = bool(self.generation_config.do_sample)
        size = self.model.config.get_text_config(decoder=True).vocab_size
        processors, criteria = self.logits_processor, self.stopping_criteria
        return RequestOptions(processors, criteria, do_sample, self.plan, vocab_size=size)

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """Which of the prompt's slots hold tokens, `[batch, slots]` bool; None if all do."""
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        mask = self.model_kwargs.get(f"{prefix}attention_mask")
        return None if mask is None or bool(mask.all()) else mask.bool()

    @cached_property
    def max_length(self) -> int | None:
        """Most tokens of a row, its prompt included; None for any number."""
        return max_length_of(self.stopping_criteria, self.input_ids.shape[1])

    def sequences(self) -> Sequences:
        """The rows before their first new token."""
        ids, visible = self.input_ids, self.visible
        visible = None if visible is None else visible[:, visible.shape[1] - ids.shape[1] :]
        return Sequences(ids, visible, self.max_length, end_tokens_of(self.stopping_criteria))

    @property
    def pads_ended_rows(self) -> bool:
        """Whether rows that have ended wait for others, padded; without end tokens they go on until all have."""
        return len(self.input_ids) > 1 and have_end_tokens(self.stopping_criteria)

    @property
    def pad_token(self) -> int | None:
        """The token that pads rows that have ended."""
        token = getattr(self.generation_config, "_pad_token_tensor", None)
        return None if token is None else int(token.flatten()[0])

    @property
    def cache(self) -> Cache | None:
        """The cache that `generate` was given or has made."""
        return self.model_kwargs.get(cache_name_of(self.model))

    @property
    def returns_cache(self) -> bool:
        """Whether the caller gets the cache, with K/V of all but the last token."""
        returns = self.generation_config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)
        return self.cache is not None and bool(returns)
