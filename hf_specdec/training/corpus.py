"""The texts of a training run: read or written once, stored in the run's folder, and reused when it continues."""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .bad_records import BadRecord, BadRecords
from .data import Text, encode_record, messages_of, read_records, rendered
from .openings import Openings
from .options import TrainOptions
from .packing import cut
from .scripts import ScriptPart, Template
from .self_generate import Sampling, Writer, default_rows
from .written_texts import iterate_written, read_written, write_texts, written_jobs


logger = logging.get_logger(__name__)

_COMPLETE = "complete"


class Corpus:
    """
    The texts of a training run, stored in `folder`.

    `encoded.jsonl` holds given data, `written-<process>.jsonl` the texts that the target writes, one line each as soon
    as a text ends.

    Args:
        options (`TrainOptions`): options of the run.
        folder (`Path`): folder of the files; created if it does not exist.
        target, tokenizer: the target and its tokenizer.
        rank, world_size (`int`): rank of this process and number of processes; each process writes its share.
        wait (callable): barrier over all processes.
        begin (callable): called by the first process before the folder gets its first texts.
        report (callable): receives how many texts are there already when writing continues.
    """

    def __init__(
        self,
        options: TrainOptions,
        folder: Path,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rank: int = 0,
        world_size: int = 1,
        wait: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = logger.info,
    ):
        self.options, self.folder, self.target, self.tokenizer = options, folder, target, tokenizer
        self.rank, self.world_size, self.wait, self.begin, self.report = rank, world_size, wait, begin, report
        folder.mkdir(parents=True, exist_ok=True)

    def texts(self, deadline: float | None = None) -> list[list[Text]] | None:
        """
        All texts, each as its pieces of at most `max_length` tokens (see `cut`), without those that have no pieces;
        None if the target had not written all of them by the deadline.

        The texts written by then stay in the folder, and the next run continues.

        Args:
            deadline (`float`, *optional*): time of `time.monotonic()` at which writing stops.

        Raises:
            ValueError: for fewer than 2 texts with tokens to predict (1 if none is held out), or a `max_length` beyond
                the target's positions.
        """
        options, longest = self.options, _longest(self.target)
        if options.max_length > longest:
            raise ValueError(f"`max_length`={options.max_length}: the target has {longest} positions. Choose no more.")
        complete = self._write(deadline) if options.data is None else self._encode(options.data)
        if not complete:
            return None
        return self._in_pieces(self._stored())

    def _in_pieces(self, whole: Iterable[Text]) -> list[list[Text]]:
        options = self.options
        if options.loss_on_everything:
            whole = (replace(text, spans=[(0, len(text.input_ids))]) for text in whole)
        texts = [pieces for text in whole if (pieces := cut(text, options.max_length))]
        if len(texts) < (2 if options.eval_texts else 1):
            raise ValueError(
                f"The number of texts with something to predict is {len(texts)}; at least 2 are needed, one to train "
                "on and one to hold out. With `eval_texts=0` none is held out, and 1 will do."
            )
        return texts

    def _stored(self) -> Iterable[Text]:
        """
        The stored texts, whole, in an order that does not depend on which process wrote which text. Equal texts, such
        as greedy answers to equal questions, come once: none is both held out and trained on. (Given data was stored
        without repeats.)
        """
        if self.options.data is not None:
            return iterate_written(self.folder / "encoded.jsonl")
        files = sorted(self.folder.glob("written-*.jsonl"))
        texts = itertools.chain.from_iterable(read_written(file) for file in files)
        return _without_repeats(sorted(texts, key=lambda text: (text.job, text.input_ids)))

    def _encode(self, data: str) -> bool:
        path = self.folder / "encoded.jsonl"
        if self.rank == 0 and not path.is_file():
            options, scratch = self.options, self.folder / "encoding.jsonl"
            scratch.unlink(missing_ok=True)
            bad = BadRecords(options.strict_data)
            texts = _without_repeats(self._encoded(data, bad))
            write_texts(scratch, texts, options.data_limit, progress=options.progress, description="Reading")
            bad.finish(data)
            self._in_pieces(iterate_written(scratch))  # raises if there are too few
            self.begin()
            scratch.rename(path)
        self.wait()
        return True

    def _encoded(self, data: str, bad: BadRecords) -> Iterator[Text]:
        options, vocab_size = self.options, self.target.config.get_text_config(decoder=True).vocab_size
        for place, record in read_records(data, options.data_split, options.data_limit, bad=bad):
            try:
                yield encode_record(record, place, self.tokenizer, vocab_size)
            except BadRecord as error:
                bad.skip(error)

    def _write(self, deadline: float | None) -> bool:
        options, mark = self.options, self.folder / _COMPLETE
        done = self._written_jobs()
        complete = mark.is_file()
        self.wait()  # no process writes before all have read
        if complete:
            return True
        jobs, total = self._jobs()
        if done and self.rank == 0:
            self.report(f"Writing continues: {len(done)} of {total} texts are in {self.folder}.")
        if self.rank == 0:
            self.begin()
        missing = (job for job in range(total) if job not in done)
        mine = itertools.islice(missing, self.rank, None, self.world_size)
        number = len(range(self.rank, total - len(done), self.world_size))
        if number:
            rows = options.generation_batch_size or default_rows(self.target, options.max_length)
            writer = Writer(
                self.target,
                options.max_length,
                min(rows, number),
                sampling=Sampling(greedy_share=options.greedy_share, cool_share=options.cool_share),
                # The seed depends on the texts done, because a continued run would else draw the first texts again.
                seed=(options.seed * 1_000_003 + len(done)) * 1_009 + self.rank,
            )
            texts = writer.write(
                ((job, jobs(job)) for job in _in_time(mine, options.write_seconds)),
                lambda: deadline is not None and time.monotonic() >= deadline,
            )
            write_texts(
                self.folder / f"written-{self.rank:05d}.jsonl",
                texts,
                number + len(done),
                len(done),
                progress=options.progress and self.rank == 0,
            )
        self.wait()
        complete = len(self._written_jobs()) == total
        if not complete and options.write_seconds is not None:
            complete = deadline is None or time.monotonic() < deadline
        if complete and self.rank == 0:
            mark.touch()
        self.wait()
        return mark.is_file()

    def _written_jobs(self) -> set[int]:
        return set().union(*map(written_jobs, self.folder.glob("written-*.jsonl")))

    def _jobs(self) -> tuple[Callable[[int], list[ScriptPart]], int]:
        """The function from a conversation's number to its parts, and the number of conversations."""
        template = Template(self.tokenizer, self.target)
        options, source = self.options, self.options.prompts
        if source is None:
            return Openings(options).jobs(template), options.self_generate or 0
        # All processes read the same prompts; the first tells what it skips.
        bad = BadRecords(options.strict_data, **({} if self.rank == 0 else {"warn": lambda text: None}))
        prompts = list(_read_prompts(source, options, self.tokenizer, bad))
        bad.finish(source)
        return lambda job: template.answer(*prompts[job]), len(prompts)


def _in_time(jobs: Iterable[int], seconds: float | None) -> Iterator[int]:
    """Yields jobs for `seconds`; a job that has begun by then is finished, however long it takes."""
    end = None if seconds is None else time.monotonic() + seconds
    return itertools.takewhile(lambda _: end is None or time.monotonic() < end, jobs)


def _read_prompts(
    source: str, options: TrainOptions, tokenizer: PreTrainedTokenizerBase, bad: BadRecords
) -> Iterator[tuple[list[dict[str, str]] | None, str | None]]:
    """Pairs (messages up to the last question, None) or (None, plain text). A .txt file has a question per line."""
    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        questions = itertools.islice((line for line in lines if line), options.data_limit)
        yield from (([{"role": "user", "content": line}], None) for line in questions)
        return
    records = read_records(source, options.data_split, options.data_limit, option="prompts", bad=bad)
    for place, record in records:
        try:
            yield _prompt_of(record, place, tokenizer)
        except BadRecord as error:
            bad.skip(error)


def _prompt_of(
    record: Any, place: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict[str, str]] | None, str | None]:
    messages = messages_of(record, place)
    if messages is None:
        return None, record["text"]
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise BadRecord(f"{place}: there is no user's turn to answer.")
    messages = messages[: last + 1]
    if tokenizer.chat_template is not None:
        rendered(tokenizer, messages, place, add_generation_prompt=True)  # now, and not after hours of writing
    return messages, None


def _longest(target: PreTrainedModel) -> int:
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 20


def _without_repeats(texts: Iterable[Text]) -> Iterator[Text]:
    """The texts, in their order, without those that are equal to an earlier one."""
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.blake2b(array("q", text.input_ids).tobytes(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield text
