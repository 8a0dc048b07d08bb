"""`MuonAndAdamW`: Muon for the matrices of a draft's layers, AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


_LARGEST_RATIO = 32
"""Matrices whose sides differ by more are tables or projections to a number or two: their rows are trained apart."""
_HEAD = "lm_head"


class MuonAndAdamW(torch.optim.Optimizer):
    """
    Two optimizers as one: `torch.optim.Muon` (Keller Jordan, kellerjordan.github.io/posts/muon), whose updates are
    orthogonal matrices, for linear layers' weights, with the size of AdamW's updates ("match_rms_adamw", arXiv
    2502.16982), so that one learning rate suits both; and `torch.optim.AdamW` for embeddings, an lm_head, norms,
    biases and the narrow matrices of a Markov or confidence head.

    Args:
        model (`nn.Module`): what is trained; frozen parameters are left out.
        lr (`float`): learning rate of both.
        betas (`tuple[float, float]`): of AdamW.
        eps (`float`): of AdamW.
    """

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float], eps: float):
        named = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
        linears = {id(module.weight) for name, module in named if isinstance(module, nn.Linear) and name != _HEAD}
        linears -= {id(module.weight) for _, module in named if isinstance(module, nn.Embedding)}  # tied
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [one for one in trained if id(one) in linears and max(one.shape) <= _LARGEST_RATIO * min(one.shape)]
        chosen = set(map(id, matrices))
        others = [parameter for parameter in trained if id(parameter) not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Makes the parts read their groups, learning rates above all, where schedulers write them."""
        first = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            first += count

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the states of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
