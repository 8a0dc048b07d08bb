"""Verification on the device: walks along the best tokens, by draws from p, or by rejection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import DTYPES
from ...trees import DraftTree
from ...verification import DeviceNoise, Verifier
from .drawing import Drawing
from .processing import KERNEL_FILTERS


NOTHING_TO_DRAW = -2
"""Reported in place of the number of accepted nodes where a token was drawn from logits without a softmax."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """
    The walk of every row: along the target's best tokens, along tokens drawn from p, which may be by the noise of
    their positions, or by rejection.

    Args:
        kind (`Verifier`): how rows are verified.
        drawing (`Drawing`, *optional*): for `REJECTION`, the distribution from which children were drawn.
        noise (`DeviceNoise`, *optional*): for `BY_POSITION`.
    """

    kind: Verifier
    drawing: Drawing | None = None
    noise: DeviceNoise | None = None

    def walk(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        draft: DraftTree,
        by_depth: torch.Tensor | None = None,
        warpers: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """
        Walks every row; see `hf_specdec_kernels.greedy_walk`, `chosen_walk`, `target_walk` and `rejection_walk` for
        options and result.

        Args:
            by_depth (`torch.Tensor` of shape `[batch, depth + 1]`, float64, *optional*): uniform random numbers, by
                depth; where they are negative or not given, torch's generator draws them.
            warpers (`dict[str, torch.Tensor]`, *optional*): values of the warpers that make p from the logits:
                `temperature`, `top_k` and `top_p`.
        """
        from hf_specdec_kernels import chosen_walk, greedy_walk, rejection_walk, target_walk

        topology = draft.topology
        if self.kind == Verifier.GREEDY:
            return greedy_walk(logits, tokens, topology.parents, **options)
        if self.kind == Verifier.BY_POSITION:
            chosen = self._drawn_by_position(logits, topology.depths, warpers or {})
            return chosen_walk(chosen, tokens, topology.parents, **options)
        uniforms = torch.rand(logits.shape[:2], dtype=torch.float64, device=logits.device)
        if by_depth is not None:
            given = by_depth.gather(1, topology.depths.expand(uniforms.shape))
            uniforms = torch.where(given >= 0, given, uniforms)
        options |= warpers or {}
        if self.kind == Verifier.FROM_TARGET:
            return target_walk(logits, tokens, topology.parents, uniforms, **options)
        assert self.drawing is not None and draft.scores is not None and isinstance(draft.score_index, torch.Tensor)
        return rejection_walk(
            logits,
            draft.scores,
            tokens,
            topology.parents,
            uniforms,
            draft_index=draft.score_index,
            draft_columns=self.drawing.columns,
            draft_temperature=draft.temperature,
            **options,
        )

    def _drawn_by_position(self, logits: torch.Tensor, depths: torch.Tensor, warpers: dict[str, Any]) -> torch.Tensor:
        """The token drawn from p at every node, `[batch, nodes]`."""
        from hf_specdec_kernels import filter_logits

        assert self.noise is not None
        logits, temperature = logits if logits.dtype in DTYPES else logits.float(), warpers.get("temperature")
        filters = {name: warpers[name] for name in KERNEL_FILTERS if warpers.get(name) is not None}
        if filters:
            logits = filter_logits(logits, temperature=temperature, **filters)
        return self.noise.draw_at_nodes(logits, depths, temperature)


def checked(draws: torch.Tensor, highest: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """
    The numbers of accepted nodes, `[batch]`; `NOTHING_TO_DRAW` in rows that draw (`draws`, `[batch]` bool) where a
    token was drawn from logits with NaN, +inf or nothing but -inf. `highest` (`[batch, nodes]`) are the largest logits
    of all nodes.
    """
    visited = (torch.arange(path.shape[1], device=path.device) <= accepted[:, None]) & draws[:, None]
    is_bad = ((highest - highest).gather(1, path) != 0) & visited  # what is not finite leaves NaN
    return accepted.masked_fill(is_bad.any(dim=1), NOTHING_TO_DRAW)
