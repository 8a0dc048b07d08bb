"""
A target with random weights, and a draft that agrees with it to an adjustable degree.

The draft is the target's first two layers, with its embeddings, norm and lm_head. The output projections of the
target's later layers are scaled by ε: at ε = 0 target and draft are one function; with larger ε they agree less.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, BatchEncoding, PreTrainedModel

from hf_specdec.benchmarking.comparison import generate
from hf_specdec.benchmarking.contenders import GREEDY, Contender, speculative
from hf_specdec.benchmarking.prompts import EncodedPrompt
from hf_specdec.metrics import SpeculationMetrics, metrics_of_last_call

from .sizes import Sizes, random_llama, tree_of


DRAFT_LAYERS = 2
ACCEPTANCE_LENGTH, TOLERANCE = 4.5, 0.1
TREE = tree_of(num_nodes=32, depth=5)

FIRST_STEP = 2.0
"""Ratio of successive values of ε while `bisect` looks for a bracket."""
NARROW = 1.06
"""Ratio of a bracket's ends from which on `bisect` tries other prompts, too."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """
    Result of a calibration.

    Args:
        epsilon (`float`): the ε that was found.
        prompts (`int`): number of the set of random prompts, see `Pair.draw_prompts`.
        acceptance_length (`float`): tokens per step with this ε and these prompts.
        tried (`list[tuple[float, int, float]]`): every (epsilon, prompts, acceptance length) that was tried.
    """

    epsilon: float
    prompts: int
    acceptance_length: float
    tried: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Whether the acceptance length is within the tolerance of the wanted one."""
        return abs(self.acceptance_length - ACCEPTANCE_LENGTH) <= TOLERANCE


class Pair:
    """
    A random target, its draft and random prompts.

    Args:
        sizes (`Sizes`): sizes of the target and of the prompts.
        dtype (`torch.dtype`), device (`str`): dtype and device of target and draft.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str):
        self.sizes, self.epsilon = sizes, 1.0
        self.target = random_llama(sizes.shape, dtype, device)
        self.draft = first_layers(self.target, DRAFT_LAYERS)
        self.draw_prompts(0)

    def draw_prompts(self, number: int) -> None:
        """Replaces the prompts by the set of random prompts of this number."""
        first = number * self.sizes.num_prompts
        self.prompts = [self._prompt(seed) for seed in range(first, first + self.sizes.num_prompts)]

    def _prompt(self, seed: int) -> EncodedPrompt:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.sizes.shape["vocab_size"], (1, self.sizes.prompt), generator=generator, device="cpu")
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return EncodedPrompt("random tokens", inputs.to(self.target.device))

    def scale(self, epsilon: float) -> None:
        """Sets ε. Each call rounds the weights again, which does not matter for random weights."""
        with torch.no_grad():
            for layer in self.target.model.layers[DRAFT_LAYERS:]:
                layer.self_attn.o_proj.weight.mul_(epsilon / self.epsilon)
                layer.mlp.down_proj.weight.mul_(epsilon / self.epsilon)
        self.epsilon = epsilon

    def contender(self, compiles: bool = False) -> Contender:
        """The contender that speculates with the draft and `TREE`."""
        return speculative(self.draft, str(TREE), compiles)

    def metrics(self, contender: Contender, max_new_tokens: int) -> SpeculationMetrics:
        """The pooled metrics of a contender's greedy calls on all prompts."""
        found = []
        for prompt in self.prompts:
            generate(self.target, contender, prompt, **GREEDY, max_new_tokens=max_new_tokens)
            found.append(metrics_of_last_call())
        return SpeculationMetrics.sum_of(found)

    def in_float32(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Copies of target and draft with their weights in float32."""
        return copy.deepcopy(self.target).float(), copy.deepcopy(self.draft).float()


def first_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of copies of the target's first layers, embeddings, norm and lm_head."""
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": num_layers})
    with torch.device(target.device):
        draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype).eval()
    draft.load_state_dict(target.state_dict(), strict=False)
    return draft


def calibrate(pair: Pair, contender: Contender) -> Calibration:
    """
    Finds an ε and random prompts with which a contender, the one that is timed later, makes 4.5 ± 0.1 tokens per step
    on the texts that are timed, and sets them on `pair`. Another contender may make more or fewer with the same: where
    steps are compiled, roundings differ, and with them the texts of random weights.
    """

    def acceptance_length(epsilon: float, prompts: int) -> float:
        pair.scale(epsilon)
        pair.draw_prompts(prompts)
        return pair.metrics(contender, pair.sizes.max_new_tokens).mean_acceptance_length

    found = bisect(acceptance_length, ACCEPTANCE_LENGTH, TOLERANCE)
    pair.scale(found.epsilon)
    pair.draw_prompts(found.prompts)
    return found


def bisect(
    acceptance_length: Callable[[float, int], float],
    wanted: float,
    tolerance: float,
    guess: float = 0.025,
    most: int = 18,
) -> Calibration:
    """
    Finds an ε with a wanted acceptance length: first a bracket around it, then bisection of log ε.

    Greedy texts change abruptly with ε, and so does the acceptance length: once the bracket is narrow, other prompts
    are tried.

    Args:
        acceptance_length (`Callable[[float, int], float]`): acceptance length of an ε and a number of prompts; falls
            with ε except for jumps.
        wanted (`float`): the acceptance length to reach.
        tolerance (`float`): largest distance from `wanted`.
        guess (`float`): the first ε.
        most (`int`): most evaluations of `acceptance_length`.
    """
    tried: list[tuple[float, int, float]] = []
    low, high, epsilon, prompts = 0.0, math.inf, guess, 0
    while len(tried) < most:
        length = acceptance_length(epsilon, prompts)
        tried.append((epsilon, prompts, length))
        if abs(length - wanted) <= tolerance:
            break
        if prompts == 0:
            low, high = (epsilon, high) if length > wanted else (low, epsilon)
        if high == math.inf:
            epsilon *= FIRST_STEP
        elif low == 0.0:
            epsilon /= FIRST_STEP
        else:
            epsilon = math.sqrt(low * high)
            prompts += high <= NARROW * low
    epsilon, prompts, length = min(tried, key=lambda item: abs(item[2] - wanted))
    return Calibration(epsilon=epsilon, prompts=prompts, acceptance_length=length, tried=tried)
