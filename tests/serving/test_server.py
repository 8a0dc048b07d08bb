"""`hf-specdec serve` as its users meet it: a process of its own, and the `openai` package."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.servers import metric, read, running_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.smollm2 import smollm2_folder


openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

MODEL = "smol"
LIMIT = 3
NUM_LAYERS = 3
CHATS = [
    [{"role": "user", "content": text}]
    for text in (
        "Name three primary colours.",
        "Write the numbers from one to ten in words.",
        "Repeat this sentence twice: the cat sat on the mat.",
        "What is the capital of France?",
    )
]
COUNT = "one two three four five six one two three four five six one two three"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("smollm2")
    for part in smollm2():
        part.save_pretrained(folder)
    options = ["--dtype", "float32", "--device", "cpu", "--model-name", MODEL, "--num-blocks", "200"]
    options += ["--tree", "chain:4", "--disable-by-batch-size", str(LIMIT), "--max-queue-size", "40"]
    with running_server(str(folder), *options, log=tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture
def client(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


@cache
def smollm2() -> tuple[Any, Any]:
    """A few layers of it, whose texts are as good as others to compare with those of `generate`, and its tokenizer."""
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=NUM_LAYERS).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@cache
def expected_chat(number: int, max_tokens: int) -> str:
    """What plain `generate` answers."""
    model, tokenizer = smollm2()
    inputs = tokenizer.apply_chat_template(
        CHATS[number], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    return tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(client: Any, number: int, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0.0} | options
    return client.chat.completions.create(model=MODEL, messages=CHATS[number], **options)


def wait_until_idle(address: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while metric(address, "vllm:num_requests_running") + metric(address, "vllm:num_requests_waiting") > 0:
        assert time.monotonic() < until, "requests still run"
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------------------------- texts


def test_chat(client: Any) -> None:
    for number in range(len(CHATS)):
        answer = chat(client, number)
        assert answer.choices[0].message.content == expected_chat(number, 12)
        assert answer.usage.completion_tokens <= 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        is_full = answer.usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == ("length" if is_full else "stop")


def test_streaming(client: Any) -> None:
    chunks = list(chat(client, 1, stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(pieces) == expected_chat(1, 12) and len(pieces) > 5
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert chunks[-1].usage.completion_tokens <= 12


def test_completions(client: Any) -> None:
    model, tokenizer = smollm2()
    inputs = tokenizer(COUNT, return_tensors="pt")
    expected = tokenizer.decode(
        model.generate(**inputs, do_sample=False, max_new_tokens=14)[0, inputs.input_ids.shape[1] :]
    )
    options = {"model": MODEL, "prompt": COUNT, "max_tokens": 14, "temperature": 0.0}
    before = client.completions.create(**options)
    assert before.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == expected


@pytest.mark.parametrize("kind", ["a word", "across tokens", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_no_part_of_the_text(client: Any, kind: str, stream: bool) -> None:
    options = {"model": MODEL, "prompt": COUNT, "max_tokens": 14, "temperature": 0.0}
    whole = client.completions.create(**options).choices[0].text
    middle = len(whole) // 2
    stop: Any = {
        "a word": whole[middle:].split()[1],
        "across tokens": ["nowhere", whole[middle - 4 : middle + 4]],
        "none": "nowhere",
    }[kind]
    answer = client.completions.create(**options, stop=stop, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    ends = [whole.find(end) for end in ([stop] if isinstance(stop, str) else stop) if end in whole]
    assert (kind == "none") == (not ends)
    assert text == (whole[: min(ends)] if ends else whole)


def test_a_stop_string_that_begins_in_the_prompt(client: Any) -> None:
    options = {"model": MODEL, "prompt": COUNT, "max_tokens": 12, "temperature": 0.0}
    whole = client.completions.create(**options).choices[0].text
    stop = COUNT[-5:] + whole[:3]
    assert whole.startswith(" ") and client.completions.create(**options, stop=stop).choices[0].text == whole


@pytest.mark.parametrize("stop", [None, [], ""])
def test_no_stop_string(client: Any, stop: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHATS[0], max_tokens=8, temperature=0.0, stop=stop)
    assert answer.choices[0].message.content == expected_chat(0, 8)


def test_long_stop_strings_keep_nobody_waiting(client: Any) -> None:
    before = time.monotonic()
    for letter in "abcd":
        stop = [letter * 1024, letter * 1023, "nowhere", "n"]
        assert chat(client, 3, max_tokens=2, stop=stop).choices[0].finish_reason
    assert time.monotonic() - before < 10


def test_seeds(client: Any) -> None:
    options = {"temperature": 1.2, "max_tokens": 10}
    texts = [chat(client, 0, seed=seed, **options).choices[0].message.content for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    unseeded = [chat(client, 0, **options).choices[0].message.content for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_many_clients(address: str, client: Any) -> None:
    """More than the limit of speculation: it is switched off, then on again, and nobody's text changes."""
    alone = chat(client, 3, seed=3, temperature=1.0, max_tokens=16).choices[0].message.content
    enabled = []

    async def watch() -> None:
        while True:
            enabled.append(await asyncio.to_thread(metric, address, "hf_specdec:speculation_enabled"))
            await asyncio.sleep(0.05)

    async def ask_all() -> list[str]:
        others = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
        watching = asyncio.ensure_future(watch())
        calls = [
            others.chat.completions.create(model=MODEL, messages=CHATS[number % 4], max_tokens=12, temperature=0.0)
            for number in range(8)
        ]
        seeded = others.chat.completions.create(model=MODEL, messages=CHATS[3], max_tokens=16, temperature=1.0, seed=3)
        answers = await asyncio.gather(*calls, seeded)
        watching.cancel()
        return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(ask_all())
    assert texts[:8] == [expected_chat(number % 4, 12) for number in range(8)]
    assert texts[8] == alone
    assert 0.0 in enabled
    chat(client, 0)
    assert metric(address, "hf_specdec:speculation_enabled") == 1


# --------------------------------------------------------------------------------------------------------- disconnects


def test_a_client_that_leaves_a_stream(address: str, client: Any) -> None:
    stream = client.completions.create(model=MODEL, prompt=COUNT, max_tokens=1000, temperature=0.0, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert metric(address, "vllm:num_requests_running") == 1
    stream.close()
    wait_until_idle(address, seconds=3)


def test_a_client_that_leaves_before_its_answer(address: str, client: Any) -> None:
    before = metric(address, "vllm:generation_tokens_total")
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt=COUNT, max_tokens=2000, temperature=0.0, timeout=0.7)
    wait_until_idle(address, seconds=3)
    assert metric(address, "vllm:generation_tokens_total") < before + 1000
    assert metric(address, "vllm:kv_cache_usage_perc") == 0
    assert chat(client, 0).choices[0].message.content == expected_chat(0, 12)


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "another"}, "another"),
        ({"prompt": ""}, "no tokens"),
        ({"max_tokens": 100_000}, "`max_tokens=100000` .* the 6400 tokens that there is memory for"),
        ({"prompt": "word " * 9000}, "prompt has 900. tokens, .* the 6400 tokens that there is memory for"),
        ({"extra_body": {"temperature": 10**400}}, "`temperature` is a number of 401 characters"),
        ({"top_p": 2.0}, "`top_p` must be at most 1, but is 2.0"),
        ({"max_tokens": 2.5}, "`max_tokens` must be an integer"),
        ({"extra_body": {"eta_cutoff": 0.5}}, "eta_cutoff.*`generation_config`"),
        ({"prompt": [5, True]}, r"`prompt\[1\]` must be an integer"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": [""]}, "`stop`.*empty"),
        ({"stop": 5}, "`stop`.*list of strings"),
        ({"stop": {"a": 1}}, "`stop`.*list of strings"),
        ({"stop": ["a", 5]}, "`stop`.*list of strings"),
        ({"stop": ["a"] * 5}, "`stop`.* 4 strings"),
        ({"stop": "a" * 1025}, "`stop`.*1024 characters"),
        ({"extra_body": {"generation_config": '{"stop_strings": [5]}'}}, "stop_strings"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_cannot_be_served(client: Any, options: dict[str, Any], message: str, stream: bool) -> None:
    call = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0.0, "stream": stream} | options
    kind = openai.NotFoundError if "model" in options else openai.BadRequestError
    with pytest.raises(kind) as error:
        client.completions.create(**call)
    assert re.search(message, error.value.response.text)


def test_what_needs_the_model_itself_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.transcriptions.create(model=MODEL, file=b"no sound")
    assert "transformers serve" in error.value.response.text


def test_metrics_have_vllms_names(address: str, client: Any) -> None:
    names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"]
    names = [f"vllm:spec_decode_{name}_total" for name in names]
    client.completions.create(model=MODEL, prompt=COUNT, max_tokens=30, temperature=0.0)
    drafts, drafted, accepted, by_position = (metric(address, name) for name in names)
    assert 0 < drafts and 0 < accepted <= drafted and by_position == accepted
    text = read(f"{address}/metrics")
    assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="{MODEL}",position="0"}}' in text
    assert metric(address, "vllm:prompt_tokens_total") > 0
    before = metric(address, "vllm:prefix_cache_hits_total")
    for _ in range(2):
        client.completions.create(model=MODEL, prompt="one two " * 20, max_tokens=1)
    hits, queries = (metric(address, f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    assert before + 32 <= hits < queries


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
