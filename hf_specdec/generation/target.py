"""The target in one call: its prefill, its forwards over trees, and the cache they share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.utils import ModelOutput

from ..cache import TreeCache
from ..compat import CHUNKS_BEHIND_A_CACHE, cache_name_of
from ..forwards.node_inputs import causal_chain
from ..forwards.target import TreeTarget
from ..forwards.tree_forward import TreeForward
from ..forwards.whole_prompt import read_whole, shift_after
from ..graphs import GraphLoans
from ..models.positions import may_refuse, num_positions, said_positions
from ..models.structure import num_decoder_layers
from ..sequences import Sequences
from ..states import is_attention_free, layer_kinds_of
from ..trees import DraftTree
from .arguments import CallArguments
from .prefill import can_prefill_in_chunks, prefill_in_chunks


class Target(TreeTarget):
    """
    The target model in one call, with its cache.

    Args:
        call (`CallArguments`): the call.
        sequences (`Sequences`): the rows.
        num_nodes (`int`): most draft nodes of a step.
        loans (`GraphLoans`, *optional*): lend the memory of CUDA graphs.
    """

    def __init__(self, call: CallArguments, sequences: Sequences, num_nodes: int, loans: GraphLoans | None = None):
        model = call.model
        super().__init__(model)
        self.cache_name = cache_name_of(model)
        self.sequences, self.visible, self.generation_config = sequences, call.visible, call.generation_config
        self.model_kwargs = {name: value for name, value in call.model_kwargs.items() if name != self.cache_name}
        self.users_cache: Any = call.cache
        """The cache that `generate` was given or has made, and returns."""
        self.cache = TreeCache(
            num_decoder_layers(model),
            sequences.batch_size,
            sequences.device,
            capacity=self._first_capacity(num_nodes),
            storage=None
            if loans is None
            else loans.store(model, sequences.batch_size, self._last_capacity(num_nodes)),
            kinds=layer_kinds_of(model),
        )
        if self.was_given_a_cache:
            self.cache.load(self.users_cache)
        self._has_padding = False
        has_encoder = any(
            self.model_kwargs.get(name) is not None for name in ("encoder_hidden_states", "encoder_outputs")
        )
        self.encoder_cache = DynamicCache() if has_encoder else None
        """K/V of `encoder_hidden_states`, which the first forward computes."""

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(self) -> ModelOutput:
        """
        Forwards the whole prompt: as plain `generate` does, or in chunks, where `can_prefill_in_chunks`.

        Returns:
            `ModelOutput`: the model's output, with logits of the last position at least, `[batch, positions, vocab]`.

        Raises:
            ValueError: if the target reads the prompt past the cache that it was given.
        """
        if self.cache.storage is not None:
            before = self.cache.lengths
            self.cache.set_lengths([self._prompt_slots()] * self.sequences.batch_size)
            self._begin_steps()
            if can_prefill_in_chunks(self):
                return prefill_in_chunks(self)
            self.cache.set_lengths(before)
        with self.running():
            outputs = read_whole(
                self.model,
                self.cache,
                self.sequences.columns(self.sequences.prompt_length).contiguous(),
                self._config_of_prefill(),
                self.model_kwargs,
                self.features is not None,
                self.encoder_cache,
            )
        self._begin_steps()
        return outputs

    def _begin_steps(self) -> None:
        """Builds the `TreeForward` that runs the steps after the prompt."""
        # Slots before the prompt's tokens: of a cache that was passed without its tokens, or of `inputs_embeds`.
        self.slots_before = self.cache.lengths[0] - self.sequences.prompt_length
        shift, visible = shift_after(self.model, self.model_kwargs, self.visible, self.cache), self.visible
        if visible is not None:
            # Slots for which `generate` has no mask hold the features of images, before the prompt.
            visible = torch.nn.functional.pad(visible, (self.cache.lengths[0] - visible.shape[1], 0), value=True)
        self.sequences.most_known, last = self._known_positions(shift)
        self.forward = TreeForward(
            self.model,
            self.cache,
            visible,
            shift,
            model_kwargs=self._kwargs_of_steps(),
            prepares_inputs=True,
            max_position=last,
            features=self.features,
            encoder_cache=self.encoder_cache,
        )

    def _known_positions(self, shift: torch.Tensor) -> tuple[int | None, int | None]:
        """
        Tokens of a row whose positions the model knows, and the last of these; None for any number, and if it has read
        a longer prompt all the same. The row with the largest positions counts: plain `generate` goes on with rows
        that have finished.
        """
        known = num_positions(self.model)
        if known is None:
            return None, None
        most = self._length_with(known, shift)
        return (most, known - 1) if most >= self.sequences.prompt_length else (None, None)

    def _length_with(self, num_positions: int, shift: torch.Tensor) -> int:
        return num_positions - int(shift.max()) - self.slots_before

    def _config_of_prefill(self) -> GenerationConfig:
        """
        The generation config of the prefill: the call's, but without chunks after a filled cache before transformers
        5.23, which forwards these wrongly, or for a target without attention, for which it refuses them.
        """
        config = self.generation_config
        if config.prefill_chunk_size is None:
            return config
        if not is_attention_free(self.model) and (CHUNKS_BEHIND_A_CACHE or self.cache.get_seq_length() == 0):
            return config
        config = copy.copy(config)
        config.prefill_chunk_size = None
        return config

    @property
    def was_given_a_cache(self) -> bool:
        """Whether `generate` was given a cache, rather than having made its own."""
        return getattr(self.users_cache, "_is_user_defined", False)

    def _first_capacity(self, num_nodes: int) -> int:
        """Slots for the prompt, the tree, and a first stretch of new text (or all of it, if it is shorter)."""
        prompt = self._prompt_slots()
        stretch = max(prompt, 256)
        if self.sequences.max_length is not None:
            stretch = min(stretch, max(self.sequences.max_length - self.sequences.prompt_length, 0))
        return prompt + stretch + num_nodes + 1

    def _last_capacity(self, num_nodes: int) -> int:
        """Slots for the prompt, the tree, and all new text."""
        new_tokens = max(self.sequences.expected_length - self.sequences.prompt_length, 0)
        return self._prompt_slots() + new_tokens + num_nodes + 1

    def _prompt_slots(self) -> int:
        embeds = self.model_kwargs.get("inputs_embeds")
        past = self.users_cache.get_seq_length() if self.was_given_a_cache else 0
        return past + max(self.sequences.prompt_length, 0 if embeds is None else embeds.shape[1])

    def _kwargs_of_steps(self) -> dict[str, Any]:
        """The call's keyword arguments that every forward after the prefill gets, too."""
        not_passed = {"attention_mask", "position_ids", "inputs_embeds", "logits_to_keep", "use_cache"}
        if self.model.config.is_encoder_decoder:  # whose `attention_mask` is that of the encoder
            not_passed = {"decoder_attention_mask", "decoder_position_ids", "use_cache"}
        return {name: value for name, value in self.model_kwargs.items() if name not in not_passed}

    # --------------------------------------------------------------------------------------------------------- steps

    def score(self, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """Forwards the root and all draft nodes at once; see `score_nodes`."""
        return self.score_nodes(self.sequences.roots(), draft)

    def gives_up_positions(self, draft: DraftTree) -> bool:
        """
        Whether a `score` that failed may succeed without the draft nodes and the rows that are ahead. From then on the
        model is taken to know no positions past those of its config.
        """
        said = said_positions(self.model)
        if said is None or self.sequences.most_known is not None:
            return False
        most = self._length_with(said, self.forward.position_shift)
        ahead = said - most  # positions of a row minus its tokens
        lengths = self.sequences.shortest + ahead, self.sequences.longest + ahead
        if not may_refuse(self.model, *lengths, draft.topology.depth):
            return False
        self.sequences.rest_at(most)
        self.forward.max_position = said - 1
        return True

    def pass_last_position(self, length: int) -> None:
        """
        Forwards the last of `length` tokens per row, at a position that the model is taken not to know: raises what
        plain `generate` raises there. Commits nothing.
        """
        self.forward.max_position = None
        ends = torch.tensor(self.cache.lengths, device=self.sequences.device)[:, None]
        with self.running():
            self.forward(
                self.sequences.roots(),
                *causal_chain(1, self.sequences.device),
                position_depths=self.slots_before + length - 1 - ends,
            )

    def settle(self, length: int | None = None) -> None:
        """
        Applies what a step has committed to the states of layers, but for the last token of every row: an end token
        may have been accepted as a draft, and plain `generate` forwards it only if other rows go on. `length` is that
        of the whole text, once it is known.
        """
        if self.cache.state_layers:
            self.cache.settle(self._committed(length))

    def _committed(self, length: int | None) -> list[int]:
        """Slots of every row without its last token, of at most `length` tokens."""
        ends = self.sequences.lengths
        return [self.slots_before + (end if length is None else min(end, length)) - 1 for end in ends]

    def _text_slots(self, length: int) -> list[int]:
        """
        Slots of every row that a cache of a text of `length` tokens goes on from: K/V past the end of a finished row
        belong to tokens that were dropped, and states are without its last one.
        """
        return list(map(min, self.cache.lengths, self._committed(length)))

    # -------------------------------------------------------------------------------------------- the cache at the end

    def hand_back_from(self, length: int) -> None:
        """As `hand_back`, for K/V that were computed elsewhere and copied into the cache."""
        lengths = self.cache.lengths
        self.cache.set_lengths([self.sequences.prompt_length] * len(lengths))
        self._begin_steps()
        self.cache.set_lengths(lengths)
        if self.lacks_padding(length):
            self.read_padding(length)
        self.hand_back(length)

    def hand_back(self, length: int) -> None:
        """Fills the cache that `generate` returns with K/V for all but the last of `length` tokens per row."""
        wanted = self.slots_before + length - 1
        self.cache.set_lengths([wanted] * len(self.cache.lengths))
        users_cache = self.users_cache
        if isinstance(users_cache, EncoderDecoderCache) and self.encoder_cache is not None:
            users_cache.cross_attention_cache = self.encoder_cache
            users_cache.is_updated = dict.fromkeys(range(len(self.encoder_cache)), True)
            users_cache = users_cache.self_attention_cache
        self.cache.store(users_cache, wanted)

    def lacks_padding(self, length: int) -> bool:
        """Whether `read_padding` has to come before `hand_back`."""
        return not self._has_padding and min(self._text_slots(length)) < self.slots_before + length - 1

    def read_padding(self, length: int) -> tuple[ModelOutput, list[int], list[int], int]:
        """
        Forwards the padding of rows that finished early, and their last token, for their K/V and states, as plain
        `generate` does.

        Returns:
            `tuple`: the output; for every row, slots before these nodes, and how many are its; the prompt's slots.
        """
        lengths, self._has_padding = self._text_slots(length), True
        self.cache.set_lengths(lengths)
        device = self.sequences.device
        most = self.slots_before + length - 1 - min(lengths)
        starts = torch.tensor(lengths, device=device)[:, None] - self.slots_before
        # Where a row is complete, copies of its last token follow, at a position that the model has.
        columns = (starts + torch.arange(most, device=device)).clamp(max=length - 2)
        tokens, depths = self.sequences.gather(columns), columns - starts
        counts = [self.slots_before + length - 1 - end for end in lengths]
        outputs = self.forward(
            tokens,
            *causal_chain(most, device),
            position_depths=depths,
            logits_to_keep=1,
            counts=counts,
            prompt_counts=[0] * len(counts),
        )
        self.cache.keep_text(counts)
        return outputs, lengths, counts, self.slots_before + self.sequences.prompt_length
