"""What decides on the device how far a row goes: greedy, or draws from p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


NOTHING_TO_DRAW = -2
"""In place of the number of accepted nodes: scores without a softmax."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """
    The walk of every row: along the target's best tokens, or along tokens drawn from p.

    Args:
        temperature, top_p (`torch.Tensor` of shape `[batch]`, float32, *optional*), top_k (`torch.Tensor` of shape
            `[batch]`, int64, *optional*): what makes p, in the order temperature, top-k, top-p.
        do_sample (`bool`): whether to draw.
    """

    do_sample: bool
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None

    def walk(self, logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, **options: Any) -> Any:
        """See `hf_specdec_kernels.greedy_walk` and `target_walk`."""
        from hf_specdec_kernels import greedy_walk, target_walk

        if not self.do_sample:
            return greedy_walk(logits, tokens, parents, **options)
        uniforms = torch.rand(logits.shape[:2], dtype=torch.float64, device=logits.device)
        warpers: dict[str, Any] = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return target_walk(logits, tokens, parents, uniforms, **warpers, **options)

    def checked(self, logits: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """
        The numbers of accepted nodes, `[batch]`; where a token was drawn from logits with NaN, +inf or nothing but
        -inf, `NOTHING_TO_DRAW`.
        """
        if not self.do_sample:
            return accepted
        visited = torch.arange(path.shape[1], device=path.device) <= accepted[:, None]
        is_bad = ~logits.amax(dim=-1).gather(1, path).isfinite() & visited
        return torch.where(is_bad.any(dim=1), NOTHING_TO_DRAW, accepted)

    def load(self, warpers: Warpers) -> None:
        """Takes the values of a call of the same `key`."""
        for name, value in warpers.values.items():
            getattr(self, name).fill_(value)


@dataclass(frozen=True)
class Warpers:
    """
    The warpers of a sampling call.

    Args:
        values (`dict[str, float]`): of `temperature`, `top_k` and `top_p`, those that there are.
    """

    values: dict[str, float]

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warpers | None:
        """Those of a call; None if it has other processors, or the same in another order."""
        values: dict[str, float] = {}
        for processor in processors:
            kind, order = type(processor), tuple(values)
            if kind is TemperatureLogitsWarper and not order:
                values["temperature"] = processor.temperature
            elif kind in (TopKLogitsWarper, TopPLogitsWarper):
                name = "top_k" if kind is TopKLogitsWarper else "top_p"
                # `TopKLogitsWarper` holds the larger of k and `min_tokens_to_keep`.
                is_plain = processor.filter_value == -torch.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
                if not is_plain or name in order or "top_p" in order:
                    return None
                values[name] = getattr(processor, name)
            else:
                return None
        return cls(values)

    def verdict(self, batch_size: int, do_sample: bool, device: torch.device) -> Verdict:
        """Room for the values of calls with these warpers."""
        dtypes = {"temperature": torch.float32, "top_k": torch.long, "top_p": torch.float32}
        return Verdict(
            do_sample, **{name: torch.ones(batch_size, dtype=dtypes[name], device=device) for name in self.values}
        )
