"""Options that clients of vLLM and llama.cpp send, over HTTP: what `generate` writes with the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import VOCAB, tiny_model
from support.tokenizer import tiny_tokenizer
from transformers import LogitsProcessor


for package in ("fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package)

from hf_specdec.verification.penalties import OccurrencePenalty  # noqa: E402


PROMPT = "abc xyz"
LENGTH = 24


class Naive(LogitsProcessor):
    """The penalties token by token, in float64; `counted_from` is the first place of the text that counts."""

    def __init__(self, counted_from: int, presence: float, frequency: float):
        self.counted_from, self.presence, self.frequency = counted_from, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lowered = scores.double()
        for row, text in enumerate(input_ids.tolist()):
            new = text[self.counted_from :]
            for token in set(new):
                lowered[row, token] -= self.presence + self.frequency * new.count(token)
        return lowered.to(scores.dtype)


def plain(**options: Any) -> list[int]:
    """The tokens that plain `generate` writes."""
    inputs = tiny_tokenizer()(PROMPT, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": LENGTH} | options
    text = tiny_model(max_position_embeddings=4096).generate(inputs.input_ids, **options)
    return text[0, inputs.input_ids.shape[1] :].tolist()


def text_of(tokens: list[int]) -> str:
    return tiny_tokenizer().decode(tokens, skip_special_tokens=True)


def ask(client: Any, path: str = "completions", **options: Any) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens: the same of a stream."""
    prompts = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    }
    body = {"max_tokens": LENGTH, "temperature": 0} | prompts[path] | options
    body = {name: value for name, value in body.items() if value is not None}
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], response.json()["usage"]["completion_tokens"]


def test_penalties_are_those_of_every_token_alone() -> None:
    torch.manual_seed(1)
    tokens, scores = torch.randint(0, VOCAB, (3, 40)), torch.randn(3, VOCAB)
    for length in (0, 7, 40):
        for penalties in ((0.5, 0.0), (0.0, -1.5), (1.25, 2.0)):
            before = scores.clone()
            found = OccurrencePenalty(length, *penalties)(tokens, scores)
            torch.testing.assert_close(found, Naive(length, *penalties)(tokens, scores))
            assert before.equal(scores)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("presence, frequency", [(1.5, 0.0), (0.0, 0.75), (-0.5, 2.0)])
def test_penalties(client: Any, path: str, presence: float, frequency: float) -> None:
    """The prompt does not count."""
    length = len(tiny_tokenizer()(PROMPT)["input_ids"])
    scale = 0.05  # of the tiny model's logits
    given = {"presence_penalty": presence * scale, "frequency_penalty": frequency * scale}
    right, wrong = (
        text_of(plain(logits_processor=[Naive(first, presence * scale, frequency * scale)])) for first in (length, 0)
    )
    assert ask(client, path, **given)[0] == right != text_of(plain())
    assert right != wrong


def test_repetition_penalty_and_trees(client: Any) -> None:
    assert ask(client, repetition_penalty=1.3)[0] == text_of(plain(repetition_penalty=1.3)) != text_of(plain())
    for tree in ("dynamic:2,2,3", "chain:2", "default", "auto", "[(0,), (1,)]", [[0], [1]]):
        assert ask(client, tree=tree)[0] == text_of(plain())


@pytest.mark.parametrize("option", [{"top_k": 3}, {"min_p": 0.9}, {"top_p": 0.1}, {"top_k": -1}, {"top_k": 0}])
def test_sampling(client: Any, option: dict[str, Any]) -> None:
    """It is as with the same option of `generate`; any option of sampling asks for it, a temperature of 0 does not."""
    (name,) = option
    same = {
        "do_sample": True,
        "top_k": max(option.get("top_k", 50), 0),
        **{k: v for k, v in option.items() if v != -1},
    }
    found = ask(client, temperature=None, seed=5, **option)
    assert found == ask(client, temperature=None, seed=5, generation_config=same)
    assert found[0] != ask(client)[0] == ask(client, **option)[0], name


def test_ends(client: Any) -> None:
    """Tokens that end the text are no part of it, but count; with `min_tokens` they come later."""
    tokens = plain(eos_token_id=None)
    place = next(place for place in range(4, LENGTH) if tokens.index(tokens[place]) == place)
    end = tokens[place]
    assert ask(client, stop_token_ids=[end]) == (text_of(tokens[:place]), "stop", place + 1)
    assert ask(client, stop_token_ids=[]) == ask(client)
    options = {"stop_token_ids": [end], "min_tokens": place + 2}
    text, _, number = ask(client, **options)
    expected = plain(eos_token_id=[2, end], min_new_tokens=place + 2)
    assert number == len(expected) >= place + 3 and text == text_of(expected[:-1])
    ends = {"generation_config": {"eos_token_id": end, "do_sample": False}}
    assert ask(client, **ends)[2] == place + 1
    assert ask(client, **ends, ignore_eos=True) == (text_of(tokens), "length", LENGTH)
    assert ask(client, **ends, ignore_eos=True, min_tokens=LENGTH) == (text_of(tokens), "length", LENGTH)
    assert ask(client, **ends, ignore_eos=True, stop_token_ids=[tokens[1]])[2] == 2


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_ends_of_streams(client: Any, path: str) -> None:
    end = plain()[6]
    text, reason, number = ask(client, path, stop_token_ids=[end])
    body: dict[str, Any] = {"stream": True, "max_tokens": LENGTH, "temperature": 0, "stop_token_ids": [end]}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    import openai

    theirs = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)
    create = theirs.completions.create if path == "completions" else theirs.chat.completions.create
    extra = {"stop_token_ids": body.pop("stop_token_ids")}
    chunks = list(create(model="some/tiny", extra_body=extra, **body))
    told = [one.choices[0].text if path == "completions" else one.choices[0].delta.content for one in chunks]
    assert "".join(one or "" for one in told) == text
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == (reason, number)


def test_what_contradicts_itself(client: Any) -> None:
    for path, body, name in (
        ("completions", {"prompt": PROMPT, "max_tokens": 4}, "max_tokens"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 4},
            "max_compl",
        ),
        ("responses", {"input": PROMPT, "max_output_tokens": 4}, "max_output_tokens"),
    ):
        answer = client.post(f"/v1/{path}", json=body | {"min_tokens": 5})
        assert answer.status_code == 400
        assert f"`min_tokens=5` is more than `{name}" in answer.json()["error"]["message"]
