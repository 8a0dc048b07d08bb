"""An engine whose model writes what the test says, and the application in front of it without HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec.batching import SpeculativeGenerationOutput
from hf_specdec.serving.engine.messages import Served


END = "<|im_end|>"
_QWEN = dict.fromkeys(("qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"), "<|im_start|>assistant\n")
BEGINS = _QWEN | {"gemma4": "<|turn>model\n"}
"""What precedes an answer, by the model's type."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and the marks of two families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: token for token, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", END, "<|tool_call>", "<tool_call|>", '<|"|>'])
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    return fast


def config_of(kind: str) -> PreTrainedConfig:
    config: Any = PreTrainedConfig()
    config.model_type, config.vocab_size = kind, len(tokenizer())
    return config


class Script:
    """
    An engine whose model writes what the test says. Sets the chat template.

    Args:
        text (`str`): what it writes.
        kind (`str`): the model's type, which tells its response template.
        is_cut (`bool`): whether the text ends because it is as long as it may be.
        error (`str`): what then fails, if something does.
        step (`int`): tokens that are told at once in a stream.
        template (`str`, *optional*): the chat template; by default one that writes no calls.
    """

    fatal_error = None

    def __init__(
        self,
        text: str,
        kind: str = "qwen3",
        is_cut: bool = False,
        error: str | None = None,
        step: int = 3,
        template: str | None = None,
    ):
        self.model = Served(config_of(kind), GenerationConfig(eos_token_id=tokenizer().eos_token_id), 2**20, None)
        self.background_thread_status = self
        asks = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer().chat_template = template or f"{asks}{{{{ {BEGINS.get(kind, '')!r} }}}}"
        self._tokens, self._is_cut, self._error = tokenizer()(text)["input_ids"], is_cut, error
        self._step = step
        self._handlers: dict[str, Any] = {}

    def register_result_handler(self, name: str, handler: Any) -> None:
        self._handlers[name] = handler

    def unregister_result_handler(self, name: str) -> None: ...
    def cancel_request(self, name: str) -> None: ...

    def add_request(self, input_ids: list[int], name: str, streaming: bool, **_: Any) -> asyncio.Future[None]:
        loop, count = asyncio.get_running_loop(), len(self._tokens)
        ended = RequestStatus.FINISHED if self._error is None else RequestStatus.FAILED
        seconds = 0.01 if self._error is None else 0.3  # an error must not be known before the stream begins

        def tell(told: int) -> None:
            if streaming and told < count:
                self._tell(name, told, RequestStatus.DECODING, None)
                loop.call_soon(tell, told + self._step)
            else:
                loop.call_later(seconds, self._tell, name, count, ended, self._error)

        loop.call_soon(tell, self._step)
        admission = loop.create_future()
        admission.set_result(None)
        return admission

    def _tell(self, name: str, count: int, status: Any, error: str | None) -> None:
        reason: Any = None if status == RequestStatus.DECODING else "length" if self._is_cut else "stop"
        output = SpeculativeGenerationOutput(
            name, generated_tokens=self._tokens[:count], status=status, error=error, finish_reason=reason
        )
        self._handlers[name](output)


async def answer(app: Any, route: str, content: bytes) -> tuple[int, Any]:
    """Status and body of the application's answer to a request, without a client and its threads."""
    status, body = await raw_answer(app, route, content)
    return status, json.loads(body)


async def raw_answer(app: Any, route: str, content: bytes) -> tuple[int, bytes]:
    """The same, with the body as it is."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": route, "raw_path": route.encode(), "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
    scope |= {"server": ("test", 80), "client": ("test", 1), "root_path": "", "asgi": {"version": "3.0"}}
    with suppress(AssertionError):  # of the engine, which is answered as any other failure
        await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body
