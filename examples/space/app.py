"""
Plain and speculative decoding side by side, with the tree behind every token.

    python examples/space/app.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from comparing import Page, Shown, drafted_html, first_page, forest_html, histograms, models, pages
from models import target_name


HERE = Path(__file__).resolve().parent
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


def outputs(page: Page) -> list[Any]:
    """The values of what a run changes."""
    shown = page.shown
    steps = len(shown.drafted[0].steps) if shown else 0
    slider = gr.Slider(value=max(steps, 1), maximum=max(steps, 2), visible=steps > 1)
    draws = gr.Column(visible=bool(shown and shown.temperature))
    last = len(shown.plain.tokens) - 1 if shown else 1
    place = gr.Slider(value=shown.place if shown else 0, minimum=0, maximum=max(last, 1))
    panels = [page.message, page.plain, *page.drafted, page.legend, page.verdict, page.tree]
    return [*panels, slider, shown, 0, draws, place, "", "", ""]


def run(*settings: Any) -> Iterator[list[Any]]:
    """The page as it grows; `settings` are the arguments of `pages`."""
    for page in pages(*settings):
        yield outputs(page)


def draw(shown: Shown | None, place: float) -> Iterator[list[str]]:
    if shown is not None:
        yield from histograms(shown, int(place))


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
    drafts = list(models.drafts)
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
                with gr.Row(equal_height=True, elem_classes="sides"):
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
                    draw_button = gr.Button("Draw 400 with each draft", elem_id="draw")
                    key = gr.HTML(elem_id="key")
                    with gr.Row(equal_height=True, elem_classes="sides"):
                        with gr.Column(min_width=300):
                            histogram = gr.HTML(elem_id="histogram")
                        with gr.Column(min_width=300):
                            second_histogram = gr.HTML(elem_id="second_histogram")
        shown, side = gr.State(), gr.State(0)
        drawings = [key, histogram, second_histogram]
        panels = [message, plain, first, second, legend, verdict, forest]
        one_at_once = {"concurrency_limit": 1, "concurrency_id": "models", "show_progress": "hidden"}
        started = gr.on(
            [start_button.click, prompt.submit],
            run,
            [prompt, left, right, tree, temperature, length],
            [*panels, slider, shown, side, draws, place, *drawings],
            js=START,
            **one_at_once,
        )
        drawn = draw_button.click(draw, [shown, place], drawings, **one_at_once)
        stop_button.click(None, cancels=[started, drawn])
        looks = {"outputs": [first, second, forest, slider, side], "show_progress": "hidden"}
        first.token(show_left, [shown], **looks)
        second.token(show_right, [shown], **looks)
        slider.input(show_slid, [shown, side, slider], **looks)
    return page


if __name__ == "__main__":
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    build().launch(theme=theme, css_paths=HERE / "style.css", footer_links=["gradio"])
