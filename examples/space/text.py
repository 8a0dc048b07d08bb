"""Tokens as coloured text, the figures over it, and the legend."""

from __future__ import annotations

from html import escape

from decoding import Recording, Step, Token
from transformers import PreTrainedTokenizerBase

from hf_specdec.serving.text_pieces import TextPieces


DEEPEST = 6
"""From here on, depths share a colour."""
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


class Words:
    """
    What tokens look like.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)

    def alone(self, token: int) -> str:
        """A token by itself, with signs for spaces and line breaks."""
        return self.tokenizer.decode([token]).translate(SIGNS)

    def pieces(self, ids: list[int]) -> list[str]:
        """What each token adds to a text; a character in parts belongs to its last part."""
        text = TextPieces(self.tokenizer)
        pieces = [text.add(token) for token in ids]
        return [*pieces[:-1], pieces[-1] + text.rest()] if pieces else []


def style_of(token: Token) -> str:
    """The class of its colour."""
    return f"d{min(token.depth, DEEPEST)}" if token.origin == "accepted" else token.origin


def describe(token: Token) -> str:
    if token.step is None:
        return "the first token, from the prompt's own forward"
    what = f"accepted at depth {token.depth}" if token.origin == "accepted" else token.origin
    return f"step {token.step + 1}: " + ("nothing was drafted" if token.origin == "plain" else what)


def text_html(recording: Recording, words: Words, coloured: bool, selected: int | None = None) -> str:
    """The text so far; coloured, every token is one to click on."""
    tokens = list(recording.tokens)
    added = zip(tokens, words.pieces([token.id for token in tokens]), strict=True)
    pieces = [_piece(piece, is_special=token.id in words.special) for token, piece in added]
    if coloured:
        pieces = [_span(token, piece, selected) for token, piece in zip(tokens, pieces, strict=True)]
    cursor = "" if recording.done else '<span class="cursor" aria-hidden="true"></span>'
    return f'<div class="text">{"".join(pieces)}{cursor}</div>'


def _piece(piece: str, is_special: bool) -> str:
    return f'<span class="special">{escape(piece)}</span>' if is_special else escape(piece)


def _span(token: Token, piece: str, selected: int | None) -> str:
    if token.step is None:
        return f'<span class="t plain" title="{describe(token)}">{piece}</span>'
    chosen = " chosen" if token.step == selected else ""
    # A line break has no width of its own to be clicked on.
    piece = piece.replace("\n", '<span class="break">↵</span>\n')
    return (
        f'<span class="t {style_of(token)}{chosen}" data-step="{token.step}" title="{describe(token)}">{piece}</span>'
    )


# ---------------------------------------------------------------------------------------------------------- around it


def panel_html(title: str, body: str, recording: Recording | None = None) -> str:
    """One of the runs; a recording's figures are over its text."""
    count = f"{len(recording.tokens)} tokens in {recording.seconds:.1f} s" if recording else ""
    head = f'<div class="head"><h3>{title}</h3><span class="count">{count}</span></div>'
    return f'<div class="panel">{head}{_figures(recording) if recording else ""}{body}</div>'


def _figures(recording: Recording) -> str:
    """Tokens per second and, of a speculative call, acceptance."""
    figures = [(f"{recording.tokens_per_second:.1f}", "tokens/s")]
    if metrics := recording.metrics:
        figures.append((f"{metrics.mean_acceptance_length:.2f}", "tokens per step"))
        figures.append((f"{metrics.draft_acceptance_rate:.0%}", "accepted"))
    entries = (f"<div><dd>{value}</dd><dt>{name}</dt></div>" for value, name in figures)
    return f'<dl class="figures">{"".join(entries)}</dl>'


def legend_html() -> str:
    """What the colours mean."""
    depths = " ".join(
        f'<span class="t d{depth}">depth {depth}{"+" if depth == DEEPEST else ""}</span>'
        for depth in range(1, DEEPEST + 1)
    )
    return (
        f'<div class="legend"><p>Accepted drafts: {depths}</p><p>The model\'s own tokens: '
        '<span class="t bonus">bonus</span> after a whole path, '
        '<span class="t recovered">recovered</span> where it went another way, '
        '<span class="t plain">plain</span> where nothing was drafted</p></div>'
    )


def verdict_html(
    plain: Recording, names: list[str], drafted: list[Recording], is_greedy: bool, dtype: str, is_auto: bool
) -> str:
    """How much faster those drafts are that are done, and whether the texts are equal where they have to be."""
    done = list(zip(names, drafted, strict=False))
    ratios = [recording.tokens_per_second / plain.tokens_per_second for recording in drafted]
    speeds = ", ".join(f"{name} <b>{ratio:.2f}×</b>" for (name, _), ratio in zip(done, ratios, strict=True))
    sentences = [f"{speeds} the tokens per second of plain <code>generate</code>."]
    if not is_greedy:
        sentences.append("Texts differ, as draws from the same distribution do.")
    elif all(plain.ids == recording.ids for recording in drafted):
        sentences.append("<b>Identical texts</b>, token for token.")
    else:
        sentences += [_difference(name, plain.ids, recording.ids, dtype) for name, recording in done]
    if min(ratios) < 1 and not is_auto:
        sentences.append("Below 1×, too little was accepted to pay for the drafts: try a smaller tree, or auto.")
    return f'<p class="verdict">{" ".join(filter(None, sentences))}</p>'


def _difference(name: str, plain: list[int], drafted: list[int], dtype: str) -> str:
    if plain == drafted:
        return ""
    pairs = zip(plain, drafted, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(drafted)))
    why = (
        "near-ties round either way there"
        if dtype != "float32"
        else "which should not be in float32: please report it"
    )
    return f"The text of {name} differs from token {place + 1} on ({dtype}: {why})."


def message_html(text: str) -> str:
    """Something that the reader has to mend."""
    return f'<p class="message" role="alert">{escape(text)}</p>'


def step_summary(step: Step, number: int, total: int) -> str:
    """One line about a step."""
    if not step.num_drafted:
        return f"Step {number + 1} of {total}: nothing was drafted; the model wrote one token."
    own = "" if step.own is None else f" + {step.origin_of_own}"
    count = len(step.path) + (step.own is not None)
    tokens = "token" if count == 1 else "tokens"
    return (
        f"Step {number + 1} of {total}: {step.num_drafted} drafted, {len(step.path)} accepted{own} = {count} {tokens}."
    )
