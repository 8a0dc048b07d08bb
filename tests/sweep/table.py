"""Writes the results of a sweep as the table of docs/compatibility.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import transformers

from hf_specdec.models.reasons import Reason

from .modes import Outcome
from .registry import Pair
from .running import Result


BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
_TITLES = {"exact": "exact", "partly": "exact, but", "refused": "refused", "failure": "fails", "not run": "not run"}


@dataclass(frozen=True, order=True)
class Row:
    """What the table says of a pair: a summary of `Result`, the reason, and whether images are exact, too."""

    pair: Pair
    summary: str
    reason: str
    has_images: bool

    @classmethod
    def of(cls, result: Result) -> Row:
        """What it is to say of a result."""
        has_images = any(mode.startswith("image, ") and one.kind == "exact" for mode, one in result.outcomes.items())
        return cls(result.pair, result.summary, _reason(result), has_images)


def write_table(page: Path, results: list[Result], keeps: bool = False) -> None:
    """
    Replaces what stands between the markers of a page. With `keeps`, what it says of other pairs than those of the
    results stays.

    Raises:
        ValueError: if the page has no markers, or `keeps` what another release gave.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} between which the table goes.")
    if keeps and f"transformers {transformers.__version__}:" not in text:
        raise ValueError(f"The table of {page} is not of transformers {transformers.__version__}. Run all pairs.")
    rows = {row.pair: row for row in [*(rows_in(page) if keeps else []), *map(Row.of, results)]}
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table_of(list(rows.values()))}\n{END}{rest.split(END)[1]}")


def table_of(rows: list[Row]) -> str:
    """The table: a line per summary and reason, with the classes that it is about."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.summary, row.reason].append(row)
    lines = [
        f"transformers {transformers.__version__}: {len(rows)} pairs of architecture and class. {_share(rows)}",
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


def _share(rows: list[Row]) -> str:
    """How many of the pairs that plain `generate` serves are exact, in some or in all ways."""
    counts = Counter(row.summary for row in rows)
    run = len(rows) - counts["not run"]
    exact = counts["exact"] + counts["partly"]
    return f"Plain `generate` runs {run}; {exact} ({exact / run:.0%}) are exact, {counts['exact']} in every mode."


def changes(before: dict[Pair, str], after: dict[Pair, str]) -> list[str]:
    """What a sweep has found otherwise than a page says, a line for each pair; for a new release, say."""
    lines = []
    for pair in sorted(before | after):
        old, new = before.get(pair), after.get(pair)
        if old != new:
            lines.append(f"{pair}: {old or 'not there'} -> {new or 'not there'}")
    return lines


def rows_in(page: Path) -> list[Row]:
    """What the table of a page says of every pair."""
    names, rows = {title: summary for summary, title in _TITLES.items()}, []
    for line in page.read_text().split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for model_types, name, star in (
            re.findall(r"([\w.\-, ]+): `(\w+)`(\*?)", cells[-1]) if cells[0] in names else ()
        ):
            for model_type in model_types.split(","):
                rows.append(Row(Pair(model_type.strip(), name), names[cells[0]], cells[1], bool(star)))
    return rows


def summaries_in(page: Path) -> dict[Pair, str]:
    """What the table of a page says of every pair: a summary of `Result`."""
    return {row.pair: row.summary for row in rows_in(page)}


def _classes(rows: list[Row]) -> str:
    types: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows):
        types[f"`{row.pair.class_name}`{'*' if row.has_images else ''}"].append(row.pair.model_type)
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
    """The reason of a refusal, or what it says of a class, without its name and the remedy."""
    if (reason := Reason.of(outcome.detail)) is not None:
        return str(reason)
    said = re.sub(r"^.*?`(assistant_model`|tree`=[^:]*): ", "", re.split(r"\. (?=[A-Z])", outcome.detail)[0])
    said = re.sub(rf"the (target|draft) \w+(?:{pair.class_name})? ", "", said)
    return _shortened(said)


def _shortened(text: str) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= 200 else text[:199] + "…"
