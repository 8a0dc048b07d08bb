"""Keys of blocks: equal keys stand for texts whose K/V are equal up to the end of the block."""

from __future__ import annotations

from array import array
from hashlib import sha256

from .request import Request


def keys_of(request: Request, size: int, ahead: int) -> list[bytes]:
    """
    The keys of all full blocks of a request's text so far.

    Args:
        request (`Request`): the request, which remembers its keys.
        size (`int`): tokens per block.
        ahead (`int`): tokens behind a block on which its K/V depend.
    """
    most, refused = (request.length - ahead) // size, _refused(request)
    found, for_refused = request.block_keys
    if len(found) < most or refused != for_refused:
        keys = list(found) if refused == for_refused else []
        while len(keys) < most:
            first = len(keys) * size
            keys.append(_key(request, keys, first, first + size + ahead))
        found = keys
        request.block_keys = keys, refused  # replaced as a whole: other threads ask what can be admitted
    return found


def key_of_text(request: Request, size: int) -> bytes:
    """The key of a request's whole text."""
    number = (request.length - 1) // size
    return _key(request, request.block_keys[0][:number], number * size, request.length, b"text")


def _key(request: Request, before: list[bytes], first: int, end: int, kind: bytes = b"") -> bytes:
    """The key of tokens from `first` to before `end`, which follow the blocks with the keys `before`."""
    tokens = array("q", request.tokens[first:end]).tobytes()
    return sha256((before[-1] if before else _root_of(request)) + tokens + _content_of(request, end) + kind).digest()


def _content_of(request: Request, end: int) -> bytes:
    """What the inputs beside the tokens of a prompt say, if the K/V of a token before `end` depend on them."""
    inputs = request.inputs
    if inputs is None or inputs.content is None:
        return b""
    content, leads = inputs.content, inputs.leads
    found = content.digest_at(end, leads)
    if found and leads.end is False:  # images are read otherwise because of the text behind them
        found += array("q", request.prompt[content.end :]).tobytes()
    return found


def _refused(request: Request) -> tuple[bool, ...]:
    """What was found of prompts with images on which keys depend."""
    return () if request.inputs is None else request.inputs.leads.refused


def _root_of(request: Request) -> bytes:
    """What the K/V of a text depend on beside its tokens, as 32 bytes."""
    return sha256(repr(request.adapter).encode()).digest()
