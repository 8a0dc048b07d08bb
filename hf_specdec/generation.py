"""The loop of a speculative `generate` call: propose → score → accept → commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from .attention import supports_switching, switched_to_tree_attention
from .cache import TreeCache
from .config import SpeculationPlan, SpeculativeConfig
from .drafters import Drafter, DraftRequest
from .forward import TreeForward
from .metrics import SpeculationMetrics, set_last_metrics
from .recording import Recorder, SpeculativeGenerateOutput
from .sequences import Sequences
from .stopping import ColumnJudge
from .trees import DraftTree
from .verification import TargetDistribution, Walk, choose, walk_by_rejection, walk_target
from .verification.processors import READS_SCORES_ONLY


class SpeculativeCall:
    """
    One `generate` call. All state of the call is in here, so that several threads may generate on one model.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
        drafter (`Drafter`): proposes the trees.
        plan (`SpeculationPlan`): how this call speculates.
        logits_processor (`LogitsProcessorList`), stopping_criteria (`StoppingCriteriaList`), generation_config
            (`GenerationConfig`), synced_gpus (`bool`), streamer (`BaseStreamer`, *optional*), model_kwargs (`dict`):
            as `generate` hands them to a decoding method.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        drafter: Drafter,
        plan: SpeculationPlan,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
        streamer: Any = None,
    ):
        self.model, self.plan, self.generation_config = model, plan, generation_config
        self.synced_gpus, self.streamer = synced_gpus, streamer
        self.do_sample = generation_config.do_sample
        self.metrics = SpeculationMetrics()
        self.users_cache = model_kwargs.pop("past_key_values", None)
        self.model_kwargs = model_kwargs
        self.visible = _visible(model_kwargs.get("attention_mask"))
        self.sequences = Sequences(
            input_ids,
            None if self.visible is None else self.visible[:, self.visible.shape[1] - input_ids.shape[1] :],
            max_length=_max_length(stopping_criteria),
            end_tokens=_end_tokens(stopping_criteria),
        )
        returns = generation_config.return_dict_in_generate
        self.recorder = Recorder(
            self.sequences.batch_size,
            scores=bool(returns and generation_config.output_scores),
            logits=bool(returns and generation_config.output_logits),
            attentions=bool(returns and generation_config.output_attentions),
            hidden_states=bool(returns and generation_config.output_hidden_states),
        )
        pad_token = getattr(generation_config, "_pad_token_tensor", None)
        self.judge = ColumnJudge(
            stopping_criteria,
            self.sequences,
            self.recorder,
            None if pad_token is None else int(pad_token.flatten()[0]),
            streamer,
        )
        self.target = TargetDistribution(logits_processor, self.sequences, self.recorder)
        self._steps: list[list[tuple[int, int, int]]] = [[] for _ in range(self.sequences.batch_size)]
        with self.metrics.phase("prefill"):
            self._prefill()
            warpers = LogitsProcessorList(p for p in logits_processor if type(p) in READS_SCORES_ONLY)
            request = DraftRequest(
                plan, model.config.get_text_config().vocab_size, warpers, generation_config.prefill_chunk_size
            )
            self.drafter = drafter.for_call(self.sequences, request)
        self._append_first_token()

    def run(self) -> torch.Tensor | SpeculativeGenerateOutput:
        """Generates until every row is finished."""
        phase = self.metrics.phase
        while self.model._has_unfinished_sequences(self.judge.all_finished, self.synced_gpus, self.sequences.device):
            if self.judge.all_finished:
                self._score(self._no_draft())  # other ranks still need this one's part of the forward
                continue
            with phase("propose"):
                draft = self._propose()
            with phase("score"):
                outputs = self._score(draft)
            with phase("accept"):
                walk = self._accept(draft, outputs.logits)
            with phase("commit"):
                self._commit(draft, walk, outputs)
        return self._finish()

    # ------------------------------------------------------------------------------------------------------- prefill

    def _prefill(self) -> None:
        """Forwards the whole prompt, as plain `generate` does, and keeps the logits of its last position."""
        model, sequences = self.model, self.sequences
        config = model.config.get_text_config(decoder=True)
        self.cache = TreeCache(
            config.num_hidden_layers,
            sequences.batch_size,
            sequences.device,
            capacity=_first_capacity(self._prompt_slots(), self.plan, sequences.max_length),
        )
        if self.users_cache is not None:
            self.cache.load(self.users_cache)
        outputs = model._prefill(
            sequences.columns(sequences.prompt_length).contiguous(),
            self.generation_config,
            self.model_kwargs | {"past_key_values": self.cache},
        )
        self.cache.adopt_prefill()
        # Slots before the prompt's: those of a cache that was handed in without their tokens, or of `inputs_embeds`.
        self.slots_before = self.cache.lengths[0] - sequences.prompt_length
        self.forward = TreeForward(
            model, self.cache, self.visible, self._position_shift(), model_kwargs=self._kwargs_of_steps()
        )
        self._record_prefill(outputs)
        self._prompt_logits = outputs.logits[:, -1:]

    def _prompt_slots(self) -> int:
        embeds = self.model_kwargs.get("inputs_embeds")
        past = 0 if self.users_cache is None else self.users_cache.get_seq_length()
        return past + max(self.sequences.prompt_length, 0 if embeds is None else embeds.shape[1])

    def _position_shift(self) -> torch.Tensor:
        """Position of a token minus its slot, `[…, batch]`, from what `generate` gave the prompt."""
        positions = self.model_kwargs.get("position_ids")
        slots = self.cache.lengths[0]
        if positions is not None:
            return (positions[..., -1] + 1 - slots).expand(*positions.shape[:-2], self.sequences.batch_size)
        if self.visible is not None:
            return self.visible.sum(dim=1) - slots
        return torch.zeros(self.sequences.batch_size, dtype=torch.long, device=self.sequences.device)

    def _kwargs_of_steps(self) -> dict[str, Any]:
        """What of the call's keyword arguments goes on to every later forward."""
        not_passed = ("attention_mask", "position_ids", "inputs_embeds", "logits_to_keep", "use_cache")
        return {name: value for name, value in self.model_kwargs.items() if name not in not_passed}

    def _append_first_token(self) -> None:
        """The first token comes from the prefill; it is the first root."""
        rows = list(range(self.sequences.batch_size))
        self.target.begin_step(self._prompt_logits)
        del self._prompt_logits
        tokens = choose(self.target.scores(rows, Walk.start(len(rows), rows)), self.do_sample).tolist()
        for row, token in enumerate(tokens):
            self.sequences.extend(row, [token])
        self.judge.advance()

    # -------------------------------------------------------------------------------------------------------- a step

    def _propose(self) -> DraftTree:
        running = self.sequences.resting.count(False)
        limit = self.plan.disable_by_batch_size
        self._speculates = limit is None or running <= limit
        draft = self.drafter.propose(self.sequences) if self._speculates else None
        return self._no_draft() if draft is None else draft

    def _no_draft(self) -> DraftTree:
        return DraftTree.empty(self.sequences.batch_size, self.sequences.device)

    def _score(self, draft: DraftTree) -> ModelOutput:
        """One forward of the target over the root and all draft nodes: logits `[batch, nodes + 1, vocab]`."""
        topology = draft.topology
        position_depths = None
        if draft.valid is not None:
            # Nodes that do not count may lie past the last position that the model knows.
            counts = torch.nn.functional.pad(draft.valid, (1, 0), value=True)
            position_depths = topology.depths * counts
        tokens = torch.cat([self.sequences.roots(), draft.tokens], dim=1)
        return self.forward(tokens, topology.ancestors, topology.depths, position_depths=position_depths)

    def _accept(self, draft: DraftTree, logits: torch.Tensor) -> Walk:
        rows = [row for row, rests in enumerate(self.sequences.resting) if not rests]
        self.target.begin_step(logits)
        if self.plan.uses_rejection and draft.num_nodes > 0:
            return walk_by_rejection(draft, self.target, rows)
        return walk_target(draft, self.target, rows, self.do_sample)

    def _commit(self, draft: DraftTree, walk: Walk, outputs: ModelOutput) -> None:
        self._record_step(walk, outputs)
        self.cache.keep(walk.paths)
        for row, path in enumerate(walk.paths):
            if path is None:
                continue
            drafted = draft.num_valid(row) if self._speculates else -1
            self._steps[row].append((self.sequences.lengths[row], drafted, len(path)))
            self.sequences.extend(row, walk.tokens[row])
        self.judge.advance()

    # -------------------------------------------------------------------------------------------------------- output

    def _record_prefill(self, outputs: ModelOutput) -> None:
        for name in ("attentions", "hidden_states"):
            self.recorder.add_prefill(name, getattr(outputs, name, None))

    def _record_step(self, walk: Walk, outputs: ModelOutput) -> None:
        """
        Hidden states and attentions of the visited nodes, one entry per token they gave, as plain `generate` has them.
        """
        if not self.recorder.wanted & {"attentions", "hidden_states"}:
            return
        for row, path in enumerate(walk.paths):
            nodes = [] if path is None else [0, *path]
            committed = self.cache.lengths[row]
            for depth, node in enumerate(nodes):
                if "hidden_states" in self.recorder.wanted:
                    states = tuple(layer[row : row + 1, node : node + 1].clone() for layer in outputs.hidden_states)
                    self.recorder.add_token("hidden_states", row, states)
                if "attentions" in self.recorder.wanted:
                    slots = [*range(committed), *(committed + above for above in nodes[: depth + 1])]
                    weights = tuple(
                        None if layer is None else layer[row : row + 1, :, node : node + 1, slots]
                        for layer in outputs.attentions
                    )
                    self.recorder.add_token("attentions", row, weights)

    def _finish(self) -> torch.Tensor | SpeculativeGenerateOutput:
        if self.streamer is not None:
            self.streamer.end()
        length = self.judge.judged
        self._count_steps(length)
        returns = self.generation_config.return_dict_in_generate
        cache = self.users_cache
        if cache is not None and (returns or getattr(cache, "_is_user_defined", False)):
            self._complete_cache(length)
            self.cache.store(cache, self.slots_before + length - 1)
        set_last_metrics(self.metrics)
        ids = self.sequences.columns(length).clone()
        if not returns:
            return ids
        return SpeculativeGenerateOutput(
            sequences=ids,
            scores=self.recorder.get("scores"),
            logits=self.recorder.get("logits"),
            attentions=self.recorder.get("attentions"),
            hidden_states=self.recorder.get("hidden_states"),
            past_key_values=cache,
            speculation=self.metrics,
        )

    def _count_steps(self, length: int) -> None:
        """
        Counts what was accepted and is part of the output; steps of rows that ran ahead of their end do not count.
        """
        for row, steps in enumerate(self._steps):
            end = min(length, self.sequences.lengths[row])
            kept = [(drafted, min(accepted, end - start)) for start, drafted, accepted in steps if start < end]
            self.metrics.accepted_per_step.append([accepted for _, accepted in kept])
            for drafted, accepted in kept:
                if drafted >= 0:
                    self.metrics.add_draft(drafted, accepted)

    def _complete_cache(self, length: int) -> None:
        """
        Gives every row K/V for all but the last of the `length` tokens returned: rows that finished early get those of
        their padding, which plain `generate` would have forwarded too.
        """
        wanted = self.slots_before + length - 1
        lengths = [min(cached, wanted) for cached in self.cache.lengths]
        # What a finished row holds behind its end belongs to tokens that were dropped.
        rows = range(self.sequences.batch_size)
        lengths = [min(lengths[row], self.slots_before + self.sequences.lengths[row]) for row in rows]
        if min(lengths) == wanted or self.synced_gpus:
            self.cache.set_lengths([wanted] * len(lengths))
            return
        self.cache.set_lengths(lengths)
        most = wanted - min(lengths)
        device = self.sequences.device
        starts = torch.tensor(lengths, device=device)[:, None] - self.slots_before
        positions = (starts + torch.arange(most, device=device)).clamp(max=length - 1)
        chain = torch.ones(1, most, most, dtype=torch.bool, device=device).tril()
        self.forward(self.sequences.gather(positions), chain, torch.arange(most, device=device)[None])
        self.cache.set_lengths([wanted] * len(lengths))


# -------------------------------------------------------------------------------------------------------- entry point


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter: Drafter,
    plan: SpeculationPlan,
    **call: Any,
) -> torch.Tensor | SpeculativeGenerateOutput:
    """
    Generates as `model.generate` would without an assistant, only sooner. The arguments are those of
    `SpeculativeCall`.

    On an exception, Ctrl-C included, the model's attention implementation and the random state are as they were, and a
    cache that was handed in is untouched.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_state_kept_on_error(model.device))
        for switched in filter(supports_switching, (model, *drafter.models)):
            stack.enter_context(switched_to_tree_attention(switched))
        return SpeculativeCall(model, input_ids, drafter, plan, **call).run()


def plan_of_call(
    generation_config: GenerationConfig, config: SpeculativeConfig | None, drafter: Drafter, vocab_size: int
) -> SpeculationPlan:
    """How a call with this generation config and drafter speculates; see `SpeculationPlan.resolve` for its errors."""
    return SpeculationPlan.resolve(
        SpeculativeConfig() if config is None else config,
        default_tree=drafter.default_tree,
        has_probabilities=drafter.has_probabilities,
        do_sample=bool(generation_config.do_sample),
        vocab_size=vocab_size,
    )


@contextmanager
def _random_state_kept_on_error(device: torch.device) -> Iterator[None]:
    on_cuda = device.type == "cuda"
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if on_cuda else None
    try:
        yield
    except BaseException:
        torch.set_rng_state(state)
        if on_cuda:
            torch.cuda.set_rng_state(device_state, device)
        raise


def _visible(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which of the prompt's slots hold tokens, `[batch, slots]` bool; None if all do."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


def _max_length(criteria: StoppingCriteriaList) -> int | None:
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min(lengths, default=None)


def _end_tokens(criteria: StoppingCriteriaList) -> list[int]:
    return [
        token
        for criterion in criteria
        if type(criterion) is EosTokenCriteria
        for token in torch.as_tensor(criterion.eos_token_id).flatten().tolist()
    ]


def _first_capacity(prompt_slots: int, plan: SpeculationPlan, max_length: int | None) -> int:
    """Slots for the prompt, the tree, and a first stretch of text; all of the text if that is no more."""
    nodes = plan.tree.num_nodes + 1
    stretch = max(prompt_slots, 256)
    if max_length is not None:
        stretch = min(stretch, max(max_length - prompt_slots, 0))
    return prompt_slots + stretch + nodes
