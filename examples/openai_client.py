"""
The `openai` package against a server that speculates: one answer streamed, several at once, and what was accepted.

    hf-specdec serve --draft model_cards/SmolLM2-135M-Instruct-EAGLE3     # in one terminal
    python examples/openai_client.py                                      # in another

Greedy answers do not depend on what else runs: the streamed one comes again among the others. Needs `openai` (`pip
install 'hf-specdec[serve]'`).
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request

from openai import AsyncOpenAI, OpenAI


QUESTIONS = [
    "Name three primary colours.",
    "Write the numbers from one to ten in words.",
    "Repeat this sentence twice: the cat sat on the mat.",
    "What is the capital of France?",
]


def stream(client: OpenAI, model: str, question: str, max_tokens: int) -> str:
    """Prints an answer as it comes, and how fast it came."""
    start, answer = time.perf_counter(), ""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
        if chunk.usage is not None:
            seconds = time.perf_counter() - start
            print(
                f"\n{chunk.usage.completion_tokens} tokens, {chunk.usage.completion_tokens / seconds:.1f} per second"
            )
    return answer


async def ask_all(url: str, model: str, questions: list[str], max_tokens: int) -> list[str]:
    """The answers to questions that are asked at once."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": question}],
                    max_tokens=max_tokens,
                    temperature=0,
                )
                for question in questions
            )
        )
    return [answer.choices[0].message.content or "" for answer in answers]


def metric(url: str, name: str) -> float:
    """A counter of the server's `/metrics`."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1", help="where the server listens")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    options = parser.parse_args(arguments)
    client = OpenAI(base_url=options.url, api_key="none")
    model = client.models.list().data[0].id

    print(f"{model}: {QUESTIONS[0]}")
    streamed = stream(client, model, QUESTIONS[0], options.max_new_tokens)
    answers = asyncio.run(ask_all(options.url, model, QUESTIONS, options.max_new_tokens))
    for question, answer in zip(QUESTIONS[1:], answers[1:], strict=True):
        print(f"\n{question}\n{answer.strip()}")

    drafts, accepted = (metric(options.url, name) for name in ("num_drafts", "num_accepted_tokens"))
    print(f"\ntokens per step of a request: {1 + accepted / max(drafts, 1):.2f}")
    print(f"streamed and among others identical: {'yes' if streamed == answers[0] else 'no'}")


if __name__ == "__main__":
    main()
