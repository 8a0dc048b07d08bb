"""
Writes the model card of a head or a draft model, with what `draft_quality.py --json FILE` measured.

    python benchmarks/write_card.py --head FOLDER [--results FILE [FILE …]] [--cpu-results FILE …]
    python benchmarks/write_card.py --draft FOLDER [--target HUB_ID] [--results FILE [FILE …]]

The card goes to FOLDER/README.md, its figures to FOLDER/measurements.json, from which they are read if no results are
given. It is for a repository of the folder's name unless `--repo-id` says otherwise. What else it says comes from the
folder's config. Results with texts that were not those of plain `generate` in float32 are refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_specdec import Measurement, load_draft
from hf_specdec.cards import draft_model_card
from hf_specdec.cards.measurement import read_measurements
from hf_specdec.cards.sections import FIGURES
from hf_specdec.smollm2 import SMOLLM2_HUB_ID


def read_results(path: Path) -> list[Measurement]:
    """
    Reads the measurements in a file of `draft_quality.py --json`.

    Raises:
        ValueError: if the file is no such document, or if greedy texts differed from plain `generate`'s.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        identical, total = document["identical_in_float32"]
        found = read_measurements(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file that `draft_quality.py --json` wrote ({error!r}).") from error
    if identical < total:
        raise ValueError(f"{path}: {total - identical} of {total} texts were not those of plain generate.")
    return found


def make_card(arguments: argparse.Namespace, measurements: Sequence[Measurement]) -> ModelCard:
    """The model card of the head or draft model in the folder."""
    fields = {"measurements": measurements, "license": arguments.license, "language": arguments.language}
    if arguments.head is not None:
        head = load_draft(str(arguments.head))
        return head.model_card(arguments.repo_id or arguments.head.name, **fields)
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype="auto")
    return draft_model_card(draft, arguments.target, arguments.repo_id or arguments.draft.name, **fields)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--head", type=Path, help="folder of an EAGLE head or a block head")
    what.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--target", default=SMOLLM2_HUB_ID, help="Hub id of a draft model's target")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="files of draft_quality.py")
    parser.add_argument("--cpu-results", type=Path, nargs="+", default=[], help="more of them, which come last")
    parser.add_argument("--repo-id", help="where it will be")
    parser.add_argument("--license", default="apache-2.0")
    parser.add_argument("--language", default="en")
    arguments = parser.parse_args(words)
    files = [*arguments.results, *arguments.cpu_results]
    folder = arguments.head or arguments.draft
    measurements = [found for file in files for found in read_results(file)]
    if not files and (folder / FIGURES).exists():
        measurements = read_measurements(folder / FIGURES)
    path = folder / "README.md"
    make_card(arguments, measurements).save(path)
    print(path)


if __name__ == "__main__":
    main()
