"""Reading a target's hidden states while it generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.structure import decoder_layers


class Features:
    """
    Hidden states of one call: every forward of the target adds its hidden states, `take` returns and removes them.

    Args:
        boundaries (`list[int]`): which hidden states: k is the residual stream after k layers. Empty for the last
            hidden state after the final norm.
        listens (`Callable[[], bool]`, *optional*): asked at every forward whether to record it; all by default.
    """

    def __init__(self, boundaries: list[int], listens: Callable[[], bool] = lambda: True):
        self.boundaries, self._listens = tuple(boundaries), listens
        self._thread = threading.get_ident()
        self._states: list[list[torch.Tensor]] = [[] for _ in boundaries or [-1]]
        self._records_unchecked = False
        self._on_add: Callable[[], None] | None = None

    def add(self, place: int, states: torch.Tensor) -> None:
        """
        Adds a forward's hidden states at the boundary with index `place`, `[batch, tokens, Ht]`; forwards of other
        threads are ignored.
        """
        if self._records_unchecked or (threading.get_ident() == self._thread and self._listens()):
            self._states[place].append(states)
            if self._on_add is not None:
                self._on_add()

    def keep_of_last(self, start: int, end: int) -> None:
        """Drops hidden states of the last forward, except for its tokens from `start` to before `end`."""
        for states in self._states:
            if states:
                states[-1] = states[-1][:, start:end]

    def drop_padding(self, padding: list[int]) -> None:
        """Moves the rows of the last forward to the left, over so many first tokens of each."""
        for states in self._states:
            if states:
                moved = [row.roll(-first, 0) for row, first in zip(states[-1], padding, strict=True)]
                states[-1] = torch.stack(moved)

    def drop(self) -> None:
        """Drops all hidden states, as those of a forward that failed half-way."""
        for states in self._states:
            states.clear()

    def close(self) -> None:
        """Stops recording, and drops the reference to `listens`."""
        self._listens = _never

    @contextmanager
    def recorded(
        self, for_compiler: bool = False, on_add: Callable[[], None] | None = None
    ) -> Iterator[list[list[torch.Tensor]]]:
        """
        Records the forwards inside the context apart from earlier ones; yields their hidden states, a list of tensors
        per boundary.

        Args:
            for_compiler (`bool`, *optional*, defaults to `False`): whether to record every forward, without checks of
                the thread and `listens`, which cannot be traced.
            on_add (`Callable[[], None]`, *optional*): called after hidden states of a boundary have been recorded.
        """
        before, self._states = (self._states, self._on_add), [[] for _ in self._states]
        self._records_unchecked, self._on_add = for_compiler, on_add
        try:
            yield self._states
        finally:
            (self._states, self._on_add), self._records_unchecked = before, False

    def take(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """
        Returns and removes the features of all tokens forwarded since the last `take`, `[batch, tokens, features ·
        Ht]`: the hidden states of the boundaries, concatenated in their order.

        Raises:
            ValueError: if no hidden states were recorded, as in a compiled target.
        """
        parts = []
        for states in self._states:
            if not states:
                raise ValueError(
                    "`assistant_model`: the target's forward passed by the hooks that read its hidden states (a "
                    "compiled model does not run them). Call `generate` on the model that was not compiled."
                )
            parts.append(torch.cat(states, dim=1) if len(states) > 1 else states[0])
            states.clear()
        parts = [part.to(device=device, dtype=dtype) for part in parts]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


@contextmanager
def watch_features(
    model: PreTrainedModel, boundaries: list[int], listens: Callable[[], bool] = lambda: True
) -> Iterator[Features]:
    """
    Collects hidden states of the model's forwards by forward hooks on its decoder layers. (The numbering of
    `output_hidden_states` differs between versions of transformers.)

    Args:
        boundaries (`list[int]`), listens (`Callable[[], bool]`, *optional*): see `Features`.
    """
    features, handles = Features(boundaries, listens), []
    try:
        if not boundaries:
            handles.append(model.get_decoder().register_forward_hook(_hook(features, 0)))
        layers = list(decoder_layers(model)) if boundaries else []
        for place, boundary in enumerate(boundaries):
            if boundary == 0:
                hook = _before_hook(features, place)
                handles.append(layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(layers[boundary - 1].register_forward_hook(_hook(features, place)))
        yield features
    finally:
        features.close()
        for handle in handles:
            handle.remove()


def _never() -> bool:
    return False


def _hook(features: Features, place: int) -> Callable:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        features.add(place, output if isinstance(output, torch.Tensor) else output[0])

    hook.of_features = True  # type: ignore[attr-defined]
    return hook


def _before_hook(features: Features, place: int) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        features.add(place, args[0] if args else kwargs["hidden_states"])

    hook.of_features = True  # type: ignore[attr-defined]
    return hook
