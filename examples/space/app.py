"""
Plain and speculative decoding side by side, with the tree behind every token.

    python examples/space/app.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero import gpu  # before anything touches CUDA


import gradio as gr  # isort: skip

from decoding import Recording, decode, encode
from drawing import tree_svg
from models import load_models
from text import (
    Words,
    legend_html,
    message_html,
    note_html,
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
    "default",
    "dynamic:5,2,8",
    "chain:4",
    "branching:3,2,1",
    "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]",
    "auto",
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
on_cpu = models.target.device.type == "cpu"


@dataclass
class Page:
    """What is on the page, apart from the controls."""

    message: str = ""
    plain: str = ""
    drafted: str = ""
    legend: str = ""
    verdict: str = ""
    tree: str = ""
    shown: Recording | None = None
    """The run whose trees can be looked at."""

    def outputs(self) -> list[Any]:
        steps = len(self.shown.steps) if self.shown and self.shown.done else 0
        slider = gr.Slider(value=max(steps, 1), maximum=max(steps, 2), visible=steps > 1)
        return [self.message, self.plain, self.drafted, self.legend, self.verdict, self.tree, slider, self.shown]


PLAIN, DRAFTED = "Plain", "With a tree of drafts"


def waiting(text: str) -> str:
    return f'<div class="text waits">{text}</div>'


def first_page() -> Page:
    return Page(
        message=note_html(models.note),
        plain=panel_html(PLAIN, waiting("The model writes one token per forward.")),
        drafted=panel_html(DRAFTED, waiting("A draft guesses, one forward of the model checks all guesses.")),
        legend=legend_html(),
    )


def run(*settings: Any) -> Iterator[list[Any]]:
    """The page as it grows; `settings` are the arguments of `pages`."""
    for page in pages(*settings):
        yield page.outputs()


@gpu  # in a process of its own, which gets and gives plain values
def pages(prompt: str, draft: str, tree: str, temperature: float, max_new_tokens: int) -> Iterator[Page]:
    """Decodes plainly, then with drafts, so that each has the machine to itself. Mistakes become messages."""
    try:
        config = SpeculativeConfig(tree=parse_tree(tree or ""))
        speculation = {"draft": models.drafts[draft], "speculative_config": config}
        yield from compare(prompt, speculation, temperature, int(max_new_tokens))
    except (TypeError, ValueError) as error:  # a bad tree, an empty prompt, a draft that does not fit
        page = first_page()
        page.message = message_html(str(error))
        yield page


def compare(prompt: str, speculation: dict[str, Any], temperature: float, max_new_tokens: int) -> Iterator[Page]:
    inputs = encode(models.tokenizer, prompt, models.target.device)
    options = sampling_options(temperature)
    page = first_page()
    page.plain = panel_html(PLAIN, waiting("Warming up …"))
    page.drafted = panel_html(DRAFTED, waiting("Waits for the plain run, so that each has the machine to itself."))
    yield page
    for each in ({}, speculation):  # kernels are loaded, and what does not fit is refused
        for _ in decode(models.target, inputs, **options, **each, max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens)):
            pass
    for plain in decode(models.target, inputs, **options, max_new_tokens=max_new_tokens):
        page.plain = panel_html(PLAIN, text_html(plain, words, coloured=False), plain)
        yield page
    for drafted in decode(models.target, inputs, **options, **speculation, max_new_tokens=max_new_tokens):
        page.shown = drafted
        page.drafted, page.tree = drafted_html(drafted), forest_html(drafted, len(drafted.steps) - 1)
        page.legend = legend_html(drafted)
        if drafted.done:
            dtype = str(models.target.dtype).removeprefix("torch.")
            page.verdict = verdict_html(plain, drafted, temperature == 0, dtype)
        yield page


def drafted_html(recording: Recording, selected: int | None = None) -> str:
    return panel_html(DRAFTED, text_html(recording, words, True, selected), recording)


def forest_html(recording: Recording, number: int) -> str:
    """The tree of a step, and a line about it."""
    if not 0 <= number < len(recording.steps):
        return ""
    step = recording.steps[number]
    summary = step_summary(step, number, len(recording.steps))
    return (
        f'<div class="forest"><p>{summary}</p><div class="scroll">{tree_svg(step, words.alone, summary)}</div></div>'
    )


def show_step(recording: Recording | None, number: int) -> list[Any]:
    """The tree of a step, whose tokens are marked in the text. Steps are counted from 0 on."""
    if recording is None:
        return [gr.skip(), gr.skip(), gr.skip()]
    return [drafted_html(recording, number), forest_html(recording, number), number + 1]


def show_clicked(recording: Recording | None, event: gr.EventData) -> list[Any]:
    return show_step(recording, event.step)


def show_slid(recording: Recording | None, step: int) -> list[Any]:
    return show_step(recording, int(step) - 1)


def build() -> gr.Blocks:
    start = first_page()
    with gr.Blocks(title="hf_specdec", analytics_enabled=False) as page:
        gr.Markdown(
            f"## Tree speculative decoding, watched\n{models.name}, decoded twice: by plain `generate`, then with "
            "a tree of drafts. Click a token to see the tree it came from."
        )
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                prompt = gr.Textbox(
                    EXAMPLES[0], label="Prompt", lines=3, max_lines=6, max_length=4000, elem_id="prompt"
                )
                with gr.Row():
                    start_button = gr.Button("Run", variant="primary", min_width=80, elem_id="run")
                    stop_button = gr.Button("Stop", min_width=80, elem_id="stop")
                draft = gr.Dropdown(list(models.drafts), label="Draft", elem_id="draft")
                tree = gr.Dropdown(
                    TREES,
                    value="dynamic:5,2,8" if on_cpu else "default",
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
                    with gr.Column(min_width=300):
                        plain = gr.HTML(start.plain, elem_id="plain")
                    with gr.Column(min_width=300):
                        drafted = gr.HTML(start.drafted, js_on_load=CLICK, elem_id="drafted")
                verdict = gr.HTML(elem_id="verdict")
                legend = gr.HTML(start.legend, elem_id="legend")
                slider = gr.Slider(1, 2, 1, step=1, label="Step", visible=False, elem_id="step")
                forest = gr.HTML(js_on_load=IN_SIGHT, elem_id="forest")
        shown = gr.State()
        started = gr.on(
            [start_button.click, prompt.submit],
            run,
            [prompt, draft, tree, temperature, length],
            [message, plain, drafted, legend, verdict, forest, slider, shown],
            concurrency_limit=1,
            js=START,
            show_progress="hidden",
        )
        stop_button.click(None, cancels=[started])
        looks = {"outputs": [drafted, forest, slider], "show_progress": "hidden"}
        drafted.token(show_clicked, [shown], **looks)
        slider.input(show_slid, [shown, slider], **looks)
    return page


if __name__ == "__main__":
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    build().launch(theme=theme, css_paths=HERE / "style.css", footer_links=["gradio"])
