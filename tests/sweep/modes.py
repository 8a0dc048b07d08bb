"""The ways in which the sweep runs a model, each beside plain `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.scripted import ScriptedDraft
from transformers import GenerationMixin, PreTrainedModel

import hf_specdec
from hf_specdec import NgramDraft, TokenTree

from .building import noisy_copy
from .shrinking import FIRST_SPECIAL


PROMPT, NEW_TOKENS, ROWS = 14, 16, 2
CHAIN = TokenTree.chain(4)
TREE = TokenTree([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)])
MODES = ("chain", "tree", "padded batch", "n-grams", "generate_batch", "generate_batch, n-grams")
IMAGE_MODES = ("image, tree", "image, n-grams", "image, padded batch", "image, generate_batch")
LARGEST_ERROR = 1e-3
"""Of logits beside those of plain `generate`, in their standard deviation."""
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """
    How a mode went.

    Args:
        kind (`str`): "exact", "refused", "wrong", "crashed" or "nothing" (where plain `generate` fails itself).
        detail (`str`): the refusal's message, or what went wrong.
    """

    kind: str
    detail: str = ""


def prompts(rows: int) -> Inputs:
    """Random prompts `[rows, PROMPT]`; row b starts with 4 · b padding tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, FIRST_SPECIAL, (max(rows, ROWS), PROMPT), generator=generator)
    ids[:, -4:-2] = ids[:, 6:8]  # n-grams find something
    ids, mask = ids[:rows], torch.ones_like(ids[:rows])
    for row in range(rows):
        ids[row, : 4 * row], mask[row, : 4 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class Runner:
    """
    Runs one model in every mode.

    Args:
        model (`PreTrainedModel`): the target.
        inputs (`Callable`): makes the inputs of a number of rows.
    """

    def __init__(self, model: PreTrainedModel, inputs: Callable[[int], Inputs] = prompts):
        self.model, self.inputs = model, inputs
        self._plain: dict[Any, Any] = {}
        self._draft: PreTrainedModel | None = None

    @property
    def draft(self) -> PreTrainedModel:
        """A draft model that is often right."""
        if self._draft is None:
            self._draft = noisy_copy(self.writer)
        return self._draft

    @property
    def writer(self) -> PreTrainedModel:
        """What writes the text: the model, or the part whose `generate` the model's own calls."""
        if type(self.model).generate is GenerationMixin.generate:
            return self.model
        parts = (part for part in self.model.modules() if isinstance(part, GenerationMixin) and part is not self.model)
        return next((part for part in parts if isinstance(part, PreTrainedModel)), self.model)

    def outcomes(self, modes: Iterable[str] = MODES) -> dict[str, Outcome]:
        """The outcome of every mode, by its name."""
        return {mode: self.outcome(mode) for mode in modes}

    def outcome(self, mode: str) -> Outcome:
        """The outcome of one of `MODES` or `IMAGE_MODES`."""
        mode = mode.removeprefix("image, ")
        if self.model.config.is_encoder_decoder and mode in ("chain", "tree", "padded batch"):
            rows = ROWS if mode == "padded batch" else 1
            draft = self._scripted(rows)
            return self._generate(rows, lambda: draft, CHAIN if mode == "chain" else TREE)
        if mode == "chain":
            return self._generate(1, lambda: self.writer, CHAIN)
        if mode == "n-grams":
            return self._generate(1, lambda: NgramDraft(min_ngram=1), None)
        if mode == "generate_batch":
            return self._generate_batch(lambda: self.draft, TREE)
        if mode == "generate_batch, n-grams":
            return self._generate_batch(lambda: NgramDraft(min_ngram=1), None)
        return self._generate(ROWS if mode == "padded batch" else 1, lambda: self.draft, TREE)

    def plain(self, rows: int) -> torch.Tensor:
        """What plain `generate` writes for padded rows."""
        if rows not in self._plain:
            try:
                self._plain[rows] = self._call(rows, {})
            except Exception as error:
                self._plain[rows] = error
        if isinstance(self._plain[rows], Exception):
            raise self._plain[rows]
        return self._plain[rows].sequences

    def plain_alone(self) -> list[list[int]]:
        """The new tokens that plain `generate` writes for every row alone, without its padding."""
        if "alone" not in self._plain:
            texts = []
            for number, row in enumerate(self._prompts_alone()):
                if number == 0 and self.inputs is prompts:  # has no padding
                    texts.append(self.plain(1)[0, -NEW_TOKENS:].tolist())
                    continue
                text = self.model.generate(
                    torch.tensor([row]),
                    attention_mask=torch.ones(1, len(row), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                )
                texts.append(text[0, -NEW_TOKENS:].tolist())
            self._plain["alone"] = texts
        return self._plain["alone"]

    def _prompts_alone(self) -> list[list[int]]:
        inputs = prompts(ROWS)
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return [ids[mask.bool()].tolist() for ids, mask in rows]

    def _scripted(self, rows: int) -> ScriptedDraft:
        """Encoder-decoder targets take no draft models."""
        try:
            return ScriptedDraft(self.plain(rows)[:, -NEW_TOKENS:].tolist())
        except Exception:
            return ScriptedDraft([[]] * rows)

    def _generate(self, rows: int, draft: Callable[[], Any], tree: Any) -> Outcome:
        logits: list[torch.Tensor] = []

        def call() -> list[list[int]]:
            output = self._call(rows, {"assistant_model": draft()} | ({} if tree is None else {"tree": tree}))
            logits.extend(output.logits)
            return output.sequences.tolist()

        outcome = self.compared(call, lambda: self.plain(rows).tolist(), is_batch=False)
        if outcome.kind == "exact" and (error := _relative_error(logits, self._plain[rows].logits)) > LARGEST_ERROR:
            return Outcome("wrong", f"the same text, but its logits differ by {error:.1e} of their spread")
        return outcome

    def _call(self, rows: int, options: dict[str, Any]) -> Any:
        return self.model.generate(
            **self.inputs(rows),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )

    def _generate_batch(self, draft: Callable[[], Any], tree: Any) -> Outcome:
        prompts_alone: list[Any] = self._prompts_alone()
        images = [] if self.inputs is prompts else [self.inputs(1)]

        def call() -> list[list[int]]:
            results = self.model.generate_batch(
                images + prompts_alone + images,
                assistant_model=draft(),
                **({} if tree is None else {"tree": tree}),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )
            return [list(result.generated_tokens) for result in results.values()]

        def plain() -> list[list[int]]:
            of_images = [self.plain(1)[0, -NEW_TOKENS:].tolist() for _ in images]
            return of_images + self.plain_alone() + of_images

        return self.compared(call, plain, is_batch=True)

    def compared(self, call: Callable[[], Any], plain: Callable[[], Any], is_batch: bool) -> Outcome:
        """The outcome of a call with a draft beside one without; both give the tokens of all rows."""
        before = hf_specdec.last_metrics()
        with _counted_forwards(self.model) as forwards:
            try:
                text = call()
            except (ValueError, TypeError) as error:
                if not forwards and _names_something(error):
                    return self._refused(error)
                return self._crashed(error, plain)
            except Exception as error:
                return self._crashed(error, plain)
        try:
            expected = plain()
        except Exception as error:
            return Outcome("nothing", f"plain generate: {type(error).__name__}: {error}")
        if text != expected:
            return Outcome("wrong", _difference(text, expected))
        if not is_batch and hf_specdec.last_metrics() is before:
            return Outcome("wrong", "the draft is ignored")
        if not is_batch and hf_specdec.last_metrics().num_accepted_tokens == 0:
            return Outcome("exact", "nothing accepted")
        return Outcome("exact")

    def _refused(self, error: Exception) -> Outcome:
        """Where there is no plain text, nothing is refused."""
        try:
            self.plain(1)
        except Exception as plain_error:
            return Outcome("nothing", f"plain generate: {type(plain_error).__name__}: {plain_error}")
        return Outcome("refused", str(error))

    def _crashed(self, error: Exception, plain: Callable[[], Any]) -> Outcome:
        try:
            plain()
        except Exception as plain_error:
            return Outcome("nothing", f"plain generate: {type(plain_error).__name__}: {plain_error}")
        return Outcome("crashed", f"{type(error).__name__}: {error}")


def _relative_error(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference between logits, measured in their standard deviation."""
    ours, plain = (torch.stack(list(steps)).double() for steps in (logits, expected))
    finite = plain.isfinite()
    return float((ours - plain)[finite].abs().max() / plain[finite].std())


def _names_something(error: Exception) -> bool:
    """Whether an error is one of ours, which name an argument."""
    return "`assistant_model`" in str(error) or "`pixel_values`" in str(error)


def _difference(text: list[list[int]], expected: list[list[int]]) -> str:
    for row, (ours, plain) in enumerate(zip(text, expected, strict=True)):
        for place, (token, other) in enumerate(zip(ours, plain, strict=False)):
            if token != other:
                return f"row {row}, token {place - len(plain)} from the end: {token} instead of {other}"
    return f"lengths {[len(row) for row in text]} instead of {[len(row) for row in expected]}"


@contextmanager
def _counted_forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """
    Collects an entry for every forward inside the context: of the model or of a part of it, or, where a `generate` of
    its own runs encoders first, of the part that writes the text.
    """
    forwards: list[int] = []
    parts = [model, *model.children()]
    if type(model).generate is not GenerationMixin.generate:
        parts = [part for part in model.modules() if isinstance(part, GenerationMixin) and part is not model] or parts
    hooks = [
        part.register_forward_pre_hook(lambda *_: forwards.append(1))
        for part in parts
        if not isinstance(part, torch.nn.Embedding)
    ]
    try:
        yield forwards
    finally:
        for hook in hooks:
            hook.remove()
