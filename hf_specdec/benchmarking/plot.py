"""Plots of a benchmark report: speed-up by task, acceptance by depth, and the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from .bench import REFERENCE, Report
from .figures import ALL_TASKS, Figures


# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
GREYS = ("#999999", "#666666", "#C4C4C4")
MARKERS = "osD^vPX*"
PHASES = {"draft": "#E69F00", "verify": "#0072B2", "rest": "#BBBBBB", "whole": "#009E73"}


def save_plot(report: Report, path: Path) -> None:
    """
    Writes the plots of a report into one image, a row of panels for each temperature.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if matplotlib does not know the format of the file's suffix.
    """
    temperatures = list(dict.fromkeys(found.temperature for found in report.figures))
    num_tasks = len({found.task for found in report.figures})
    num_contenders = len({found.contender for found in report.figures})
    widest = min(max(4.5, num_tasks, 1.2 + 0.25 * num_tasks * num_contenders), 9.0)
    figure = Figure(figsize=(widest + 8.5, 0.5 + 4.8 * len(temperatures)), layout="constrained")
    figure.suptitle(_title(report), fontsize=12)
    rows = figure.subplots(len(temperatures), 3, squeeze=False, width_ratios=[widest, 3.8, 4.7])
    for temperature, (left, middle, right) in zip(temperatures, rows, strict=True):
        found = [figures for figures in report.figures if figures.temperature == temperature]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        _draw_speed_ups(left, found, mode)
        _draw_acceptance(middle, found)
        _draw_steps(right, found)
    figure.savefig(path, dpi=150)


def _title(report: Report) -> str:
    setting = report.setting
    parts = [setting.get(name) for name in ("target", "draft", "dtype", "device")]
    return " · ".join(str(part) for part in parts if part)


def _draw_speed_ups(axes: Axes, found: Sequence[Figures], mode: str) -> None:
    tasks = list(dict.fromkeys(figures.task for figures in found))
    contenders = [name for name in dict.fromkeys(figures.contender for figures in found) if name != REFERENCE]
    width = 0.8 / max(len(contenders), 1)
    for index, (name, colour) in enumerate(zip(contenders, _colours(contenders, found), strict=True)):
        values = [figures.speed_up for figures in found if figures.contender == name]
        places = [place + (index - (len(contenders) - 1) / 2) * width for place in range(len(tasks))]
        bars = axes.bar(places, values, width * 0.92, label=name, color=colour)
        # Labels of many narrow bars are rotated to fit.
        upright = 90 if len(tasks) * len(contenders) > 22 else 0
        halo = [withStroke(linewidth=3, foreground="white")]
        axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=2, rotation=upright, path_effects=halo)
    axes.axhline(1.0, color="#444444", linewidth=1, linestyle="--", zorder=0)
    axes.set_xticks(range(len(tasks)), ["all tasks" if task == ALL_TASKS else task for task in tasks])
    axes.set_ylabel("speed-up over generate")
    axes.set_title(f"Speed-up by task ({mode})", fontsize=12)
    axes.margins(y=0.12)
    if contenders:
        axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    _tidy(axes)


def _colours(contenders: Sequence[str], found: Sequence[Figures]) -> list[str]:
    """The colour of each contender: a colour for this library's trees, a shade of grey for baselines."""
    ours = _names_of_ours(found)
    greys = iter(GREYS)
    return [COLOURS[ours.index(name) % len(COLOURS)] if name in ours else next(greys) for name in contenders]


def _names_of_ours(found: Sequence[Figures]) -> list[str]:
    return list(dict.fromkeys(figures.contender for figures in found if figures.mean_acceptance_length is not None))


def _draw_acceptance(axes: Axes, found: Sequence[Figures]) -> None:
    """Draws one line for each tree; if there is one tree only, one line for each task."""
    ours = [figures for figures in found if figures.acceptance_per_position is not None]
    only = len(_names_of_ours(found)) == 1
    if not only:
        names = {figures.task for figures in ours}
        ours = [figures for figures in ours if figures.task == ALL_TASKS or len(names) == 1]
    deepest = max((len(figures.acceptance_per_position or ()) for figures in ours), default=1)
    for index, figures in enumerate(ours):
        shares = figures.acceptance_per_position or []
        name = ("all tasks" if figures.task == ALL_TASKS else figures.task) if only else figures.contender
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        if name == "all tasks":
            style = {"color": "black", "linestyle": "--", "marker": "."}
        label = f"{name}: {figures.mean_acceptance_length:.2f}"
        axes.plot(range(1, len(shares) + 1), shares, label=label, markersize=5, linewidth=1.6, **style)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.8, deepest + 0.2)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_xlabel("depth")
    axes.set_ylabel("share of drafts accepted so far")
    axes.set_title("Acceptance by depth", fontsize=12)
    if ours:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
        axes.legend(
            title="tokens per step", title_fontsize=9, fontsize=9, frameon=False, ncols=3 if only else 1, **below
        )
    _tidy(axes)


def _draw_steps(axes: Axes, found: Sequence[Figures]) -> None:
    tasks = list(dict.fromkeys(figures.task for figures in found))
    ours = [figures for figures in found if figures.step_ms is not None and figures.task == tasks[-1]]
    plain = next(figures for figures in found if figures.contender == REFERENCE and figures.task == tasks[-1])
    lefts, longest = [0.0] * len(ours), max(sum((figures.step_ms or {}).values()) for figures in ours)
    for phase, colour in PHASES.items():
        if not any(phase in (figures.step_ms or {}) for figures in ours):
            continue
        widths = [(figures.step_ms or {}).get(phase, 0.0) for figures in ours]
        bars = axes.barh(range(len(ours)), widths, 0.55, left=lefts, label=phase, color=colour)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        labels = [f"{width:.1f}" if width > 0.1 * longest else "" for width in widths]
        axes.bar_label(bars, labels, label_type="center", fontsize=9, color="white" if phase == "verify" else "black")
    per_token = 1000 * plain.seconds / plain.tokens
    bars = axes.barh(len(ours), per_token, 0.55, color="#666666")
    axes.bar_label(bars, [f"{per_token:.1f}"], label_type="center", fontsize=9, color="white")
    axes.set_yticks(
        range(len(ours) + 1), [*(figures.contender for figures in ours), "generate, a token\n(with prefill)"]
    )
    axes.set_ylim(len(ours) + 0.6, -0.6)
    axes.set_xlabel("milliseconds per step")
    axes.set_title("Time of a step", fontsize=12)
    axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.15), ncols=3)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
