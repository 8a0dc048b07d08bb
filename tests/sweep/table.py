"""Writes the results of a sweep as the table of docs/compatibility.md."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import transformers

from .modes import Outcome
from .registry import Pair
from .running import Result


BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
_TITLES = {"exact": "exact", "partly": "exact, but", "refused": "refused", "failure": "fails", "not run": "not run"}


def write_table(page: Path, results: list[Result]) -> None:
    """
    Replaces what stands between the markers of a page.

    Raises:
        ValueError: if the page has no markers.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} between which the table goes.")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table_of(results)}\n{END}{rest.split(END)[1]}")


def table_of(results: list[Result]) -> str:
    """The table: a row per result and reason, with the classes that it is about."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.summary, _reason(result)].append(result)
    lines = [
        f"transformers {transformers.__version__}: {len(results)} pairs of architecture and class.",
        "A star: with an image, too.",
        "",
        "| result | why | number | classes |",
        "|---|---|---|---|",
    ]
    for title in _TITLES:
        for (summary, reason), found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
            if summary == title:
                lines.append(f"| {_TITLES[title]} | {reason} | {len(found)} | {_classes(found)} |")
    return "\n".join(lines)


def summaries_in(page: Path) -> dict[Pair, str]:
    """What the table of a page says of every pair: a summary of `Result`."""
    table = page.read_text().split(BEGIN)[1].split(END)[0]
    summaries = {}
    names = {title: summary for summary, title in _TITLES.items()}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for model_types, name in re.findall(r"([\w.\-, ]+): `(\w+)`", cells[-1]) if cells[0] in names else ():
            for model_type in model_types.split(","):
                summaries[Pair(model_type.strip(), name)] = names[cells[0]]
    return summaries


def _classes(results: list[Result]) -> str:
    types: dict[str, list[str]] = defaultdict(list)
    for result in sorted(results, key=lambda result: result.pair):
        has_images = any(mode.startswith("image, ") and one.kind == "exact" for mode, one in result.outcomes.items())
        types[f"`{result.pair.class_name}`{'*' if has_images else ''}"].append(result.pair.model_type)
    return "; ".join(f"{', '.join(names)}: {name}" for name, names in types.items())


def _reason(result: Result) -> str:
    if result.summary == "exact":
        return ""
    if result.problem:
        return _shortened(result.problem)
    wanted = {"failure": ("wrong", "crashed"), "not run": ("nothing",)}.get(result.summary, ("refused",))
    reasons: dict[str, list[str]] = defaultdict(list)
    for mode, outcome in result.outcomes.items():
        if outcome.kind in wanted:
            reasons[_said(outcome, result.pair)].append(mode)
    if result.summary in ("refused", "not run"):
        return next(iter(reasons))
    kinds = {reason: dict.fromkeys(mode.split(", ")[0] for mode in modes) for reason, modes in reasons.items()}
    return "; ".join(f"{', '.join(modes)}: {reason}" for reason, modes in kinds.items())


def _said(outcome: Outcome, pair: Pair) -> str:
    """What a refusal says of a class, without its name and the remedy."""
    said = re.sub(r"^.*?`assistant_model`: ", "", re.split(r"\. (?=[A-Z])", outcome.detail)[0])
    said = re.sub(rf"the target \w+(?:{pair.class_name})? ", "", said)
    return _shortened(said)


def _shortened(text: str) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= 200 else text[:199] + "…"
