"""Draws from a draft's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...kernels import DTYPES
from ...random_generators import generator_held
from ...verification.position_noise import DeviceNoise
from .nodes import Noise, Warp


@dataclass(frozen=True, eq=False)
class Tempered:
    """
    A `Warp` of which the temperature is apart, so that kernels can draw from the draft's logits as they are.

    Args:
        temperature (`torch.Tensor` of shape `[batch]`, float32): positive divisor of the scores of every row.
        filtered (`Callable`, *optional*): makes the scores to divide, of a dtype that kernels take, from the draft's
            logits; by default they are the logits.
        noise (`DeviceNoise`, *optional*): the noise by which children are drawn; by default its seeds come from
            torch's generator.
    """

    temperature: torch.Tensor
    filtered: Callable[[torch.Tensor], torch.Tensor] | None = None
    noise: DeviceNoise | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores before the temperature, of a dtype that kernels take."""
        if self.filtered is not None:
            return self.filtered(logits)
        return logits if logits.dtype in DTYPES else logits.float()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.scores(logits).float() / self.temperature[:, None, None]


class Drawn(NamedTuple):
    """
    Tokens drawn at the nodes of a level, `[batch, queries, count]` each.

    Args:
        tokens (int64): in the order of the draws; any token where there is none to draw.
        log_q (float32): their log-probabilities; -inf where there is none to draw.
        best (float32, *optional*): log-probabilities of the best tokens.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor
    best: torch.Tensor | None


class Draws:
    """
    The draws of one tree, level by level: by kernels from a `Tempered`, else in plain PyTorch.

    Args:
        warp (`Callable`): makes the scores of q from the draft's logits; q is their softmax.
        root_logits (`torch.Tensor` of shape `[batch, vocab]`): the draft's logits at the root.
        noise (`Callable`, *optional*): the noise by which children are drawn; see `grow`. Not for a `Tempered`.
    """

    def __init__(self, warp: Warp, root_logits: torch.Tensor, noise: Noise | None = None):
        self._warp, self._noise, self._queries = warp, noise, 0
        self._scores: list[torch.Tensor] = []
        self._seeds: torch.Tensor | None = None
        if isinstance(warp, Tempered) and warp.noise is None:
            with generator_held(root_logits.device):
                self._seeds = torch.empty(len(root_logits), dtype=torch.long, device=root_logits.device).random_()

    def draw(self, logits: torch.Tensor, count: int, with_best: bool = False) -> Drawn:
        """Draws `count` children of each node of the next level; `logits` are `[batch, queries, vocab]`."""
        level, first_query = len(self._scores), self._queries
        self._queries += logits.shape[1]
        warp = self._warp
        if isinstance(warp, Tempered):
            from hf_specdec_kernels import draw_children

            self._scores.append(scores := warp.scores(logits))
            noise: Any = {"seeds": self._seeds, "first_query": first_query}
            noise = noise if warp.noise is None else warp.noise.of_level(level)
            return Drawn(*draw_children(scores, count, temperature=warp.temperature, with_best=with_best, **noise))
        self._scores.append(scores := warp(logits))
        noise = None if self._noise is None else self._noise(level, scores)
        tokens, drawable = draw_without_replacement(scores, count, noise)
        log_q = scores.float().log_softmax(dim=-1)
        best = log_q.topk(count, dim=-1).values if with_best else None
        return Drawn(tokens, log_q.gather(-1, tokens).masked_fill(~drawable, -torch.inf), best)

    def share_out(self, *level: Any) -> Any:
        """See `hf_specdec_kernels.share_out`."""
        from hf_specdec_kernels import share_out
        from hf_specdec_kernels.budgets import BudgetedLevel, share_out_naive

        return share_out(*level) if isinstance(self._warp, Tempered) else BudgetedLevel(*share_out_naive(*level))

    def of_tree(self) -> dict[str, Any]:
        """The fields of a `DraftTree` that say from what all levels were drawn."""
        temperature = self._warp.temperature if isinstance(self._warp, Tempered) else None
        return {"scores": torch.cat(self._scores, dim=1), "temperature": temperature}


def draw_without_replacement(
    scores: torch.Tensor, count: int, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws `count` different tokens from softmax(scores), in descending order of scores + Gumbel noise (Gumbel-top-k,
    arXiv 1903.06059).

    Args:
        scores (`torch.Tensor` of shape `[…, vocab]`, float32): -inf outside the support.
        noise (`torch.Tensor`, *optional*): minus the Gumbel noise, which broadcasts to `scores`; drawn by default.

    Returns:
        `tuple`: tokens `[…, count]` int64, and whether each is in the support, `[…, count]` bool: all False where the
        scores have no softmax (NaN or +inf among them).
    """
    # Relative to the best: beside scores of 1e5, as at a temperature near zero, float32 would round the noise away.
    relative = scores - scores.amax(dim=-1, keepdim=True)  # all NaN where there is no softmax, or one of +inf
    if noise is None:
        with generator_held(scores.device):
            noise = torch.empty_like(scores).exponential_().log_()
    perturbed = (relative - noise).topk(count, dim=-1)
    drawable = (perturbed.values > -torch.inf) & perturbed.values[..., :1].isfinite()
    return perturbed.indices, drawable
