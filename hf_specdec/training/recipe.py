"""A whole training run: target, texts, draft vocabulary, head, trainer, output folder."""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, set_seed
from transformers.trainer_callback import ProgressCallback
from transformers.utils import logging

from ..loading import DTYPES, load_target, load_tokenizer
from ..smollm2 import smollm2_folder
from .checkpoints import (
    FirstEvaluation,
    LogFile,
    TimeLimits,
    check_identity,
    holds_out_whole_texts,
    newest_complete,
    write_identity,
)
from .corpus import Corpus
from .data import Text
from .description import describe_run
from .kinds import KINDS, Kind
from .options import TrainOptions
from .packing import Collator, Rows, split_texts
from .progress import ShortLines
from .reading import TargetReader, supports_packing
from .trainer import DraftArguments, DraftTrainer


logger = logging.get_logger(__name__)

_BATCH_TOKENS, _FEWEST_STEPS = 16384, 100


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """
    Outcome of `train`.

    Args:
        output (`Path`): output folder of the run.
        finished (`bool`): whether the run is complete; if not, calling `train` again continues it.
        step, total_steps (`int`): optimizer steps done and planned; both 0 while the target still writes texts.
        before, after (`dict[str, float]`): `eval_…` metrics on the held-out texts before and after training; `after`
            is empty until the run is finished.
    """

    output: Path
    finished: bool
    step: int = 0
    total_steps: int = 0
    before: dict[str, float]
    after: dict[str, float]


def train(options: TrainOptions, report: Callable[[str], None] = logger.info) -> TrainResult:
    """
    Trains a head or a draft model, or continues a run that was interrupted.

    `options.output` becomes a folder that `EagleHead.from_pretrained` (`BlockHead`, `AutoModelForCausalLM`) reads; it
    also holds `data/`, `checkpoint-*/`, `log.jsonl` and `result.json`. Every process of `accelerate launch` calls
    `train`, and `end_processes` when there is nothing more to train.

    Args:
        options (`TrainOptions`): options of the run.
        report (callable, *optional*): receives what the run says of itself, such as where it continues, and each
            progress line when progress bars are off. Defaults to the log.

    Raises:
        ImportError: if `accelerate` is missing.
        ValueError: for data, targets and sizes that cannot be trained; the message names the option.
    """
    started = time.monotonic()
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError("Training needs accelerate: `pip install accelerate`, or `pip install 'hf-specdec[train]'`.")
    from accelerate import PartialState

    deadline = None if options.max_seconds is None else started + options.max_seconds
    output = Path(options.output)
    # The other processes wait while the first reads the data, perhaps longer than the default timeout of ten minutes.
    state = PartialState(cpu=options.cpu, timeout=timedelta(hours=12))
    report = report if state.is_main_process else logger.debug
    output.mkdir(parents=True, exist_ok=True)
    check_identity(output, options.identity(), options.default_identity())
    state.wait_for_everyone()  # no process records its options before all have compared theirs
    done = _read_json(output / "result.json")
    if done is not None and done["finished"]:
        report(f"{output} holds a finished run: nothing is left to do.")
        return TrainResult(**done | {"output": output})
    target, tokenizer = _load_target(options, state)
    # The model is checked before the target writes texts for hours: an error afterwards would come too late.
    kind = KINDS[options.kind](options, target, tokenizer)
    start = None
    if options.start_from is None:
        kind.check()
    else:
        start = kind.start(options.start_from)
    corpus = Corpus(
        options,
        output / "data",
        target,
        tokenizer,
        state.process_index,
        state.num_processes,
        wait=state.wait_for_everyone,
        begin=partial(write_identity, output, options.identity()),
        report=report,
    )
    texts = corpus.texts(deadline)
    if texts is None:
        return TrainResult(output=output, finished=False, before={}, after={})
    _check_held_out(output, texts)
    return _Run(kind, output, texts, start, report).finish(deadline)


def end_processes() -> None:
    """
    Destroys the process group of `accelerate launch`; no training is possible afterwards.

    Gloo's threads may still hold tensors when a program ends: a program that skips this call aborts now and then,
    although everything is written (https://github.com/pytorch/pytorch/pull/179291).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Run:
    """The part of `train` after the texts are ready: model, objective, trainer, result."""

    def __init__(
        self,
        kind: Kind,
        output: Path,
        texts: list[list[Text]],
        start: tuple[Any, torch.Tensor | None] | None,
        report: Callable[[str], None],
    ):
        options, target, tokenizer = kind.options, kind.target, kind.tokenizer
        self.kind, self.options, self.output, self.target, self.tokenizer = kind, options, output, target, tokenizer
        self.report = report
        set_seed(options.seed)
        target.eval().requires_grad_(False)
        packed = supports_packing(target)
        if not packed:
            logger.warning(f"{type(target).__name__} does not keep packed texts apart: one text per row.")
        train, held_out = split_texts(texts, options.eval_texts, options.seed)
        self.num_texts = len(train)
        self.model, token_ids = kind.new(train) if start is None else start
        self.objective = kind.objective(self.model, packed)
        arguments = self._arguments(len(train_rows := Rows(train, options.max_length, packed, options.seed)))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.trainer = DraftTrainer(
            reader=TargetReader(target, kind.boundaries(self.model), token_ids, packed, kind.reads_all_logits),
            with_muon=options.optimizer == "muon",
            model=self.objective,
            args=arguments,
            data_collator=Collator(pad, options.max_length if packed else None),
            train_dataset=train_rows,
            eval_dataset=Rows(held_out, options.max_length, packed, options.seed) if held_out else None,
        )
        for callback in (ProgressCallback, PrinterCallback):
            self.trainer.remove_callback(callback)
        self.trainer.add_callback(ShortLines(report, options.progress))

    def finish(self, deadline: float | None) -> TrainResult:
        """Trains until the last step or the deadline (`time.monotonic()`), then saves the model and `result.json`."""
        trainer, output = self.trainer, self.output
        with trainer.accelerator.main_process_first():
            checkpoint = newest_complete(output, clean=trainer.args.should_save)
        first = FirstEvaluation(output / "before.json")
        trainer.args.eval_on_start = trainer.eval_dataset is not None and not first.path.is_file()
        trainer.add_callback(first)
        trainer.add_callback(TimeLimits(self.options.save_minutes * 60, deadline))
        trainer.add_callback(LogFile(output))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        step, total = trainer.state.global_step, trainer.state.max_steps
        finished = step >= total
        after = trainer.evaluate() if finished and trainer.eval_dataset is not None else {}
        if trainer.args.should_save:
            self._save()
        result = {"finished": finished, "step": step, "total_steps": total, "before": first.read(), "after": after}
        self._write_json("result.json", result)
        trainer.accelerator.wait_for_everyone()
        return TrainResult(output=output, **result)

    def _save(self) -> None:
        """Saves the model in the target's dtype, in which it will run, with its recipe; checkpoints keep float32."""
        model = copy.deepcopy(self.trainer.accelerator.unwrap_model(self.trainer.model).model).to(self.target.dtype)
        model.config.recipe = describe_run(self.kind, self.objective, self.trainer, self.num_texts)
        model.save_pretrained(self.output)
        if self.options.kind == "draft":
            for name in ("is_local", "local_files_only"):  # loading arguments, which transformers would save too
                self.tokenizer.init_kwargs.pop(name, None)
            self.tokenizer.save_pretrained(self.output)

    def _arguments(self, num_rows: int) -> DraftArguments:
        options = self.options
        cuda = self.target.device.type == "cuda"
        arguments = DraftArguments(
            output_dir=str(self.output),
            use_cpu=options.cpu or not torch.cuda.is_available(),
            bf16=cuda or self.target.dtype in (torch.bfloat16, torch.float16),  # the weights stay in float32
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate or self.kind.learning_rate(self.model),
            lr_scheduler_type="cosine",
            warmup_steps=self.kind.warmup,
            # Betas and weight decay are those of EAGLE-3 (SafeAILab/EAGLE, eagle/traineagle3/ds_config.json).
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=self.kind.max_grad_norm,
            save_strategy="steps",
            save_steps=1_000_000_000,  # never: `TimeLimits` requests the checkpoints
            save_total_limit=2,
            logging_steps=options.logging_steps,
            logging_first_step=True,
            logging_nan_inf_filter=False,  # would wait for the device at every step
            seed=options.seed,
            data_seed=options.seed,
            remove_unused_columns=False,
            label_names=["loss_mask"],
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=cuda,
            report_to="none",
            disable_tqdm=not options.progress,
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # without `accelerate launch`, Trainer would use all GPUs, but the target is on one
        rows = self._rows_of_a_step(num_rows, arguments.world_size)
        at_once = options.rows_at_once or max(1, (8192 if cuda else 2048) // options.max_length)
        accumulation = -(-rows // min(rows, at_once))
        at_once = -(-rows // accumulation)  # at most as many as asked for, so that a step has `rows` rows or few more
        arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = at_once
        arguments.gradient_accumulation_steps = accumulation
        rows = at_once * accumulation
        steps = max(1, round(options.epochs * num_rows / (rows * arguments.world_size)))
        arguments.eval_strategy = "steps"
        arguments.eval_steps = options.eval_steps or max(1, steps // 10)
        if options.eval_texts == 0:
            arguments.eval_strategy = "no"
        return arguments

    def _rows_of_a_step(self, num_rows: int, world_size: int) -> int:
        """Rows of an optimizer step in one process: fewer than usual where little data would give few steps."""
        options = self.options
        rows = max(1, (options.batch_tokens or _BATCH_TOKENS) // (options.max_length * world_size))
        if options.batch_tokens is not None:
            return rows
        fewer = max(1, int(options.epochs * num_rows / (_FEWEST_STEPS * world_size)))
        if fewer < rows:
            tokens = options.max_length * world_size
            self.report(
                f"Little data ({num_rows} rows of {options.max_length} tokens): a step has {fewer * tokens} tokens "
                f"instead of {rows * tokens}, so that there are more steps. `batch_tokens` (--batch-tokens) sets it."
            )
        return min(rows, fewer)

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        if self.trainer.args.should_save:
            (self.output / name).write_text(json.dumps(values, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _load_target(options: TrainOptions, state: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if options.target is None:
        with state.main_process_first():  # the first process writes the folder
            smollm2_folder()
    dtype = options.dtype or ("bfloat16" if state.device.type == "cuda" else "float32")
    return load_target(options.target, DTYPES[dtype], str(state.device)), load_tokenizer(options.target)


def _check_held_out(output: Path, texts: Sequence[Sequence[Text]]) -> None:
    """Refuses to go on with a run whose checkpoints have seen other pieces of the texts that are held out now."""
    checkpoint = newest_complete(output, clean=False)
    if checkpoint is None or all(len(pieces) == 1 for pieces in texts):
        return
    if not holds_out_whole_texts(checkpoint):
        raise ValueError(
            f"`output`={str(output)!r} holds a run of an earlier version, which held out pieces of texts and trained "
            "on their other pieces. Give another folder, to begin again with whole texts held out."
        )
