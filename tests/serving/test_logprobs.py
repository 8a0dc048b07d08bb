"""Log-probabilities over HTTP: those of the model, for the tokens of the text, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.servers import client_over
from support.tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response  # noqa: E402
from transformers.cli.serving.utils import ReasoningText  # noqa: E402

from hf_specdec.serving.answer_logprobs import AnswerLogprobs, of_chat, of_completion  # noqa: E402
from hf_specdec.serving.scored_answers import ScoredQueue  # noqa: E402
from hf_specdec.serving.token_bytes import TokenBytes  # noqa: E402


PROMPT = "abc xyz"
WARPED = {"temperature": 0.6, "top_p": 0.9, "seed": 5, "generation_config": {"top_k": 0, "do_sample": True}}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "temperature": 0, "logprobs": True}
COMPLETION = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}
RESPONSE = {"input": PROMPT, "max_output_tokens": 9, "temperature": 0}


@cache
def model() -> Any:
    return tiny_model(max_position_embeddings=4096)


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Any]]:
    """Of servers of both modes."""
    with client_over(model()) as (raw, _), client_over(model(), logprobs_mode="processed") as (processed, _):
        yield {"raw": raw, "processed": processed}


def ids_of(names: list[str]) -> list[int]:
    """The tokens of these texts."""
    known = {tiny_tokenizer().decode([token]): token for token in range(VOCAB)}
    return [known[name] for name in names]


@torch.no_grad()
def expected(tokens: list[int], mode: str = "raw", temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probabilities in every place of a text, by one forward of the model."""
    prompt = tiny_tokenizer()(PROMPT)["input_ids"]
    scores = model()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    if mode == "processed":
        scores = scores / temperature
        ordered = scores.softmax(dim=-1).sort(dim=-1, descending=True)
        hidden = ordered.values.cumsum(dim=-1) - ordered.values >= top_p
        scores = scores.masked_fill(torch.zeros_like(hidden).scatter(1, ordered.indices, hidden), -torch.inf)
    return scores.log_softmax(dim=-1)


def check(found: list[dict[str, Any]], text: str, best: int, *how: Any) -> None:
    """Asserts that tokens in the form of chats are those of a text, with the model's log-probabilities."""
    assert b"".join(bytes(one["bytes"]) for one in found).decode() == "".join(one["token"] for one in found) == text
    ids = ids_of([one["token"] for one in found])
    logs = expected(ids, *how)
    own = [float(of[token]) for of, token in zip(logs, ids, strict=True)]
    assert [one["logprob"] for one in found] == pytest.approx(own, abs=1e-5)
    for one, of in zip(found, logs, strict=True):
        possible = of.topk(min(best, int(of.isfinite().sum())))
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(possible.values.tolist(), abs=1e-5)
        assert ids_of([other["token"] for other in one["top_logprobs"] if other["token"]]) == [
            token for token in possible.indices.tolist() if tiny_tokenizer().decode([token])
        ]


def ask(client: Any, path: str, body: Any) -> Any:
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(client: Any, path: str, body: Any) -> list[Any]:
    with client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("options", [{}, WARPED, {"stop": None}], ids=["greedy", "sampled", "stopped"])
def test_chats(clients: dict[str, Any], mode: str, options: dict[str, Any]) -> None:
    client, body = clients[mode], CHAT | {"top_logprobs": 4} | options
    if "stop" in options:
        body["stop"] = ask(client, "chat/completions", CHAT)["choices"][0]["message"]["content"][4:6]
    answer = ask(client, "chat/completions", body)
    (choice,) = ChatCompletion.model_validate(answer).choices
    content = answer["choices"][0]["logprobs"]["content"]
    if "stop" in options:
        assert body["stop"] not in choice.message.content
    check(content, choice.message.content, 4, mode, body["temperature"] or 1.0, body.get("top_p", 1.0))
    chunks = events_of(client, "chat/completions", body)
    assert all(ChatCompletionChunk.model_validate(chunk) for chunk in chunks)
    told = [one for chunk in chunks for one in (chunk["choices"][0].get("logprobs") or {}).get("content", [])]
    assert told == content
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == choice.message.content


@pytest.mark.parametrize("best", [0, 3])
def test_completions(clients: dict[str, Any], best: int) -> None:
    client, body = clients["raw"], COMPLETION | {"logprobs": best}
    answer = ask(client, "completions", body)
    (choice,) = Completion.model_validate(answer).choices
    found = answer["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == choice.text
    ids = ids_of(found["tokens"])
    logs = expected(ids)
    assert found["text_offset"] == [sum(map(len, found["tokens"][:place])) for place in range(len(found["tokens"]))]
    own = [float(of[token]) for of, token in zip(logs, ids, strict=True)]
    assert found["token_logprobs"] == pytest.approx(own, abs=1e-5)
    for pairs, of in zip(found["top_logprobs"], logs, strict=True):  # the text's own is the best: it is greedy
        assert list(pairs.values()) == pytest.approx(of.topk(max(best, 1)).values.tolist(), abs=1e-5)
    parts = [chunk["choices"][0]["logprobs"] for chunk in events_of(client, "completions", body)[:-1]]
    for name in found:
        assert [one for part in parts for one in part[name]] == found[name]


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_responses(clients: dict[str, Any], asked: dict[str, Any]) -> None:
    client = clients["raw"]
    answer = ask(client, "responses", RESPONSE | asked)
    Response.model_validate(answer)
    (part,) = answer["output"][0]["content"]
    check(part["logprobs"], part["text"], asked.get("top_logprobs", 0))
    events = events_of(client, "responses", RESPONSE | asked)
    of_deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [one for of_delta in of_deltas for one in of_delta] == part["logprobs"]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.done"] == [
        part["logprobs"]
    ]
    last = events[-1]["response"]
    assert Response.model_validate(last).status == "incomplete"
    assert last["output"][0]["content"][0]["logprobs"] == part["logprobs"]


def test_none_where_nobody_asks(clients: dict[str, Any]) -> None:
    for path, body in (
        ("chat/completions", CHAT | {"logprobs": False}),
        ("completions", COMPLETION | {"logprobs": False}),
        ("responses", RESPONSE | {"top_logprobs": 0}),
    ):
        answer = ask(clients["raw"], path, body)
        assert '"top_logprobs"' not in json.dumps(answer) and '"content": [{"token"' not in json.dumps(answer)
        assert '"token"' not in json.dumps(events_of(clients["raw"], path, body))


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("chat/completions", CHAT | {"logprobs": False, "top_logprobs": 2}, "`top_logprobs=2` needs `logprobs=true`"),
        ("chat/completions", CHAT | {"top_logprobs": 21}, "`top_logprobs` must be at most 20"),
        ("completions", COMPLETION | {"logprobs": True}, "`logprobs` must be an integer"),
        ("completions", COMPLETION | {"logprobs": -1}, "`logprobs` must be at least 0"),
        ("responses", RESPONSE | {"include": ["web_search_call.results"]}, "`include[0]` must be"),
    ],
)
def test_refusals(clients: dict[str, Any], path: str, body: dict[str, Any], words: str) -> None:
    response = clients["raw"].post(f"/v1/{path}", json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


def test_tokens_without_text_come_last() -> None:
    """And the end comes once: handlers read until the queue is empty."""
    source: asyncio.Queue[Any] = asyncio.Queue()
    logprobs = AnswerLogprobs(TokenBytes(tiny_tokenizer()), None, frozenset({2}))
    queue = ScoredQueue(source, logprobs)
    pieces: list[Any] = []
    for token, piece in ((4, "a"), (5, ReasoningText("b")), (6, None)):
        logprobs.add(token, -0.5, [])
        source.put_nowait(piece)
        pieces.append(queue.get_nowait())
    pieces.append(queue.get_nowait())
    with pytest.raises(asyncio.QueueEmpty):
        queue.get_nowait()
    assert pieces == ["a", "b", "", None] and isinstance(pieces[1], ReasoningText)
    assert [[one.text for one in piece.tokens] for piece in pieces[:3]] == [[b"a"], [b"b"], [b"c"]]
    assert [[one.text for one in tokens] for tokens in queue.of_text] == [[b"a"], [b"b", b"c"]]


# ----------------------------------------------------------------------------------------------------------- the bytes


def of_bytes() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of all bytes."""
    vocab = {piece: token for token, piece in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def of_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer as those of SentencePiece: spaces before words, and bytes for what is no piece."""
    names = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ab", "c", "."]
    tokenizer = Tokenizer(BPE(vocab={name: token for token, name in enumerate(names)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


CASES = {
    "letters": (tiny_tokenizer(), [30, 5, 6, 30, 59, 58, 9, 60]),
    "bytes": (of_bytes(), of_bytes()(" né 👋.")["input_ids"]),
    "pieces": (of_pieces(), [258, 259, 1 + 0xC3, 1 + 0xA9, 257, 259, 258, 260]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_of_a_text(case: str) -> None:
    """Joined, they are the text; and a token begins behind the characters that are complete before it."""
    tokenizer, tokens = CASES[case]
    text = tokenizer.decode(tokens)
    found = AnswerLogprobs(TokenBytes(tokenizer), None, frozenset({0}))
    for token in [*tokens, 0]:
        found.add(token, -1.0, [(token, -1.0)])
    found.end(is_cut=False)
    scored = found.take()
    assert b"".join(one.text for one in scored).decode() == text and len(scored) == len(tokens)
    starts = [
        len(b"".join(one.text for one in scored[:place]).decode(errors="ignore")) for place in range(len(scored))
    ]
    assert [one.start for one in scored] == starts
    if case == "bytes":
        name = of_completion(scored)["tokens"][2]
        assert name == "bytes:\\xc3" and of_chat(scored)[2] | {"top_logprobs": []} == {
            "token": "\N{REPLACEMENT CHARACTER}",
            "bytes": [0xC3],
            "logprob": -1.0,
            "top_logprobs": [],
        }


@pytest.mark.parametrize("has_parts", [False, True])
def test_delimiters_of_parts_are_tokens(has_parts: bool) -> None:
    """Special tokens are, where they are part of the answer; the end token is not, unless the text is cut there."""
    for is_cut in (False, True):
        found = AnswerLogprobs(TokenBytes(tiny_tokenizer()), None, frozenset({1, 2}), has_parts)
        for token in (1, 4, 5, 2):
            found.add(token, -0.5, [])
        found.end(is_cut)
        names = [one.text.decode() for one in found.take()]
        assert names == ["<bos>"] * has_parts + ["a", "b"] + ["<eos>"] * (has_parts and is_cut)


def test_tokens_wait_until_they_are_known_to_be_text() -> None:
    found = AnswerLogprobs(TokenBytes(tiny_tokenizer()), ["bcd"], frozenset({2}))
    told = []
    for token in tiny_tokenizer()("abcabcd")["input_ids"]:
        found.add(token, -0.5, [])
        told.append("".join(one.text.decode() for one in found.take()))
    assert told == ["a", "", "", "bca", "", "", ""]
    found.end(is_cut=False)
    assert not found.take()
