"""`StateLayer`: the states of one layer in a cache, and what the nodes of a step add to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ..states import (
    Path,
    Recurrence,
    advance_in_groups,
    convolution,
    hook,
    read_text,
    score_in_groups,
)
from .kernel_states import RunsByKernel
from .node_states import NodeStatesLayer
from .parts import PartOfCache


if TYPE_CHECKING:
    from .tree_cache import TreeCache


@dataclass
class Pending:
    """
    What the nodes of a step add to one state of a layer, until a path of them is committed.

    Args:
        conv_inputs (`torch.Tensor` of shape `[batch, channels, nodes]`): the inputs of the convolution.
        recurrence (`Recurrence`, *optional*): the kind of recurrence behind it; None for a mere convolution.
        kept (`list[dict]`): what each scan of the recurrence kept of the nodes, `[batch, nodes, …]` each.
        constants (`list[dict]`): the `Recurrence.constants` of each scan.
        text (`tuple`, *optional*): window behind a text, which is committed as a whole, and the state of each scan.
    """

    conv_inputs: torch.Tensor
    recurrence: Recurrence | None = None
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)
    constants: list[dict[str, Any]] = field(default_factory=list)
    text: tuple[torch.Tensor, list[torch.Tensor]] | None = None


class StateLayer(NodeStatesLayer, RunsByKernel, PartOfCache["TreeCache"]):
    """
    The states of a recurrent or convolutional layer, at the committed tokens of every row: `conv_states`, the last
    inputs of a convolution, `[rows, channels, taps]`, and `recurrent_states`, `[rows, …]`. Plain forwards change them
    as in transformers. Forwards over a tree leave them, as if there were none (mixers then run their code for many
    tokens), and `settle` applies the path that was accepted.
    """

    is_initialized = False
    """There are no keys and values; see `TreeCache`."""
    is_croppable = False
    is_compileable = False
    """Else `generate` would prepare the masks of prompts, in which Inkling's layers with a window have none."""

    def __init__(self, cache: TreeCache, index: int, number_of_states: int = 1):
        self.index = index
        self._had: dict[int, bool] = {}
        super().__init__(number_of_states=number_of_states)
        self.join(cache)
        self.pending: dict[int, Pending] = {}
        self.after_nodes = {}
        self.kernel_pending = {}
        self.num_read = 0
        """Tokens that plain forwards have read, padding included."""

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether mixers see a state, by its number."""
        return self._had if self.cache.topology is None else dict.fromkeys(self._had, False)

    @has_previous_state.setter
    def has_previous_state(self, value: dict[int, bool]) -> None:
        self._had = value

    # ---------------------------------------------------------------------------------------- what mixers call

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        **kwargs: Any,
    ) -> None:
        super().lazy_initialization(conv_states, recurrent_states, state_idx, **kwargs)
        if conv_states is not None:
            self._hold_window(self.conv_states[state_idx], state_idx)
        if recurrent_states is not None:
            self._hold_state(self.recurrent_states[state_idx], state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """
        In a forward over a tree, takes the inputs of a convolution, `[batch, channels, queries]`, and returns them:
        the convolution itself is `convolve`.
        """
        if self.cache.topology is None:
            hook.enter_plainly(self, state_idx, self._had[state_idx])
            self.num_read += conv_states.shape[-1] if state_idx == 0 else 0
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        if self.cache.topology.offset == 0:
            self.pending.pop(state_idx, None)
        hook.enter(self, state_idx, conv_states)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """In a forward over a tree, checks that `scan` has run, and ignores the state."""
        if self.cache.topology is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        hook.leave(self, state_idx)
        if self.recurrent_states[state_idx] is None:
            rows = self.cache.num_states or len(recurrent_states)
            self._hold_state(recurrent_states.new_zeros(rows, *recurrent_states.shape[1:]), state_idx)
        return recurrent_states

    # ------------------------------------------------------------------------------- what runs in their place

    def convolve(
        self,
        state_idx: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """The convolution at the queries; see `convolution.convolve`."""
        cache, topology, forward = self.cache, self.cache.nodes, self.cache.kernel_forward
        if self.conv_states[state_idx] is None:
            self._hold_window(inputs.new_zeros(cache.num_states or len(inputs), *weight.shape), state_idx)
        if forward is not None:
            return self.convolve_by_kernel(state_idx, inputs, weight, bias, activation, forward)
        window = self._of_rows(self.conv_states[state_idx])
        earlier, all_inputs = self.pending.get(state_idx), inputs
        if earlier is not None:
            all_inputs = torch.cat([earlier.conv_inputs, inputs], dim=2)
        outputs = convolution.convolve(window, all_inputs, weight, bias, activation, topology)
        if earlier is None:
            earlier = self.pending[state_idx] = Pending(all_inputs)
        earlier.conv_inputs = all_inputs
        if topology.counts is not None:
            path = Path.of([list(range(count)) for count in topology.counts], inputs.device)
            earlier.text = convolution.advanced(window, inputs, path), []
        return outputs

    def scan(self, state_idx: int, recurrence: Recurrence, scan: int, *args: Any, **kwargs: Any) -> Any:
        """
        The recurrence at the queries, from the arguments of transformers' function, in the mixer's call number `scan`
        of it.
        """
        forward = self.cache.kernel_forward
        if forward is not None and self.cache.topology is not None:
            return self.scan_by_kernel(state_idx, recurrence, forward, *args, **kwargs)
        inputs = recurrence.inputs(*args, **kwargs)
        topology, state = self.cache.topology, self._state_of_scan(state_idx, recurrence, scan)
        if state is None:
            state = recurrence.first_state(inputs)
        if topology is None:  # a plain forward
            length = next(iter(inputs.values())).shape[1]
            outputs, state = read_text(recurrence, state, inputs, [length] * len(state))
            return recurrence.returned(outputs, state)
        pending = self.pending[state_idx]
        pending.recurrence = recurrence
        if topology.counts is not None:
            outputs, state = read_text(recurrence, state, inputs, topology.counts, topology.prompt_counts)
            assert pending.text is not None
            pending.text[1].append(state)
            return recurrence.returned(outputs, state)
        earlier = pending.kept[scan] if scan < len(pending.kept) else None
        outputs, kept = score_in_groups(recurrence, state, inputs, earlier, topology)
        if earlier is None:
            pending.kept.append(kept)
            pending.constants.append({name: inputs[name] for name in recurrence.constants})
        else:
            pending.kept[scan] = {name: torch.cat([earlier[name], values], dim=1) for name, values in kept.items()}
        return recurrence.returned(outputs, state)

    def _state_of_scan(self, state_idx: int, recurrence: Recurrence, scan: int) -> torch.Tensor | None:
        """The state at the committed tokens of all rows that a call of the recurrence reads, if there is one."""
        held = self.recurrent_states[state_idx]
        if held is None:
            return None
        state = self._of_rows(held)
        return state[:, scan] if state.dim() > recurrence.state_dims else state

    # ----------------------------------------------------------------------------------------------- the states

    def settle(self, path: Path) -> None:
        """Commits a path of the last tree in every row, or the text that the last forward has read."""
        for number, pending in self.pending.items():
            if pending.text is not None:
                window, states = pending.text
            else:
                own = path.to(pending.conv_inputs.device)
                window = convolution.advanced(self._of_rows(self.conv_states[number]), pending.conv_inputs, own)
                states = self._advanced(number, pending, own)
            self._write(self.conv_states[number], window)
            if states:
                is_split = self.recurrent_states[number].dim() > states[0].dim()
                self._write(self.recurrent_states[number], torch.stack(states, dim=1) if is_split else states[0])
        self.settle_nodes(path)
        self.pending.clear()

    def _advanced(self, number: int, pending: Pending, path: Path) -> list[torch.Tensor]:
        """The states of all scans after a path."""
        states = []
        for scan, (kept, constants) in enumerate(zip(pending.kept, pending.constants, strict=True)):
            assert pending.recurrence is not None
            old = self._state_of_scan(number, pending.recurrence, scan)
            assert old is not None
            of_path = {name: path.of_nodes(values) for name, values in kept.items()}
            new = advance_in_groups(pending.recurrence, old, of_path | constants, path.is_on)
            moved = path.is_on.any(dim=1).view(-1, *[1] * (old.dim() - 1))
            states.append(torch.where(moved, new.to(old.dtype), old))
        return states

    @property
    def has_states(self) -> bool:
        """Whether all states have been written, and so have memory."""
        return all(window is not None for window in self.conv_states.values())

    @property
    def has_memory(self) -> bool:
        """Whether the layer has allocated its memory."""
        return self.has_states

    def view_for(self, cache: TreeCache) -> StateLayer:
        """A layer of another cache over the same states."""
        view = StateLayer(cache, self.index, self.number_of_states)
        view.share(self)
        return view

    def share(self, source: Any) -> None:
        """Takes the states of a layer, and what is pending of them, as its own."""
        self.conv_states, self.recurrent_states = source.conv_states, source.recurrent_states
        self.kernel_pending, self.conv_kernel_size = source.kernel_pending, source.conv_kernel_size
        self.dtype, self.device = source.dtype, source.device
        self.is_conv_states_initialized = source.is_conv_states_initialized
        self.is_recurrent_states_initialized = source.is_recurrent_states_initialized

    def load(self, source: LinearAttentionLayer) -> None:
        """Copies the states of a layer of a `DynamicCache`."""
        for number, had in source.has_previous_state.items():
            if had and source.conv_states[number] is not None:
                self._hold_window(source.conv_states[number].clone(), number)
                self._had[number] = True
            if had and source.recurrent_states[number] is not None:
                self._hold_state(source.recurrent_states[number].clone(), number)

    def load_rows(self, source: StateLayer, rows: list[int]) -> None:
        """Copies the states of some rows of a layer of another cache."""
        for number in self._had:
            window, state = source.conv_states[number], source.recurrent_states[number]
            if window is not None:
                self._hold_window(window[rows], number)
                self._had[number] = True
            if state is not None:
                self._hold_state(state[rows], number)

    def take_row(self, row: int, source: StateLayer, its_row: int) -> None:
        """Copies the states of a row of a layer of another cache into a row of this one."""
        for number in self._had:
            window, state = source.conv_states[number], source.recurrent_states[number]
            for states, held, hold in (
                (window, self.conv_states, self._hold_window),
                (state, self.recurrent_states, self._hold_state),
            ):
                if states is None:
                    continue
                if held[number] is None:
                    hold(states.new_zeros(self.cache.num_states or 1, *states.shape[1:]), number)
                held[number][row] = states[its_row]

    def store(self, target: LinearAttentionLayer) -> None:
        """Copies the states into a layer of a `DynamicCache`."""
        for number in self._had:
            window, state = self.conv_states[number], self.recurrent_states[number]
            if window is not None:
                if not target.is_conv_states_initialized[number]:
                    target.lazy_initialization(conv_states=window, state_idx=number)
                target.conv_states[number] = window.clone()
                target.has_previous_state[number] = True
            if state is not None:
                if not target.is_recurrent_states_initialized[number]:
                    target.lazy_initialization(recurrent_states=state, state_idx=number)
                target.recurrent_states[number] = state.clone()

    def begin_rows(self, rows: list[int], num_rows: int) -> None:
        """Sets the states of `rows` to those before any token, and makes room for `num_rows` rows."""
        for states in (self.conv_states, self.recurrent_states):
            for number, tensor in states.items():
                if tensor is None:
                    continue
                if len(tensor) < num_rows:
                    grown = tensor.new_zeros(num_rows, *tensor.shape[1:])
                    grown[: len(tensor)] = tensor
                    states[number] = tensor = grown
                if rows:
                    tensor[rows] = 0
