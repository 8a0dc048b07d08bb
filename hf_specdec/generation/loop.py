"""The loop of a speculative `generate` call: propose → score → accept → commit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from ..attention import supports_switching, switched_to_tree_attention
from ..compat import CACHE
from ..config import SpeculationPlan
from ..drafters import Drafter, DraftRequest
from ..engine.request import RequestOptions
from ..engine.stopping import end_tokens_of, max_length_of
from ..forwards.outputs import returning_named_outputs
from ..graphs import GraphLoans, graph_loans
from ..metrics import SpeculationMetrics, StepLog, set_last_metrics
from ..ranks import Ranks
from ..sequences import Sequences
from ..trees import DraftTree, choice_of
from ..verification import (
    DraftBackoff,
    DraftTemperature,
    Verifier,
    Walk,
    rows_with_nan,
)
from .recording import Recorder, SpeculativeGenerateOutput
from .rows import CallRows
from .stopping import ColumnJudge
from .target import Target


class SpeculativeCall:
    """
    A speculative `generate` call. All state of the call is in here, so that several threads may generate on one model.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, prompt]`, int64): the prompts.
        drafter (`Drafter`): proposes the trees; this call's own copy.
        plan (`SpeculationPlan`): how this call speculates.
        loans (`GraphLoans`): lend the memory of CUDA graphs.
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
        loans: GraphLoans,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
        streamer: Any = None,
    ):
        self.drafter, self.plan, self.generation_config = drafter, plan, generation_config
        self.loans = loans
        self.synced_gpus, self.streamer = synced_gpus, streamer
        self.do_sample = bool(generation_config.do_sample)
        self.ranks = Ranks.of(model)
        self.temperature = DraftTemperature(plan.draft_temperature or 1.0, adapts=plan.draft_temperature is None)
        self.metrics, self.log = SpeculationMetrics(), StepLog(len(input_ids))
        self.draft_backoff, self._gave_up_drafts = DraftBackoff(), False
        visible = _visible(model_kwargs.get("attention_mask"))
        self.sequences = Sequences(
            input_ids,
            None if visible is None else visible[:, visible.shape[1] - input_ids.shape[1] :],
            max_length=max_length_of(stopping_criteria, input_ids.shape[1]),
            end_tokens=end_tokens_of(stopping_criteria),
        )
        asked = None if self.sequences.max_length is None else self.sequences.max_length - input_ids.shape[1]
        self.choice = choice_of(plan.tree, model, drafter.times_key, (len(input_ids), self.do_sample), asked)
        num_nodes = plan.tree.num_nodes
        self.target = Target(model, self.sequences, visible, generation_config, model_kwargs, num_nodes, loans)
        self.recorder = Recorder.of_call(len(input_ids), generation_config, self.target.users_cache)
        pad_token = getattr(generation_config, "_pad_token_tensor", None)
        pad_token = None if pad_token is None else int(pad_token.flatten()[0])
        criteria = self.ranks.agreeing(stopping_criteria)
        self.judge = ColumnJudge(criteria, self.sequences, self.recorder, pad_token, streamer)
        self.options = RequestOptions(logits_processor, stopping_criteria, self.do_sample, plan)
        self.rows = CallRows(self.options, self.sequences, self.recorder, self.judge, self.ranks.agree)

    def run(self) -> torch.Tensor | SpeculativeGenerateOutput:
        """Generates until every row is finished."""
        phase, model = self.metrics.phase, self.target.model
        self.ranks.share_random_state()
        self.noises = self.rows.draw_by_position() if self.plan.draws_by_position else None
        with self.drafter.watching(self.target):
            with phase("prefill"):
                self._prefill()
            while model._has_unfinished_sequences(self.judge.all_finished, self.synced_gpus, self.sequences.device):
                if self.judge.all_finished:
                    self.give_up_drafts()
                    self.target.score(self._no_draft())  # other ranks still need this one's part of the forward
                    continue
                if self.sequences.most_known is not None and all(self.sequences.resting):
                    self._pass_last_position()
                self._step()
        return self._finish()

    def _prefill(self) -> None:
        """Prefills the prompts and commits the first token of every row, which is the first root."""
        outputs = self.target.prefill()
        self.recorder.add_prefill(outputs)
        vocab_size = self.target.model.config.get_text_config().vocab_size
        chunk_size = self.generation_config.prefill_chunk_size
        request = DraftRequest(
            self.plan,
            vocab_size,
            self.options.warpers,
            chunk_size,
            self.temperature,
            self.choice,
            self.loans,
            self.noises,
        )
        self.drafter.start(self.sequences, request)
        rows = list(range(self.sequences.batch_size))
        p = self.rows.distribution(outputs.logits[:, -1:])
        for row, token in enumerate(p.choose(rows, Walk.start(len(rows), rows), self.do_sample)):
            self.sequences.extend(row, [token])
        self.judge.advance()

    # -------------------------------------------------------------------------------------------------------- a step

    def _step(self) -> None:
        phase, seconds = self.metrics.phase, self.metrics.seconds
        before = dict(seconds)
        may_speculate = not self.draft_backoff.takes_step() and self._may_speculate()
        with phase("propose"):
            speculates = may_speculate and self._begin_step()
            draft = self._propose() if speculates else self._no_draft()
        with phase("score"):
            draft, outputs = self._score(draft)
        if draft.num_nodes > 0 and self._holds_nan(outputs.logits):
            walk = self._take_nothing(draft)
        else:
            with phase("accept"):
                walk = self._accept(draft, outputs)
            with phase("commit"):
                self._commit(draft if speculates else None, walk, outputs)
        if may_speculate:
            spent = {name: total - before.get(name, 0.0) for name, total in seconds.items()}
            propose = spent.pop("propose")
            self.choice.end_step(draft, walk.paths, *self.ranks.agree_on(propose, sum(spent.values())))

    def _begin_step(self) -> bool:
        """Lets the tree of the step be chosen, and says whether there is one."""
        evidence = self.drafter.evidence(self.sequences) if self.choice.reads_evidence else None
        return self.choice.begin_step(self.sequences.longest, evidence) is not None

    def _score(self, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """Scores the draft; or the roots alone, if the target refuses the positions of its nodes."""
        try:
            return draft, self.target.score(draft)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.target.gives_up_positions(draft):
                raise
        self.give_up_drafts()
        return self._no_draft(), self.target.score(self._no_draft())

    def _pass_last_position(self) -> None:
        """
        Goes on as plain `generate` does where all rows have come to the last position that the target is said to know,
        and some have not ended: fails with it, or goes on without drafts where there are more positions after all.
        """
        self.give_up_drafts()
        self.target.pass_last_position(self.judge.judged)
        self.sequences.pass_last_position([row for row, ended in enumerate(self.judge.ended()) if not ended])

    def _holds_nan(self, logits: torch.Tensor) -> bool:
        """Whether the logits of any row that goes on hold NaN."""
        goes_on = ~torch.tensor(self.sequences.resting, device=logits.device)
        return bool((rows_with_nan(logits) & goes_on).any())

    def _take_nothing(self, draft: DraftTree) -> Walk:
        """Ends a step in which a draft token may have spoiled the other nodes; its drafts count as refused."""
        nothing = Walk.start(self.sequences.batch_size, [])
        self.target.cache.wipe()
        self.drafter.commit(nothing.paths)
        self.drafter.wipe()
        self.draft_backoff.begin()
        for row, rests in enumerate(self.sequences.resting):
            if not rests:
                self.metrics.add_draft(draft.num_valid(row), 0)
        return nothing

    def give_up_drafts(self) -> None:
        """Lets the rest of the call go without drafts; no hidden states are recorded for them any more."""
        self._gave_up_drafts = True
        if self.target.features is not None:
            self.target.features.close()

    def _may_speculate(self) -> bool:
        """Whether the drafter may be asked in this step, by the number of rows that go on."""
        if self._gave_up_drafts:
            return False
        limit = self.plan.disable_by_batch_size
        return limit is None or self.sequences.resting.count(False) <= limit

    def _propose(self) -> DraftTree:
        draft = self.drafter.propose(self.sequences)
        if draft is None:
            return self._no_draft()
        room = [self.sequences.room(row) for row in range(self.sequences.batch_size)]
        return self.ranks.agree_on_draft(draft.within(room))

    def _no_draft(self) -> DraftTree:
        return DraftTree.empty(self.sequences.batch_size, self.sequences.device)

    def _accept(self, draft: DraftTree, outputs: ModelOutput) -> Walk:
        rows = [row for row, rests in enumerate(self.sequences.resting) if not rests]
        verifier = self.options.verifier(is_drawn=draft.num_nodes > 0)
        observes = verifier == Verifier.REJECTION and self.temperature.begin_step()
        p = self.rows.distribution(outputs.logits)
        self._starts = p.lengths
        return verifier.walk(draft, p, rows, self.temperature.observe if observes else None)

    def _commit(self, draft: DraftTree | None, walk: Walk, outputs: ModelOutput) -> None:
        """Commits the accepted tokens and their K/V; `draft` is None if the drafter was not asked."""
        self.recorder.add_step(walk.paths, outputs, self.target.cache.lengths)
        self.target.keep(walk.paths)
        for row, path in enumerate(walk.paths):
            if path is None:
                continue
            start = self._starts[row]
            self.log.add(row, start, len(path), None if draft is None else draft.num_valid(row))
            self.sequences.extend(row, walk.tokens[row][self.sequences.lengths[row] - start :])
        if not self._gave_up_drafts:
            self.drafter.commit(walk.paths)
        self.judge.advance()

    def _finish(self) -> torch.Tensor | SpeculativeGenerateOutput:
        if self.streamer is not None:
            self.streamer.end()
        length, cache = self.judge.judged, self.target.users_cache
        self.log.count(self.metrics, [min(length, end) for end in self.sequences.lengths])
        returns = self.generation_config.return_dict_in_generate
        if cache is not None and (returns or getattr(cache, "_is_user_defined", False)):
            self.target.hand_back(length, may_forward=not self.synced_gpus)
        set_last_metrics(self.metrics)
        ids = self.sequences.columns(length).clone()
        if not returns:
            return ids
        recorded = {name: self.recorder.get(name) for name in self.recorder.wanted}
        return SpeculativeGenerateOutput(sequences=ids, **recorded, **{CACHE: cache}, speculation=self.metrics)


# -------------------------------------------------------------------------------------------------------- entry point


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter: Drafter,
    plan: SpeculationPlan,
    **call: Any,
) -> torch.Tensor | SpeculativeGenerateOutput:
    """
    Generates as `model.generate` would without an assistant, only faster. The arguments are those of
    `SpeculativeCall`.

    On an exception, Ctrl-C included, the model's attention implementation is as it was, and a cache that was handed in
    is untouched.
    """
    drafter = drafter.for_call(model)
    with ExitStack() as stack:
        for part in (model, *drafter.models):
            stack.enter_context(returning_named_outputs(part))
        for switched in filter(supports_switching, (model, *drafter.models)):
            stack.enter_context(switched_to_tree_attention(switched))
        loans = stack.enter_context(graph_loans(plan.cuda_graphs))
        return SpeculativeCall(model, input_ids, drafter, plan, loans, **call).run()


def _visible(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which of the prompt's slots hold tokens, `[batch, slots]` bool; None if all do."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()
