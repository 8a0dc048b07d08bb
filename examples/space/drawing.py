"""The tree of a step as SVG: the root on the left, a column per depth."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from decoding import Step
from text import DEEPEST


COLUMN, LINE, MARGIN = 104, 32, 4
WIDTH, HEIGHT = 84, 25
LONGEST = 10
"""Characters of a token that are shown; all are in its tooltip."""


def tree_svg(step: Step, word: Callable[[int], str], summary: str) -> str:
    """
    Draws drafted nodes, the accepted path in the colours of the text, and the bonus or recovered token at its end.

    Args:
        word (`Callable[[int], str]`): what a token looks like.
        summary (`str`): what a screen reader says instead.
    """
    places = _layout(step)
    own = len(step.tokens) + 1
    accepted = {0, *step.path} | ({own} if step.own is not None else set())
    parents = dict(enumerate(step.parents, 1)) | {own: step.path[-1] if step.path else 0}
    shapes = []
    for node in sorted(places, key=lambda node: node in accepted):  # the accepted path lies on top
        if node:
            kind = "walked" if node in accepted else "edge"
            shapes.append(_edge(places[parents[node]], places[node], kind))
    for node, place in sorted(places.items(), key=lambda item: item[1]):  # read from the root on
        token = step.root if node == 0 else step.own if node == own else step.tokens[node - 1]
        shapes.append(_node(place, word(token), _style(step, node, own)))
    width = max(x for x, _ in places.values()) + WIDTH + MARGIN
    height = max(y for _, y in places.values()) + HEIGHT // 2 + MARGIN
    return (
        f'<svg class="tree" width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{escape(summary)}">{"".join(shapes)}</svg>'
    )


def _layout(step: Step) -> dict[int, tuple[int, float]]:
    """For every node that counts, its left edge and the middle of its height. Leaves take a line each, and what
    is above them that of the best."""
    own, last = len(step.tokens) + 1, step.path[-1] if step.path else 0
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parents, 1):
        if step.tokens[node - 1] >= 0:
            children.setdefault(parent, []).append(node)
    if step.own is not None:
        children.setdefault(last, []).append(own)
    places: dict[int, tuple[int, float]] = {}
    lines = 0

    def put(node: int, depth: int) -> float:
        nonlocal lines
        below = [put(child, depth + 1) for child in children.get(node, ())]
        if not below:
            lines += 1
        y = below[0] if below else MARGIN + HEIGHT / 2 + (lines - 1) * LINE
        places[node] = MARGIN + depth * COLUMN, y
        return y

    put(0, 0)
    return places


def _style(step: Step, node: int, own: int) -> str:
    if node == 0:
        return "root"
    if node == own:
        return step.origin_of_own if step.num_drafted else "plain"
    return f"d{min(step.path.index(node) + 1, DEEPEST)}" if node in step.path else "drafted"


def _edge(start: tuple[int, float], end: tuple[int, float], kind: str) -> str:
    (x1, y1), (x2, y2) = (start[0] + WIDTH, start[1]), end
    middle = (x1 + x2) / 2
    return f'<path class="{kind}" d="M{x1} {y1:.1f} C{middle} {y1:.1f} {middle} {y2:.1f} {x2} {y2:.1f}"/>'


def _node(place: tuple[int, float], word: str, style: str) -> str:
    x, y = place
    shown = word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"
    return (
        f'<g class="node {style}"><title>{escape(word)}</title>'
        f'<rect x="{x}" y="{y - HEIGHT / 2:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + 4:.1f}">{escape(shown)}</text></g>'
    )
