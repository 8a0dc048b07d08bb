"""Plain and speculative decoding of one prompt, one after the other, and what the page shows of it as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zero import gpu  # before anything touches CUDA


from decoding import Recording, decode, encode  # isort: skip
from drawing import tree_svg
from draws import draw, telling_place
from histogram import histogram_html, key_html
from models import load_models
from text import Words, legend_html, message_html, panel_html, step_summary, text_html, verdict_html

from hf_specdec import SpeculativeConfig
from hf_specdec.benchmarking.contenders import sampling_options
from hf_specdec.trees.text import parse_tree


WARM_UP_TOKENS = 8
PLAIN = "Plain"

models = load_models()
words = Words(models.tokenizer)


@dataclass
class Shown:
    """
    A run that is done: the prompt's tokens, how it was run, what drafted, the recordings, and after how many tokens of
    the plain text to draw first.
    """

    prompt: list[int]
    temperature: float
    names: list[str]
    plain: Recording
    drafted: list[Recording]
    place: int


@dataclass
class Page:
    """What is on the page, apart from the controls."""

    message: str = ""
    plain: str = ""
    drafted: list[str] = field(default_factory=lambda: ["", ""])
    legend: str = field(default_factory=legend_html)
    verdict: str = ""
    tree: str = ""
    shown: Shown | None = None
    """What was run, once it is done."""


def first_page(names: list[str]) -> Page:
    """Before the first run."""
    plain = waiting("The model writes one token per forward.")
    guess = waiting("It guesses; one forward of the model checks all guesses.")
    return Page(plain=panel_html(PLAIN, plain), drafted=[panel_html(name, guess) for name in names])


def waiting(text: str) -> str:
    return f'<div class="text waits">{text}</div>'


@gpu  # in a process of its own, which gets and gives plain values
def pages(prompt: str, left: str, right: str, tree: str, temperature: float, max_new_tokens: int) -> Iterator[Page]:
    """Decodes plainly, then with drafts, so that each has the machine to itself. Mistakes become messages."""
    names = [left, right]
    try:
        yield from _compare(prompt, names, (tree or "").strip(), temperature, int(max_new_tokens))
    except (TypeError, ValueError) as error:  # a bad tree, an empty prompt, a draft that does not fit
        page = first_page(names)
        page.message = message_html(str(error))
        yield page


def _compare(prompt: str, names: list[str], tree: str, temperature: float, max_new_tokens: int) -> Iterator[Page]:
    config = SpeculativeConfig(tree=parse_tree(tree))
    speculations = [{"draft": models.drafts[name], "speculative_config": config} for name in names]
    inputs = encode(models.tokenizer, prompt, models.target.device)
    options = sampling_options(temperature)
    page = first_page(names)
    page.plain = panel_html(PLAIN, waiting("Warming up …"))
    page.drafted = [panel_html(name, waiting("Waits, so that each has the machine to itself.")) for name in names]
    yield page
    for each in ({}, *speculations):  # kernels are loaded, and what does not fit is refused
        for _ in decode(models.target, inputs, **options, **each, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens)):
            pass
    for plain in decode(models.target, inputs, **options, max_new_tokens=max_new_tokens):
        page.plain = panel_html(PLAIN, text_html(plain, words, coloured=False), plain)
        yield page
    dtype = str(models.target.dtype).removeprefix("torch.")
    recordings: list[Recording] = []
    for side, speculation in enumerate(speculations):
        for drafted in decode(models.target, inputs, **options, **speculation, max_new_tokens=max_new_tokens):
            page.drafted[side] = drafted_html(names[side], drafted)
            yield page
        recordings.append(drafted)
        page.verdict = verdict_html(plain, names, recordings, temperature == 0, dtype, tree == "auto")
    asked = inputs["input_ids"][0].tolist()
    place = telling_place(models.target, asked, plain.ids, temperature) if temperature and plain.ids else 0
    page.shown = Shown(asked, temperature, names, plain, recordings, place)
    page.tree = forest_html(names[0], recordings[0], len(recordings[0].steps) - 1)
    yield page


@gpu
def histograms(shown: Shown, place: int) -> Iterator[list[str]]:
    """The key, and the histograms of both drafts, as they grow, `place` tokens into the plain text."""
    htmls = ["", ""]
    try:
        written = shown.plain.ids[:place]
        context = shown.prompt + written
        before = models.tokenizer.decode(written[:-1], skip_special_tokens=True)
        key = key_html(before, words.alone(context[-1]), shown.temperature)
        for side, name in enumerate(shown.names):
            for draws in draw(models.target, models.drafts[name], context, shown.temperature):
                htmls[side] = histogram_html(name, draws, words.alone)
                yield [key, *htmls]
    except (TypeError, ValueError) as error:
        yield [message_html(str(error)), *htmls]


def drafted_html(name: str, recording: Recording, selected: int | None = None) -> str:
    return panel_html(name, text_html(recording, words, True, selected), recording)


def forest_html(name: str, recording: Recording, number: int) -> str:
    """The tree of a step, and a line about it."""
    if not 0 <= number < len(recording.steps):
        return ""
    step = recording.steps[number]
    summary = f"{name}. {step_summary(step, number, len(recording.steps))}"
    return (
        f'<div class="forest"><p>{summary}</p><div class="scroll">{tree_svg(step, words.alone, summary)}</div></div>'
    )
