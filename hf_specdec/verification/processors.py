"""The target's distribution at the nodes of a walk: logits processors, run with each node's own history."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process

from ..generation.recording import Recorder
from ..generation.sequences import Sequences
from ..generation.stopping import ColumnJudge
from .choosing import choose
from .walk import Walk


def _types(*names: str) -> frozenset[type]:
    """Processor classes of transformers, as far as the installed version has them."""
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# What a processor of transformers looks at decides how the rows of a batch can share it. Exact classes only: a
# subclass may do anything.
READS_SCORES_ONLY = _types(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
)
_READS_OWN_HISTORY = _types(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
)
_HOLDS_ROWS = _types(
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
)
_ASKS_BY_ROW = _types("PrefixConstrainedLogitsProcessor")
_HOLDS_CONTEXT = _types("UnbatchedClassifierFreeGuidanceLogitsProcessor")


def warpers_of(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that read the scores alone: a draft that draws its tokens applies them, too."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in READS_SCORES_ONLY)


class TargetDistribution:
    """
    p, the target's next-token distribution after every processor of the call, at the nodes where walks stand.

    Processors run only there, in order, with the row's real history (`[1, tokens]`, padding included). A batch of one
    gets exactly the calls of plain `generate`. In larger batches a processor that reads more than the scores runs row
    by row; if it may hold state, every row has a copy of its own.

    Args:
        processors (`LogitsProcessorList`): the processors of the call.
        sequences (`Sequences`): the rows, for their histories.
        recorder (`Recorder`): gets scores and logits of every token chosen.
        judge (`ColumnJudge`, *optional*): the criteria and the streamer of the call.
        agree (`Callable`, *optional*): makes a tensor of drawn tokens equal on all ranks; see `Ranks.agree`.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        sequences: Sequences,
        recorder: Recorder,
        judge: ColumnJudge | None = None,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda drawn: drawn,
    ):
        self.sequences, self.recorder, self.judge, self.agree = sequences, recorder, judge, agree
        self.batch_size = sequences.batch_size
        self.processors = processors
        self.reads_scores_only = all(type(processor) in READS_SCORES_ONLY for processor in processors)
        self._by_row = None
        if self.batch_size > 1 and not self.reads_scores_only:
            self._by_row = copies_per_row(processors, self.batch_size)
        self._records = bool(recorder.wanted & {"scores", "logits"})
        self._logits: torch.Tensor | None = None
        self.lengths: list[int] = []
        """Length of every row, in tokens, when the step began."""

    def begin_step(self, logits: torch.Tensor) -> None:
        """Takes the logits of a step, `[batch, nodes + 1, vocab]`."""
        self._logits = logits
        self.lengths = list(self.sequences.lengths)

    def ends(self, row: int, token: int) -> bool:
        """
        Whether a row's text ends with a token that its walk has accepted: plain `generate` would run no processor
        after it. With one sequence, and processors that read more than the scores, criteria and streamer see the token
        at once, because processors may depend on them; else they see it when all rows have walked.
        """
        if self.judge is None or self.batch_size > 1 or self.reads_scores_only:
            return token in self.sequences.end_tokens
        self.sequences.extend(row, [token])
        self.judge.advance()
        return self.judge.all_finished

    @property
    def reads_ahead(self) -> bool:
        """Whether `all_scores` may be used, and is cheaper than `scores` at every node of a walk."""
        return self.reads_scores_only and not self._records and self._logits.device.type != "cpu"

    @property
    def is_bare(self) -> bool:
        """Whether the scores are the unprocessed logits, and are not recorded."""
        return not self.processors and not self._records

    def all_scores(self) -> torch.Tensor:
        """
        Processed scores of all nodes, `[batch, nodes + 1, vocab]`; only if every processor reads the scores alone.
        """
        if not self.processors:
            return self._logits
        scores = self._logits.flatten(0, 1).float()
        return self.processors(None, scores).view(self._logits.shape)

    def scores(self, rows: list[int], walk: Walk) -> torch.Tensor:
        """Processed scores at the nodes where the walks of `rows` stand, `[rows, vocab]` float32."""
        at_nodes = [self._logits[row, walk.node(row)] for row in rows]
        # A copy, as plain `generate` makes: processors may write into it.
        logits = torch.stack(at_nodes).to(self.sequences.device, torch.float32)
        if self.reads_scores_only:
            scores = self.processors(None, logits)
        elif self._by_row is None:
            scores = self.processors(self._history(0, walk), logits)
        else:
            scores = torch.cat(
                [
                    self._by_row[row](self._history(row, walk), logits[place : place + 1])
                    for place, row in enumerate(rows)
                ]
            )
        if self._records:
            for place, row in enumerate(rows):
                self.recorder.add_token("logits", row, logits[place : place + 1])
                self.recorder.add_token("scores", row, scores[place : place + 1])
        return scores

    def choose(self, rows: list[int], walk: Walk, do_sample: bool) -> list[int]:
        """The next token of every row where its walk stands: the argmax, or drawn from p."""
        return self.agree(choose(self.scores(rows, walk), do_sample)).tolist()

    def _history(self, row: int, walk: Walk) -> torch.Tensor:
        """Prompt, generated tokens and path so far of a row, `[1, tokens]`."""
        length = self.lengths[row]
        tokens = walk.tokens[row]
        if tokens:
            self.sequences.write(row, length + len(tokens) - 1, tokens[-1:])
        return self.sequences.row(row, length + len(tokens))


# ------------------------------------------------------------------------------------------------ processors by row


def copies_per_row(processors: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """
    Lists of processors, one per row of a batch, each called with that row alone. The first row has the user's own
    objects, the others have copies of processors that may hold state. What processors share, their copies share, too.

    Raises:
        ValueError: if a processor that may hold state cannot be copied.
    """
    shared = {key: value for processor in processors for key, value in _not_copied(processor).items()}
    memos = [dict(shared) for _ in range(batch_size)]
    return [
        LogitsProcessorList(_for_row(processor, row, batch_size, memo) for processor in processors)
        for row, memo in enumerate(memos)
    ]


def _for_row(processor: Any, row: int, batch_size: int, memo: dict[int, Any]) -> Any:
    kind = type(processor)
    # 5.23's repetition penalty knows where the padding of every row ends.
    knows_padding = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    if kind in READS_SCORES_ONLY or (kind in _READS_OWN_HISTORY and not knows_padding):
        return processor
    if kind in _HOLDS_ROWS or kind in _READS_OWN_HISTORY:
        return _AsBatch(processor, row, batch_size)
    if kind in _ASKS_BY_ROW:
        return _prefix_function_of_row(processor, row)
    if kind in _HOLDS_CONTEXT:
        return _guidance_of_row(processor, row)
    own = processor if row == 0 else _copy(processor, memo)
    is_function = inspect.isroutine(processor) or isinstance(processor, functools.partial)
    return _AsBatch(own, row, batch_size) if is_function or _holds_rows(processor, batch_size) else own


class _AsBatch:
    """Calls a processor that holds data per row with a batch of copies of one row, and returns that row's result."""

    def __init__(self, processor: Any, row: int, batch_size: int):
        self.processor, self.row, self.batch_size = processor, row, batch_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        repeated = self.processor(input_ids.repeat(self.batch_size, 1), scores.repeat(self.batch_size, 1))
        return repeated[self.row : self.row + 1]


def _holds_rows(processor: Any, batch_size: int) -> bool:
    """
    Whether a processor has something that may be looked up by a row's number: a tensor or container that has an entry
    for every row (or more), or a function.
    """
    return any(_may_be_rows(value, batch_size) for value in _attributes(processor))


def _attributes(processor: Any) -> Iterator[Any]:
    """The values of a processor's attributes, in its `__dict__`, in slots and in its own classes, except methods."""
    yield from getattr(processor, "__dict__", {}).values()
    for kind in type(processor).__mro__:
        if kind.__module__.partition(".")[0] in ("abc", "builtins", "torch", "transformers"):
            continue
        for name, value in vars(kind).items():
            if inspect.ismemberdescriptor(value):
                yield getattr(processor, name, None)
            elif not (name.startswith(("__", "_abc_")) or inspect.isroutine(value) or inspect.isdatadescriptor(value)):
                yield value


def _may_be_rows(value: Any, batch_size: int) -> bool:
    if isinstance(
        value, (str, bytes, int, float, torch.nn.Module, PreTrainedTokenizerBase, torch.Generator, type(None))
    ):
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] >= batch_size
    if isinstance(value, dict):
        has_numbers = any(isinstance(key, int) for key in value)
        return has_numbers or any(_may_be_rows(item, batch_size) for item in value.values())
    if hasattr(value, "__len__"):
        items = value if isinstance(value, (list, tuple)) else ()
        return len(value) >= batch_size or any(_may_be_rows(item, batch_size) for item in items)
    return True  # a function or an object, which may look up rows by their number


def _not_copied(processor: Any) -> dict[int, Any]:
    """The models and tokenizers that a processor refers to, by `id`."""
    return {
        id(value): value
        for holder in _holders(processor)
        for value in (holder, *getattr(holder, "__dict__", {}).values())
        if isinstance(value, (torch.nn.Module, PreTrainedTokenizerBase))
    }


def _copy(processor: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; `memo` holds what a row's other copies are made of, and what is not copied."""
    try:
        return _deepcopy(processor, memo)
    except Exception as error:  # whatever a user's class raises while it is copied
        raise ValueError(
            f"`logits_processor`: {type(processor).__name__} cannot be copied for the rows of a batch ({error}). Give "
            "it a `__deepcopy__`, or call `generate` with one sequence at a time."
        ) from error


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, of functions, too: with own copies of what they close over (`copy.deepcopy` leaves them)."""
    if not inspect.isfunction(value):
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(_copy_cell(cell, memo) for cell in value.__closure__ or ())
        defaults = copy.deepcopy(value.__defaults__, memo)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        own.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
        memo[id(value)] = own
    return memo[id(value)]


def _copy_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """A copy of a variable that functions close over, which may be the functions themselves."""
    if id(cell) not in memo:
        memo[id(cell)] = CellType()
        memo[id(cell)].cell_contents = _deepcopy(cell.cell_contents, memo)
    return memo[id(cell)]


def _holders(processor: Any) -> list[Any]:
    """The objects that hold a processor's state: itself, a method's object, what a function closes over, …"""
    if inspect.ismethod(processor):
        return [processor.__self__]
    if inspect.isfunction(processor):
        return [cell.cell_contents for cell in processor.__closure__ or ()]
    if isinstance(processor, functools.partial):
        items = (processor.func, *processor.args, *processor.keywords.values())
        return [held for item in items for held in _holders(item)]
    return [processor]


def _prefix_function_of_row(processor: Any, row: int) -> Any:
    """The processor of a user's `prefix_allowed_tokens_fn` for one row, which passes that row's number to it."""
    ask = processor._prefix_allowed_tokens_fn
    return type(processor)(lambda _, input_ids: ask(row, input_ids), processor._num_beams)


def _guidance_of_row(processor: Any, row: int) -> Any:
    """Classifier-free guidance for one row: the model is shared, the unconditional context is the row's own."""
    own = copy.copy(processor)
    own.unconditional_context = {
        key: value[row : row + 1] if isinstance(value, torch.Tensor) else value
        for key, value in processor.unconditional_context.items()
    }
    return own
