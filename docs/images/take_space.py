"""
Takes the pictures of docs/images: a served page, after a run and its draws, on a laptop and on a phone.

    python examples/space/app.py
    python docs/images/take_space.py http://127.0.0.1:7860 docs/images

Needs playwright, Chromium (on the path, or named by `CHROMIUM`) and Pillow, which gradio brings.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright


SIZES = {"space.png": (1280, 800), "space-phone.png": (390, 844)}
PATIENCE = 300_000
"""Milliseconds."""


def run(page: Any, tokens: int, temperature: float) -> None:
    page.fill("#length input[type=number]", str(tokens))
    page.fill("#temperature input[type=number]", str(temperature))
    page.keyboard.press("Tab")
    page.click("#run")
    page.wait_for_selector("#forest p", state="hidden", timeout=PATIENCE)
    page.wait_for_selector("#forest p", timeout=PATIENCE)


def draw(page: Any) -> None:
    page.click("#draw")
    done = "['#histogram', '#second_histogram'].every(id => document.querySelector(id).innerText.includes('400 of'))"
    page.wait_for_function(done, timeout=PATIENCE)


def show_longest_step(page: Any) -> None:
    """The tree of the first step from which most drafts were accepted."""
    page.locator("#drafted .t[class*=' d']").last.wait_for()
    step = page.locator("#drafted .t[data-step]").evaluate_all(
        """all => {
          const counts = {};
          for (const token of all) counts[token.dataset.step] = (counts[token.dataset.step] ?? 0) + 1;
          return Object.keys(counts).reduce((a, b) => counts[b] > counts[a] ? b : a);
        }"""
    )
    page.locator(f"#drafted .t[data-step='{step}']").first.click()
    page.wait_for_function(f"document.querySelector('#forest p').innerText.includes('Step {int(step) + 1} of')")


def save(page: Any, path: Path) -> None:
    """The whole page, in 128 colours: a quarter of the bytes."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main(address: str, folder: Path) -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("#run", timeout=PATIENCE)
        run(page, tokens=64, temperature=1.0)
        draw(page)
        show_longest_step(page)
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            save(page, folder / name)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
