"""The loop of a speculative `generate` call: propose → score → accept → commit."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers.utils import ModelOutput

from ..compat import CACHE
from ..drafters import DraftRequest
from ..engine import host_step
from ..forwards.outputs import over_trees
from ..graphs import GraphLoans, graph_loans
from ..metrics import SpeculationMetrics, StepLog, set_last_metrics
from ..ranks import Ranks
from ..trees import DraftTree, choice_of, remembered_of
from ..trees.forced import MOST_FORCED, with_forced
from ..verification import (
    DraftBackoff,
    DraftTemperature,
    Verifier,
    Walk,
    rows_with_nan,
)
from .arguments import CallArguments
from .recording import Recorder, SpeculativeGenerateOutput
from .rows import CallRows
from .stopping import ColumnJudge
from .target import Target


class SpeculativeCall:
    """
    A speculative `generate` call. All state of the call is in here, so that several threads may generate on one model.

    Args:
        call (`CallArguments`): the call, with a drafter of its own.
        loans (`GraphLoans`): lend the memory of CUDA graphs.
    """

    def __init__(self, call: CallArguments, loans: GraphLoans):
        self.call, self.drafter, self.plan, self.loans = call, call.drafter, call.plan, loans
        plan, batch_size = call.plan, len(call.input_ids)
        self.ranks = Ranks.of(call.model)
        self.temperature = DraftTemperature(plan.draft_temperature or 1.0, adapts=plan.draft_temperature is None)
        self.metrics, self.log = SpeculationMetrics(), StepLog(batch_size)
        self.draft_backoff, self._gave_up_drafts = DraftBackoff(), False
        self.sequences = call.sequences()
        most_new = None if call.max_length is None else call.max_length - call.input_ids.shape[1]
        kind = batch_size, call.options.do_sample
        remembered = remembered_of(call.model, call.drafter.times_key, call.options.do_sample)
        self.choice = choice_of(plan.tree, call.model, call.drafter.times_key, kind, most_new, remembered)
        forced = 0 if call.options.grammar is None else MOST_FORCED
        self.target = Target(call, self.sequences, plan.tree.num_nodes + forced, loans)
        has_encoder = call.model.config.is_encoder_decoder
        self.recorder = Recorder.of_call(batch_size, call.generation_config, call.cache, has_encoder)
        criteria = self.ranks.agreeing(call.stopping_criteria)
        self.judge = ColumnJudge(criteria, self.sequences, self.recorder, call.pad_token, call.streamer)
        self.rows = CallRows(call.options, self.sequences, self.recorder, self.judge, self.ranks.agree)

    def run(self) -> torch.Tensor | SpeculativeGenerateOutput:
        """Generates until every row is finished."""
        phase = self.metrics.phase
        self.ranks.share_random_state()
        self.noises = self.rows.draw_by_position(self.call.noise_seed) if self.plan.draws_by_position else None
        with self.drafter.watching(self.target):
            with phase("prefill"):
                self._prefill()
            synced, device = self.call.synced_gpus, self.sequences.device
            while self.target.model._has_unfinished_sequences(self._is_done(), synced, device):
                if self.judge.all_finished:
                    self._forward_after_the_end()
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
        chunk_size = self.call.generation_config.prefill_chunk_size
        request = DraftRequest(
            self.plan,
            vocab_size,
            self.call.options.warpers,
            chunk_size,
            self.temperature,
            self.choice,
            self.loans,
            self.noises,
            # Ranks must take the same tree, and their heads may differ by rounding.
            self.choice.refine if self.choice.reads_confidence and not self.ranks.are_several else None,
            grammars=self.rows.grammars,
            encoder=self.call.encoder,
        )
        self.drafter.start(self.sequences, request)
        rows = list(range(self.sequences.batch_size))
        p = self.rows.distribution(outputs.logits[:, -1:])
        for row, token in enumerate(p.choose(rows, Walk.start(len(rows), rows), self.call.options.do_sample)):
            self.sequences.extend(row, [token])
        self.judge.advance()

    # -------------------------------------------------------------------------------------------------------- a step

    def _step(self) -> None:
        self._may_speculate = not self.draft_backoff.takes_step() and self._has_few_rows()
        host_step.run(self)

    def propose(self) -> DraftTree:
        self._speculates = self._may_speculate and self._begin_step()
        draft = self.drafter.propose(self.sequences) if self._speculates else None
        if draft is None:
            return self._with_forced(self._no_draft())
        room = [self.sequences.room(row) for row in range(self.sequences.batch_size)]
        if self.target.forward.cache.counts_nodes:
            draft = draft.chain_within(room[0])
        return self._with_forced(self.ranks.agree_on_draft(draft.within(room)))

    def _with_forced(self, draft: DraftTree) -> DraftTree:
        """The trees with the tokens that the call's grammar asks for."""
        if not self._may_speculate or self.target.forward.cache.counts_nodes:  # which reads no branches
            return draft
        missing = self.rows.forced(draft)
        return with_forced(draft, missing) if missing else draft

    def score(self, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        scored, outputs = self.target.score(draft)
        if scored is not draft:  # the target refuses positions
            self.give_up_drafts()
        return scored, outputs

    def accept(self, draft: DraftTree, outputs: ModelOutput) -> Walk:
        self._is_spoiled = draft.num_nodes > 0 and self._holds_nan(outputs.logits)
        if self._is_spoiled:
            return Walk.start(self.sequences.batch_size, [])
        rows = [row for row, rests in enumerate(self.sequences.resting) if not rests]
        verifier = self.call.options.verifier(is_drawn=draft.num_nodes > 0 and not self.choice.takes_best)
        observes = verifier == Verifier.REJECTION and self.temperature.begin_step()
        p = self.rows.distribution(outputs.logits)
        self._starts = p.lengths
        return verifier.walk(draft, p, rows, self.temperature.observe if observes else None)

    def commit(self, draft: DraftTree, walk: Walk, outputs: ModelOutput) -> None:
        self.recorder.add_step(walk.paths, outputs, self.target.cache.lengths)
        self.target.cache.keep(walk.paths)
        for row, path in enumerate(walk.paths):
            if path is None:
                continue
            start = self._starts[row]
            self.log.add(row, start, len(path), draft.num_valid(row) if self._speculates else None)
            self.sequences.extend(row, walk.tokens[row][self.sequences.lengths[row] - start :])
        if not self._gave_up_drafts:
            self.drafter.commit(walk.paths)
        if self._is_spoiled:
            self._refuse(draft)
        self.judge.advance()
        self.target.settle(self.judge.judged if self.judge.all_finished else None)

    def learn(self, draft: DraftTree, walk: Walk, propose: float, rest: float) -> None:
        if self._may_speculate:
            drafted, paths = draft.within_drafted(walk.paths)
            self.choice.end_step(drafted, paths, *self.ranks.agree_on(propose, rest))

    def _is_done(self) -> bool:
        """Whether the call needs no further forward; one for padding counts, since other ranks have to join it."""
        return self.judge.all_finished and not self._lacks_padding()

    def _lacks_padding(self) -> bool:
        reads_it = self.call.returns_cache or self.recorder.reads_padding
        return reads_it and self.target.lacks_padding(self.judge.judged)

    def _forward_after_the_end(self) -> None:
        """A forward for the padding of the cache that is returned, or for other ranks, which need this one's part."""
        self.give_up_drafts()
        if self._lacks_padding():
            read = self.target.read_padding(self.judge.judged)
            if self.recorder.reads_padding:
                self.recorder.add_padding(*read)
        else:
            self.target.score(self._no_draft())

    def _begin_step(self) -> bool:
        """Lets the tree of the step be chosen, and says whether there is one."""
        evidence = self.drafter.evidence(self.sequences) if self.choice.reads_evidence else None
        return self.choice.begin_step(self.sequences.longest, evidence) is not None

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

    def _refuse(self, draft: DraftTree) -> None:
        """Counts drafts as refused, one of which may have spoiled the other nodes, and drops their K/V."""
        self.target.cache.wipe()
        self.drafter.wipe()
        self.draft_backoff.begin()
        for row, rests in enumerate(self.sequences.resting):
            if not rests:
                self.metrics.add_draft(draft.num_valid(row), 0)

    def give_up_drafts(self) -> None:
        """Lets the rest of the call go without drafts; no hidden states are recorded for them any more."""
        self._gave_up_drafts = True
        if self.target.features is not None:
            self.target.features.close()

    def _has_few_rows(self) -> bool:
        """Whether the drafter may be asked in this step, by the number of rows that go on."""
        if self._gave_up_drafts:
            return False
        limit = self.plan.disable_by_batch_size
        return limit is None or self.sequences.resting.count(False) <= limit

    def _no_draft(self) -> DraftTree:
        return DraftTree.empty(self.sequences.batch_size, self.sequences.device)

    def _finish(self) -> torch.Tensor | SpeculativeGenerateOutput:
        if self.call.streamer is not None:
            self.call.streamer.end()
        length = self.judge.judged
        self.log.count(self.metrics, [min(length, end) for end in self.sequences.lengths])
        if self.call.returns_cache:
            self.target.hand_back(length)
        set_last_metrics(self.metrics)
        ids = self.sequences.columns(length).clone()
        if not self.call.generation_config.return_dict_in_generate:
            return ids
        recorded = {name: self.recorder.get(name) for name in self.recorder.wanted} | {CACHE: self.call.cache}
        if self.recorder.reads_padding or "decoder_hidden_states" in recorded:
            read = self.call.model_kwargs["encoder_outputs"]
            recorded |= {f"encoder_{name}": read.get(name) for name in ("attentions", "hidden_states")}
        return SpeculativeGenerateOutput(
            sequences=ids, speculation=None if self.call.model.config.is_encoder_decoder else self.metrics, **recorded
        )


# -------------------------------------------------------------------------------------------------------- entry point


def speculative_decoding(call: CallArguments) -> torch.Tensor | SpeculativeGenerateOutput:
    """
    Generates as `model.generate` would without an assistant, only faster.

    On an exception, Ctrl-C included, the model's attention implementation is as it was, and a cache that was handed in
    is untouched.
    """
    call = replace(call, drafter=call.drafter.for_call(call.model))
    with over_trees(call.model, *call.drafter.models), graph_loans(call.plan.cuda_graphs) as loans:
        return SpeculativeCall(call, loans).run()
