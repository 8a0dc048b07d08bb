"""Runs one pair: builds its model, and every mode within a time limit."""

from __future__ import annotations

import gc
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from .building import tiny_model
from .encoders import encoder_inputs
from .images import has_images, with_images
from .modes import IMAGE_MODES, NEW_TOKENS, ROWS, Outcome, Runner, prompts
from .registry import Pair
from .state_modes import state_outcomes
from .states import states_of


ATTEMPTS = ((0, 3.0), (1, 3.0), (2, 5.0), (3, 2.0))
"""Seeds and sharpness of weights, tried until the text is varied enough to tell faults apart."""
LEAST_VARIETY = 5


@dataclass
class Result:
    """
    How a pair went.

    Args:
        pair (`Pair`): the pair.
        outcomes (`dict[str, Outcome]`): by mode; empty where the model cannot be built.
        problem (`str`): why it cannot be built.
    """

    pair: Pair
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    problem: str = ""

    @property
    def kinds(self) -> set[str]:
        """The kinds of its outcomes."""
        return {outcome.kind for outcome in self.outcomes.values()}

    @property
    def failures(self) -> dict[str, Outcome]:
        """Outcomes that are neither exact nor refused, by mode."""
        return {mode: outcome for mode, outcome in self.outcomes.items() if outcome.kind in ("wrong", "crashed")}

    @property
    def summary(self) -> str:
        """One of "exact", "partly", "refused", "failure" and "not run"."""
        if not self.outcomes or self.kinds == {"nothing"}:
            return "not run"
        if self.failures:
            return "failure"
        kinds = self.kinds - {"nothing"}
        return {"exact": "exact", "refused": "refused"}[kinds.pop()] if len(kinds) == 1 else "partly"

    def line(self) -> str:
        """The line that the command prints."""
        if not self.outcomes:
            return f"not run   {self.pair}: {self.problem}"
        details = [f"{mode}: {outcome.kind} {outcome.detail}" for mode, outcome in self.outcomes.items()]
        if self.summary == "exact":
            details = [detail for detail in details if not detail.endswith("exact ")]
        elif self.summary == "refused":
            details = sorted({outcome.detail for outcome in self.outcomes.values()})
        return f"{self.summary:9} {self.pair}" + "".join(f"\n            {detail[:400]}" for detail in details)


def run(pair: Pair, seconds: int = 300) -> Result:
    """Builds the model of a pair and runs it in every mode, for at most so many seconds."""
    try:
        with _time_limit(seconds):
            gc.collect()  # models of earlier pairs
            if not pair.model_class.can_generate():
                return Result(pair, problem="has no `generate`")
            runner = runner_of(pair)
            outcomes = runner.outcomes()
            if states_of(pair) and not {outcome.kind for outcome in outcomes.values()} <= {"refused", "nothing"}:
                outcomes |= state_outcomes(runner)
            if not runner.model.config.is_encoder_decoder:
                outcomes |= _image_outcomes(runner.model)
            return Result(pair, outcomes)
    except _TookTooLong:
        return Result(pair, {"all": Outcome("crashed", f"took more than {seconds} s")})
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.line}"
        return Result(pair, problem=f"{type(error).__name__}: {str(error)[:200]!r} at {place}")


def _image_outcomes(model: PreTrainedModel) -> dict[str, Outcome]:
    """Outcomes of prompts with images; none for models without images, or where the sweep cannot make any."""
    if not has_images(model):
        return {}
    try:
        inputs = {rows: with_images(model, prompts(rows)) for rows in (1, ROWS)}
        runner = Runner(model, inputs.__getitem__)
        runner.plain(1)
    except Exception as error:
        return {"image": Outcome("nothing", f"{type(error).__name__}: {str(error)[:200]}")}
    return runner.outcomes(IMAGE_MODES)


def runner_of(pair: Pair) -> Runner:
    """The first model of `ATTEMPTS` whose text is varied; the last one if none is, or if it has none."""
    for seed, sharpness in ATTEMPTS:
        model = tiny_model(pair, seed, sharpness, _dtype_of(pair))
        runner = Runner(model, encoder_inputs(model) if model.config.is_encoder_decoder else prompts)
        try:
            text = runner.plain(ROWS)[:, -NEW_TOKENS:]
        except Exception:
            return runner
        if all(len(row.unique()) >= LEAST_VARIETY for row in text):
            break
    return runner


def _dtype_of(pair: Pair) -> torch.dtype:
    """float64, unless the model cannot compute in it, or makes NaN of padding as eager attention may."""
    try:
        model = tiny_model(pair)
        with torch.no_grad():
            logits = model(**prompts(ROWS)).logits
        return torch.float32 if logits.isnan().any() or _is_eager(model) else torch.float64
    except Exception:
        return torch.float32


def _is_eager(model: PreTrainedModel) -> bool:
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    return implementation in (None, "eager")


class _TookTooLong(BaseException):
    pass


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
