"""Draws as bars beside the exact probabilities."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from draws import COUNT, Draws


def histogram_html(title: str, draws: Draws, word: Callable[[int], str]) -> str:
    """
    Args:
        title (`str`): what drafted.
        word (`Callable[[int], str]`): what a token looks like.
    """
    names = [escape(word(token)) for token in draws.tokens] + ["all others"]
    top = max([*draws.exact, *(count / max(draws.total, 1) for count in draws.counts)])
    rows = "".join(_row(name, draws, place, top) for place, name in enumerate(names))
    return (
        f'<div class="panel draws"><div class="head"><h3>{escape(title)}</h3>'
        f'<span class="count">{draws.total} of {COUNT} draws</span></div>'
        '<table class="histogram"><thead><tr><th scope="col">token</th><th aria-hidden="true"></th>'
        f'<th scope="col">drawn</th><th scope="col">exact</th></tr></thead><tbody>{rows}</tbody></table>'
        f"{_fit(draws)}</div>"
    )


def _row(name: str, draws: Draws, place: int, top: float) -> str:
    drawn = draws.counts[place] / max(draws.total, 1)
    accepted, own, exact = (
        100 * share / top
        for share in (
            draws.accepted[place] / max(draws.total, 1),
            draws.own[place] / max(draws.total, 1),
            draws.exact[place],
        )
    )
    return (
        f'<tr><th scope="row" title="{name}">{name}</th><td class="bars" aria-hidden="true"><div class="bar">'
        f'<i class="accepted" style="width:{accepted:.2f}%"></i><i class="own" style="width:{own:.2f}%"></i></div>'
        f'<div class="bar"><i class="exact" style="width:{exact:.2f}%"></i></div></td>'
        f"<td>{drawn:.1%}</td><td>{draws.exact[place]:.1%}</td></tr>"
    )


def _fit(draws: Draws) -> str:
    """How far the counts are from the probabilities, and how far counts of exact draws are."""
    if not draws.total:
        return '<p class="fit">Drawing …</p>'
    low, high = draws.usual_distances()
    return (
        f'<p class="fit"><b>{sum(draws.accepted) / draws.total:.0%}</b> of the draws were accepted drafts. Distance '
        f"from exact: <b>{draws.distance:.3f}</b>; nine of ten samples of {draws.total} exact draws lie between "
        f"{low:.3f} and {high:.3f}.</p>"
    )


def key_html(context: str, root: str, temperature: float) -> str:
    """What is drawn after the prompt, the text `context`, and the token `root`, and what the bars are."""
    text = f" and “{escape(context)}”" if context else ""
    return (
        f'<div class="legend"><p>Each draw is a request of its own. After the prompt{text}, it starts from the '
        f'token <span class="t plain">{escape(root)}</span>, drafts 4 tokens, verifies them in one '
        f"forward at temperature {temperature:g}, and counts the token that follows.</p>"
        '<p><span class="t d3">accepted draft</span> + <span class="t bonus">the model\'s own token</span> = draws. '
        '<span class="t exact">exact</span>: the probabilities that plain <code>generate</code> draws from. Distance: '
        "total variation, over these bars.</p></div>"
    )
