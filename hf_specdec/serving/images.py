"""Images in messages: read from data URLs, or from hosts that the operator allows, within limits."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import logging

from ..loading import load_processor
from .characters import cut, shortened
from .defaults import MOST_IMAGE_BYTES, MOST_IMAGE_PIXELS, NO_IMAGES
from .errors import MOST_OF_A_REASON, RequestRefused


logger = logging.get_logger(__name__)

MOST_IMAGES = 16
"""Most images of a request."""
MOST_RATIO = 50
"""Most times that an image may be as long as it is wide, or as wide as long: processors that scale the shorter side to
a size of their own make gigabytes of a line of pixels."""
SECONDS, MOST_SECONDS = 10.0, 30.0
"""Seconds that a host may be silent, and seconds in which it must have sent an image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read: PIL knows others that run programs, or are seldom looked at for faults."""
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?(;[a-z0-9=.+-]+)*;base64,", re.IGNORECASE)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # it may lead to a host that is not allowed


@dataclass(frozen=True)
class ImageReader:
    """
    Reads images, and makes the model's inputs of a text with images.

    Args:
        processor (`ProcessorMixin`): the model's.
        hosts (`frozenset[str]`): names of hosts that images may be fetched from; none by default.
        most_bytes (`int`): most bytes of an image's file.
        most_pixels (`int`): most pixels of an image, known before it is decoded.
    """

    processor: Any
    hosts: frozenset[str] = field(default_factory=frozenset)
    most_bytes: int = MOST_IMAGE_BYTES
    most_pixels: int = MOST_IMAGE_PIXELS

    def inputs(self, text: str, urls: list[str]) -> dict[str, Any]:
        """
        What the model reads of a rendered chat: `input_ids`, a list, and `model_inputs`, arrays by name.

        Raises:
            RequestRefused: if an image cannot be read or is too large, or the processor refuses it.
        """
        if len(urls) > MOST_IMAGES:
            raise RequestRefused(f"The messages have {len(urls)} images, but {MOST_IMAGES} are the most. Send fewer.")
        images = [self.read(url) for url in urls]
        begins = self.processor.tokenizer.bos_token
        is_begun = begins is not None and text.startswith(begins)
        options = {"add_special_tokens": False} if is_begun else {}  # as the processor's own `apply_chat_template`
        try:
            made = dict(self.processor(text=[text], images=images, return_tensors="pt", **options))
        except MemoryError:
            raise
        except Exception as error:  # each release has another one for images without places in the text
            raise RequestRefused(f"The images do not fit the text: {shortened(str(error))}.") from error
        tokens = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)
        # Arrays: tensors would be sent to the engine by shared memory.
        arrays = {name: value.numpy() if hasattr(value, "numpy") else value for name, value in made.items()}
        return {"input_ids": tokens, "model_inputs": arrays}

    def read(self, url: str) -> Any:
        """
        The image of a URL, in RGB.

        Raises:
            RequestRefused: if it cannot be read or is too large, or its host is not allowed.
        """
        from PIL import Image, ImageOps

        content = self._from_data(url) if url[:5].lower() == "data:" else self._fetched(url)
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if width * height <= self.most_pixels and max(width, height) <= MOST_RATIO * min(width, height):
                return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # PIL raises whatever a damaged file makes it raise
            raise RequestRefused(
                f"`image_url` is no image that this server reads ({', '.join(FORMATS)}), or is damaged."
            ) from error
        size = f"`image_url` is an image of {width} x {height} pixels"
        if width * height > self.most_pixels:
            raise RequestRefused(f"{size}, but {self.most_pixels} are the most. Send a smaller one.")
        raise RequestRefused(f"{size}: one side may be at most {MOST_RATIO} times the other. Send a part of it.")

    def _from_data(self, url: str) -> bytes:
        head = _DATA.match(url)
        if head is None:
            raise RequestRefused("`image_url` must be a data URL in base64 (`data:image/png;base64,…`).")
        if (len(url) - head.end()) * 3 // 4 > self.most_bytes + 2:
            raise self._too_long()
        try:
            content = base64.b64decode(url[head.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestRefused(f"`image_url` is no base64: {error}.") from error
        if len(content) > self.most_bytes:
            raise self._too_long()
        return content

    def _fetched(self, url: str) -> bytes:
        try:
            parts = urllib.parse.urlsplit(url)
            host = (parts.hostname or "").lower()
        except ValueError:
            parts, host = urllib.parse.urlsplit(""), ""
        if parts.scheme not in ("http", "https") or not host:
            raise RequestRefused(f"`image_url` must be a data URL, or one of http or https, but is {shortened(url)}.")
        if host not in self.hosts:
            raise RequestRefused(
                f"`image_url`: this server fetches nothing from {shortened(host)}. Give the image as a data URL, or "
                "start the server with `--allow-image-host`."
            )
        opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=SECONDS) as answer:
                content = _first_bytes(answer, self.most_bytes + 1)
        except urllib.error.HTTPError as error:
            raise RequestRefused(f"`image_url`: {shortened(host)} answers with {error.code}.") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RequestRefused(f"`image_url`: {shortened(host)} cannot be read from.") from error
        if len(content) > self.most_bytes:
            raise self._too_long()
        return content

    def _too_long(self) -> RequestRefused:
        return RequestRefused(f"`image_url` is an image of more than {self.most_bytes} bytes. Send a smaller one.")


def _first_bytes(answer: http.client.HTTPResponse, most: int) -> bytes:
    """
    Up to `most` bytes of an answer.

    Raises:
        TimeoutError: if it takes longer than `MOST_SECONDS`.
    """
    content, until = bytearray(), time.monotonic() + MOST_SECONDS
    while len(content) < most and (piece := answer.read1(most - len(content))):
        content += piece
        if time.monotonic() > until:
            raise TimeoutError(f"more than {MOST_SECONDS} seconds")
    return bytes(content)


def image_reader(target: str | None, hosts: frozenset[str], most_bytes: int, most_pixels: int) -> ImageReader | str:
    """The reader of images for a target by its name, see `ImageReader`; or the reason why the server takes none."""
    try:
        processor = load_processor(target)
    except (ImportError, OSError, ValueError) as error:
        first_line, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        return _told(f"the model's processor cannot be loaded: {first_line}")
    if processor is None:
        return NO_IMAGES
    if getattr(processor, "chat_template", None) is None:  # texts are rendered by that of the tokenizer
        return _told("the model's processor has no chat template")
    return ImageReader(processor, hosts, most_bytes, most_pixels)


def _told(reason: str) -> str:
    logger.warning(f"No images are served: {reason}")
    return cut(reason, MOST_OF_A_REASON)


def images_in(messages: list[dict[str, Any]]) -> list[str]:
    """The URLs of the images of a chat, in the order of the text, as transformers' handlers prepare its messages."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["url"] for content in contents for part in content if part.get("type") == "image"]


def without_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, whose images have no URL that the processor would fetch."""

    def shown(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [{"type": "image"} if part.get("type") == "image" else part for part in content]

    return [message | {"content": shown(message.get("content"))} for message in messages]
