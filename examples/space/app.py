"""
Plain and speculative decoding side by side, with the tree behind every token.

    python examples/space/app.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero import gpu  # before anything touches CUDA


import gradio as gr  # isort: skip

from decoding import Recording, decode, encode
from drawing import tree_svg
from draws import draw
from histogram import histogram_html, key_html
from models import load_models, target_name
from text import (
    Words,
    legend_html,
    message_html,
    panel_html,
    step_summary,
    text_html,
    verdict_html,
)

from hf_specdec import SpeculativeConfig
from hf_specdec.benchmarking.contenders import sampling_options
from hf_specdec.trees.text import parse_tree


HERE = Path(__file__).resolve().parent
WARM_UP_TOKENS = 8
TREES = [
    "auto",
    "default",
    "dynamic:5,2,8",
    "chain:4",
    "branching:3,2,1",
    "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]",
]
EXAMPLES = [
    "Give me a simple recipe for pancakes, step by step.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper and a lost whale.",
]
START = """
(...settings) => {
  // On a phone the texts are below the controls.
  document.querySelector("#plain").scrollIntoView({block: innerWidth < 700 ? "start" : "nearest"});
  return settings;
}
"""
CLICK = """
element.addEventListener("click", (event) => {
  const token = event.target.closest("[data-step]");
  if (!token) return;
  document.querySelector("#forest").dataset.wanted = "yes";
  trigger("token", {step: Number(token.dataset.step)});
});
"""
IN_SIGHT = """
watch("value", () => {
  const forest = element.closest("#forest");
  if (forest.dataset.wanted) forest.scrollIntoView({block: "nearest"});
  delete forest.dataset.wanted;
  const scroll = element.querySelector(".scroll");
  const last = element.querySelector(".node.bonus, .node.recovered") ?? element.querySelector(".node.root");
  if (scroll && last) scroll.scrollTop = last.getBBox().y - scroll.clientHeight / 2;
});
"""

models = load_models()
words = Words(models.tokenizer)
drafts = list(models.drafts)


@dataclass
class Shown:
    """A run: the prompt's tokens, what drafted, and the recordings."""

    prompt: list[int]
    temperature: float
    names: list[str]
    plain: Recording
    drafted: list[Recording]


@dataclass
class Page:
    """What is on the page, apart from the controls."""

    message: str = ""
    plain: str = ""
    drafted: list[str] = field(default_factory=lambda: ["", ""])
    legend: str = ""
    verdict: str = ""
    tree: str = ""
    shown: Shown | None = None
    """What was run, once it is done."""

    def outputs(self) -> list[Any]:
        steps = len(self.shown.drafted[0].steps) if self.shown else 0
        slider = gr.Slider(value=max(steps, 1), maximum=max(steps, 2), visible=steps > 1)
        draws = gr.Column(visible=bool(self.shown and self.shown.temperature))
        last = len(self.shown.plain.tokens) - 1 if self.shown else 1
        place = gr.Slider(value=min(2, last), minimum=0, maximum=max(last, 1))
        panels = [self.message, self.plain, *self.drafted, self.legend, self.verdict, self.tree]
        return [*panels, slider, self.shown, 0, draws, place, "", "", ""]


PLAIN = "Plain"


def waiting(text: str) -> str:
    return f'<div class="text waits">{text}</div>'


def first_page(names: list[str]) -> Page:
    return Page(
        plain=panel_html(PLAIN, waiting("The model writes one token per forward.")),
        drafted=[
            panel_html(name, waiting("It guesses; one forward of the model checks all guesses.")) for name in names
        ],
        legend=legend_html(),
    )


def run(*settings: Any) -> Iterator[list[Any]]:
    """The page as it grows; `settings` are the arguments of `pages`."""
    for page in pages(*settings):
        yield page.outputs()


@gpu  # in a process of its own, which gets and gives plain values
def pages(prompt: str, left: str, right: str, tree: str, temperature: float, max_new_tokens: int) -> Iterator[Page]:
    """Decodes plainly, then with drafts, so that each has the machine to itself. Mistakes become messages."""
    try:
        config = SpeculativeConfig(tree=parse_tree(tree or ""))
        speculations = {}
        for name in (left, right):
            speculations[name] = {"draft": models.drafts[name], "speculative_config": config}
        yield from compare(prompt, [left, right], speculations, temperature, int(max_new_tokens))
    except (TypeError, ValueError) as error:  # a bad tree, an empty prompt, a draft that does not fit
        page = first_page([left, right])
        page.message = message_html(str(error))
        yield page


def compare(
    prompt: str, names: list[str], speculations: dict[str, Any], temperature: float, max_new_tokens: int
) -> Iterator[Page]:
    inputs = encode(models.tokenizer, prompt, models.target.device)
    options = sampling_options(temperature)
    page = first_page(names)
    page.plain = panel_html(PLAIN, waiting("Warming up …"))
    page.drafted = [panel_html(name, waiting("Waits, so that each has the machine to itself.")) for name in names]
    yield page
    for each in ({}, *speculations.values()):  # kernels are loaded, and what does not fit is refused
        for _ in decode(models.target, inputs, **options, **each, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens)):
            pass
    for plain in decode(models.target, inputs, **options, max_new_tokens=max_new_tokens):
        page.plain = panel_html(PLAIN, text_html(plain, words, coloured=False), plain)
        yield page
    dtype = str(models.target.dtype).removeprefix("torch.")
    recordings = []
    for side, name in enumerate(names):
        for drafted in decode(models.target, inputs, **options, **speculations[name], max_new_tokens=max_new_tokens):
            page.drafted[side] = drafted_html(name, drafted)
            yield page
        recordings.append(drafted)
        page.verdict += verdict_html(plain, drafted, temperature == 0, dtype).replace(
            '"verdict">', f'"verdict">{name}: '
        )
    page.shown = Shown(inputs["input_ids"][0].tolist(), temperature, names, plain, recordings)
    page.legend = legend_html()
    page.tree = forest_html(names[0], recordings[0], len(recordings[0].steps) - 1)
    yield page


@gpu
def draw_pages(shown: Shown | None, place: float) -> Iterator[list[Any]]:
    """The histograms of both drafts as they grow."""
    if shown is None:
        return
    htmls = ["", ""]
    try:
        context = shown.prompt + shown.plain.ids[: int(place)]
        before = models.tokenizer.decode(context[-13:-1], skip_special_tokens=True)
        key = key_html(f"…{before}", words.alone(context[-1]), shown.temperature)
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


def show_step(shown: Shown | None, side: int, number: int) -> list[Any]:
    """The tree of a step, whose tokens are marked in the text. Steps are counted from 0 on."""
    if shown is None:
        return [gr.skip()] * 5
    panels = [
        drafted_html(name, recording, number if at == side else None)
        for at, (name, recording) in enumerate(zip(shown.names, shown.drafted, strict=True))
    ]
    steps = len(shown.drafted[side].steps)
    slider = gr.Slider(value=number + 1, maximum=max(steps, 2), visible=steps > 1)
    return [*panels, forest_html(shown.names[side], shown.drafted[side], number), slider, side]


def show_left(shown: Shown | None, event: gr.EventData) -> list[Any]:
    return show_step(shown, 0, event.step)


def show_right(shown: Shown | None, event: gr.EventData) -> list[Any]:
    return show_step(shown, 1, event.step)


def show_slid(shown: Shown | None, side: int, step: int) -> list[Any]:
    return show_step(shown, side, int(step) - 1)


def build() -> gr.Blocks:
    names = [drafts[0], drafts[min(1, len(drafts) - 1)]]
    start = first_page(names)
    with gr.Blocks(title="hf_specdec", analytics_enabled=False) as page:
        gr.Markdown(
            f"## Tree speculative decoding, watched\n{target_name()}, decoded by plain `generate`, then with the "
            "trees of two drafts. Click a token to see the tree it came from."
        )
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                prompt = gr.Textbox(
                    EXAMPLES[0], label="Prompt", lines=3, max_lines=6, max_length=4000, elem_id="prompt"
                )
                with gr.Row():
                    start_button = gr.Button("Run", variant="primary", min_width=80, elem_id="run")
                    stop_button = gr.Button("Stop", min_width=80, elem_id="stop")
                left = gr.Dropdown(drafts, value=names[0], label="Draft", elem_id="left")
                right = gr.Dropdown(drafts, value=names[1], label="Draft beside it", elem_id="right")
                tree = gr.Dropdown(
                    TREES,
                    value="auto",
                    label="Tree",
                    info="choose one, or write rank paths",
                    allow_custom_value=True,
                    elem_id="tree",
                )
                temperature = gr.Slider(
                    0, 1.5, 0, step=0.1, label="Temperature", info="0: greedy", elem_id="temperature"
                )
                length = gr.Slider(16, 256, 128, step=16, label="Tokens at most", elem_id="length")
                gr.Examples(EXAMPLES, prompt, label="Prompts")
            with gr.Column(scale=3, min_width=320, elem_classes="results"):
                message = gr.HTML(start.message, elem_id="message")
                with gr.Row():
                    with gr.Column(min_width=240):
                        plain = gr.HTML(start.plain, elem_id="plain")
                    with gr.Column(min_width=240):
                        first = gr.HTML(start.drafted[0], js_on_load=CLICK, elem_id="drafted")
                    with gr.Column(min_width=240):
                        second = gr.HTML(start.drafted[1], js_on_load=CLICK, elem_id="second")
                verdict = gr.HTML(elem_id="verdict")
                legend = gr.HTML(start.legend, elem_id="legend")
                slider = gr.Slider(1, 2, 1, step=1, label="Step", visible=False, elem_id="step")
                forest = gr.HTML(js_on_load=IN_SIGHT, elem_id="forest")
                with gr.Column(visible=False, elem_id="draws") as draws:
                    gr.Markdown("### The same distribution?")
                    place = gr.Slider(0, 1, 0, step=1, label="Tokens of the plain text before it", elem_id="place")
                    draw_button = gr.Button("Draw 400 tokens with each draft", elem_id="draw")
                    key = gr.HTML(elem_id="key")
                    with gr.Row():
                        with gr.Column(min_width=300):
                            histogram = gr.HTML(elem_id="histogram")
                        with gr.Column(min_width=300):
                            second_histogram = gr.HTML()
        shown, side = gr.State(), gr.State(0)
        histograms = [key, histogram, second_histogram]
        panels = [message, plain, first, second, legend, verdict, forest]
        one_at_once = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "hidden"}
        started = gr.on(
            [start_button.click, prompt.submit],
            run,
            [prompt, left, right, tree, temperature, length],
            [*panels, slider, shown, side, draws, place, *histograms],
            js=START,
            **one_at_once,
        )
        drawn = draw_button.click(draw_pages, [shown, place], histograms, **one_at_once)
        stop_button.click(None, cancels=[started, drawn])
        looks = {"outputs": [first, second, forest, slider, side], "show_progress": "hidden"}
        first.token(show_left, [shown], **looks)
        second.token(show_right, [shown], **looks)
        slider.input(show_slid, [shown, side, slider], **looks)
    return page


if __name__ == "__main__":
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    build().launch(theme=theme, css_paths=HERE / "style.css", footer_links=["gradio"])
