"""Images in the messages of chats and responses."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support import vision
from support.servers import client_over
from support.tokenizer import tiny_tokenizer
from transformers import LlavaProcessor


Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pil = pytest.importorskip("transformers.models.clip.image_processing_pil_clip", reason="no processor without torch")

from hf_specdec.loading import load_target  # noqa: E402
from hf_specdec.serving.defaults import NO_IMAGES  # noqa: E402
from hf_specdec.serving.images import MOST_IMAGES, ImageReader, image_reader  # noqa: E402


TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ '\n' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def processor() -> Any:
    tokenizer = tiny_tokenizer()
    assert tokenizer("\n", add_special_tokens=False)["input_ids"] == [vision.IMAGE]
    return LlavaProcessor(
        pil.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="\n",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


_asked, _let_go = threading.Event(), threading.Event()


class _Host(BaseHTTPRequestHandler):
    """Serves an image, at once or late, and what is none of one."""

    def do_GET(self) -> None:
        if self.path == "/late.png":
            _asked.set()
            assert _let_go.wait(3), "nothing else was answered"
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/image.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/endless.png":
            with suppress(OSError):  # until nobody reads
                for _ in range(200):
                    self.wfile.write(b"\0")
                    time.sleep(0.02)
            return
        self.wfile.write(content(1))

    def log_message(self, *_: Any) -> None: ...


def content(seed: int, size: tuple[int, int] = (9, 8), form: str = "PNG") -> bytes:
    values = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(values.to(torch.uint8).numpy()).save(file, form)
    return file.getvalue()


def data_url(of: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(of).decode()}"


@pytest.fixture(scope="module")
def model() -> Any:
    return vision.llava().float()


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[Any]:
    images = ImageReader(processor(), frozenset({"localhost"}), most_bytes=2000, most_pixels=400)
    with client_over(model, chat_template=TEMPLATE, images=images) as (client, _):
        yield client


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def expected(model: Any, text: str, seeds: list[int]) -> str:
    """What plain `generate` writes after a prompt, whose images are newlines."""
    made, images = processor(), [Image.open(io.BytesIO(content(seed))) for seed in seeds]
    inputs = made(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    return made.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(client: Any, *parts: Any, **options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 12, "temperature": 0} | options
    return client.post("/v1/chat/completions", json=body)


def shown(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_chats(client: Any, model: Any) -> None:
    answers = []
    for seeds in ([1], [2], [2, 1]):
        images = [shown(data_url(content(seed))) for seed in seeds]
        answer = asked(client, said("look at"), *images, said("well"))
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0]["message"]["content"])
        assert answers[-1] == expected(model, "look at" + "\n" * len(seeds) + "well", seeds)
        assert answer.json()["usage"]["prompt_tokens"] == 11 + 4 * len(seeds)
    assert len(set(answers)) == 3
    text = asked(client, said("only text")).json()["choices"][0]["message"]["content"]
    assert text == expected(model, "only text", [])


def test_streams(client: Any, model: Any) -> None:
    answer = asked(client, said("see"), shown(data_url(content(1))), said("it"), stream=True)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    whole = asked(client, said("see"), shown(data_url(content(1))), said("it")).json()["choices"][0]["message"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == whole["content"] == expected(model, "see\nit", [1])


def test_responses(client: Any, model: Any) -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(content(2))}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, "temperature": 0}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == expected(model, "see\n", [2])


def test_allowed_hosts(client: Any, model: Any, host: str) -> None:
    answer = asked(client, said("see"), shown(f"{host}/image.png"))
    assert answer.json()["choices"][0]["message"]["content"] == expected(model, "see\n", [1])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (data_url(content(1, (80, 60))), "more than 2000 bytes"),
        (data_url(content(1, (21, 20), "JPEG"), "image/jpeg"), "21 x 20 pixels, but 400 are the most"),
        (data_url(content(1, (1, 51))), "1 x 51 pixels: one side may be at most 50 times the other"),
        (data_url(b"no image"), "no image that this server reads"),
        (data_url(content(1)[:60]), "no image that this server reads"),
        (data_url(content(1, form="TIFF")), "no image that this server reads"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png,abc", "a data URL in base64"),
        ("file:///etc/hostname", "a data URL, or one of http or https"),
        ("/etc/hostname", "a data URL, or one of http or https"),
        ("http://[", "a data URL, or one of http or https"),
        ("http://127.0.0.1/image.png", "fetches nothing from '127.0.0.1'"),
        ("http://localhost@elsewhere.org/image.png", "fetches nothing from 'elsewhere.org'"),
        ("http://localhost:9/image.png", "cannot be read from"),
        (None, "`messages[0].content[1].image_url.url`"),
    ],
)
def test_refused_images(client: Any, url: Any, says: str) -> None:
    answer = asked(client, said("see"), shown(url))
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_redirects(client: Any, host: str) -> None:
    assert "answers with 302" in asked(client, shown(f"{host}/moved.png")).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_slow_hosts(client: Any, host: str, path: str) -> None:
    """Other requests are answered while a host lets the server wait, even if the body is small."""
    _asked.clear(), _let_go.clear()
    answers: list[Any] = []
    body = {"messages": [{"role": "user", "content": [shown(f"{host}/late.png")]}]}
    waiting = threading.Thread(target=lambda: answers.append(client.post(path, json=body)))
    waiting.start()
    assert _asked.wait(30)
    assert client.get("/health").status_code == 200
    _let_go.set()
    waiting.join()
    assert answers[0].status_code == 200


def test_hosts_that_never_end(client: Any, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.serving.images.MOST_SECONDS", 0.2)
    start = time.monotonic()
    assert "cannot be read from" in asked(client, shown(f"{host}/endless.png")).json()["error"]["message"]
    assert time.monotonic() - start < 3


def test_places_of_images(client: Any) -> None:
    """A text that has the image's token, too."""
    answer = asked(client, said("see \n and"), shown(data_url(content(1))), said("it"))
    assert answer.status_code == 400


def test_many_images(client: Any) -> None:
    answer = asked(client, *[shown(data_url(content(1)))] * (MOST_IMAGES + 1))
    assert answer.status_code == 400 and f"{MOST_IMAGES} are the most" in answer.json()["error"]["message"]


def test_part_without_an_image(client: Any) -> None:
    answer = asked(client, {"type": "image_url"})
    assert answer.status_code == 400 and "`messages[0].content[0].image_url` is missing" in answer.text


def test_folders(model: Any, tmp_path: Path) -> None:
    """A folder of an image-text model has its processor, or the reason why there are no images."""
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "processor cannot be loaded" in image_reader(str(tmp_path), frozenset(), 1, 1)
    made = processor()
    made.chat_template = None
    made.save_pretrained(tmp_path)
    assert "no chat template" in image_reader(str(tmp_path), frozenset(), 1, 1)
    processor().save_pretrained(tmp_path)
    reader = image_reader(str(tmp_path), frozenset(), 2000, 400)
    assert isinstance(reader, ImageReader)
    assert reader.inputs("see\n", [data_url(content(1))])["model_inputs"]["pixel_values"].shape == (1, 3, 8, 8)
    assert type(load_target(str(tmp_path), torch.float32, "cpu", with_images=True)) is type(model)
    assert image_reader(None, frozenset(), 1, 1) == NO_IMAGES


@pytest.mark.parametrize("reason", [None, "the processor needs torchvision"])
def test_models_without_images(model: Any, reason: str | None) -> None:
    options = {} if reason is None else {"images": reason}
    with client_over(model, chat_template=TEMPLATE, **options) as (client, _):
        answer = asked(client, said("see"), shown(data_url(content(1))))
        assert answer.status_code == 400
        assert f"This server reads text ({reason or 'the model takes no images'})" in answer.json()["error"]["message"]
