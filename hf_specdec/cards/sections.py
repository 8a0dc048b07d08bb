"""Sections that the cards of heads and of draft models share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .measurement import Measurement, longest_of_each_tree, write_measurements


NO_NAME = "the target"
"""Placeholder for the name of a target without a Hub repository."""
FIGURES = "measurements.json"
"""The file beside a card with everything that was measured."""

# Columns of the table of measurements; a column without values is left out.
_COLUMNS = {
    "prompts": lambda found: found.dataset,
    "tree": lambda found: found.tree,
    "temperature": lambda found: f"{found.temperature:g}",
    "draft sampling": lambda found: found.draft_sampling,
    "verification": lambda found: found.verification,
    "mean acceptance length": lambda found: f"{found.mean_acceptance_length:.2f}",
    "acceptance at depth 1, 2, …": lambda found: _shares(found.acceptance_per_position),
    "acceptance rate": lambda found: _rounded(found.draft_acceptance_rate, ".3f"),
    "tokens/s": lambda found: _rounded(found.tokens_per_second, ".1f"),
    "plain tokens/s": lambda found: _rounded(found.plain_tokens_per_second, ".1f"),
    "speed-up": lambda found: _rounded(found.speed_up, ".2f"),
}


class MeasuredCard(ModelCard):
    """A model card whose measurements are saved beside it."""

    measurements: Sequence[Measurement] = ()

    def save(self, filepath: str | Path) -> None:
        """Writes the card, and its measurements (if there are any) to `measurements.json` in the same folder."""
        super().save(filepath)
        if self.measurements:
            write_measurements(self.measurements, Path(filepath).with_name(FIGURES))


def build_card(
    sections: Sequence[str], *, name: str, measurements: Sequence[Measurement] = (), **fields: Any
) -> ModelCard:
    """
    A model card of the sections that are not empty.

    Args:
        sections (`Sequence[str]`): texts of the sections.
        name (`str`): name of the model in the model-index.
        measurements (`Sequence[Measurement]`): measurements for the model-index, which has one figure of each tree,
            and for the file beside the card.
        fields: fields of `ModelCardData`.
    """
    results = [measurement.eval_result() for measurement in longest_of_each_tree(measurements)]
    data = ModelCardData(
        pipeline_tag="text-generation",
        model_name=name if results else None,
        eval_results=results or None,
        **fields,
    )
    body = "\n\n".join(section for section in sections if section)
    card = MeasuredCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    card.measurements = measurements
    return card


def published_name(target: str | None) -> str | None:
    """A target's name if it can be a Hub repository, else None: the training machine's folders are not published."""
    if not target or os.path.exists(target):
        return None
    try:
        validate_repo_id(target)
    except HFValidationError:
        return None
    return target


def title(name: str, kind: str, target: str | None) -> str:
    """The heading and introduction of a card. `kind` is a noun such as "An EAGLE-3 head"."""
    target = published_name(target)
    of = f"[{target}](https://huggingface.co/{target})" if target else "its target model"
    return (
        f"# {name}\n\n{kind} for speculative decoding with {of}. It drafts a tree of tokens that the target then "
        "verifies in one forward pass; the text is distributed as without it. How much sooner it comes depends on the "
        "machine and the text."
    )


def usage(target: str | None, load: str, options: str) -> str:
    """The section "How to use"; `load` is the line that loads the draft, `options` are entries of `generate`'s."""
    return f"""## How to use

```bash
pip install path/to/hf_specdec  # a checkout of the repository
```

```python
import hf_specdec
from transformers import AutoModelForCausalLM, AutoTokenizer

target_name = "{published_name(target) or NO_NAME}"
tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto")  # on a GPU: .to("cuda")
{load}

messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {{{options}, "max_new_tokens": 256}}
output = target.generate(**inputs.to(target.device), **options)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(hf_specdec.last_metrics().mean_acceptance_length)
```"""


def measured(measurements: Sequence[Measurement]) -> str:
    """The section "Measured": a table for each machine, dtype and batch size, in the order of the measurements."""
    if not measurements:
        return ""
    parts = ["## Measured"]
    for conditions, group in groupby(measurements, key=_conditions):
        parts.append(f"{conditions}:\n\n{_measured_table(list(group))}")
    parts.append(
        "Mean acceptance length: tokens per step, the target's own token included. Acceptance at depth d: the share "
        f"of steps that kept d draft tokens or more. All figures: [{FIGURES}]({FIGURES})."
    )
    return "\n\n".join(parts)


def facts(heading: str, values: Mapping[str, Any]) -> str:
    """A section with a table of names and values; empty without values."""
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in values.items()]
    return "\n".join([f"## {heading}", "", "| | |", "|---|---|", *rows]) if rows else ""


def recipe(values: Mapping[str, Any] | None) -> str:
    """The section "Training" from a config's `recipe`; values of lists are separated by spaces."""
    return facts(
        "Training",
        {
            name: " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            for name, value in (values or {}).items()
        },
    )


def _conditions(found: Measurement) -> str:
    names = (found.hardware, found.dtype, f"batch size {found.batch_size}")
    return ", ".join(name for name in names if name)


def _measured_table(group: Sequence[Measurement]) -> str:
    cells = {name: [read(found) for found in group] for name, read in _COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    rows = zip(*cells.values(), strict=True)
    lines = [list(cells), ["---"] * len(cells), *([cell or "" for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rounded(value: float | None, digits: str) -> str | None:
    return None if value is None else format(value, digits)


def _shares(values: Sequence[float] | None) -> str | None:
    return " ".join(f"{value:.2f}" for value in values) if values else None
