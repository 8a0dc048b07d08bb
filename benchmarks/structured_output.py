"""
Texts with a grammar: tokens per second beside plain constrained decoding, and beside free text of the same head.

    python benchmarks/structured_output.py [--target ID_OR_FOLDER] [--draft FOLDER] [--tree TREE] [--threads 2]

JSON of three schemas, asked for in words; greedy, one prompt at a time, the four ways one after the other in each
round. Constrained texts are checked against plain ones. Prints a line for each way, the share of the time that masks
take, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from llguidance import LLMatcher

import hf_specdec
from hf_specdec import loading
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.grammar import GrammarMask, GrowingMask


HEAD = Path(__file__).parent.parent / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
TEXT = {"type": "string", "maxLength": 60}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Invent a customer of a book shop. Answer in JSON with first_name, last_name, email_address, date_of_birth, "
        "favourite_genre and newsletter.",
        an_object(
            first_name=TEXT,
            last_name=TEXT,
            email_address=TEXT,
            date_of_birth={"type": "string", "pattern": "^(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
            favourite_genre={"enum": ["crime", "fantasy", "science fiction", "poetry", "history"]},
            newsletter={"type": "boolean"},
        ),
    ),
    "recipe": (
        "Give me a recipe for pancakes. Answer in JSON with title, preparation_minutes, ingredients (a list of "
        "ingredient and amount) and instructions.",
        an_object(
            title=TEXT,
            preparation_minutes={"type": "integer", "minimum": 1, "maximum": 240},
            ingredients={
                "type": "array",
                "items": an_object(ingredient=TEXT, amount=TEXT),
                "minItems": 3,
                "maxItems": 6,
            },
            instructions={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 5},
        ),
    ),
    "weather": (
        "Write the weather forecast for three days in Hamburg. Answer in JSON with location and forecast, a list of "
        "weekday, temperature_celsius, wind_speed and conditions.",
        an_object(
            location=an_object(city=TEXT, country_code={"type": "string", "pattern": "^[A-Z]{2}$"}),
            forecast={
                "type": "array",
                "items": an_object(
                    weekday={"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]},
                    temperature_celsius={"type": "integer", "minimum": -20, "maximum": 40},
                    wind_speed={"type": "integer", "minimum": 0, "maximum": 150},
                    conditions={"enum": ["sunny", "cloudy", "rainy", "snowy", "windy"]},
                ),
                "minItems": 3,
                "maxItems": 3,
            },
        ),
    ),
}


class Clock:
    """Seconds that a class's methods have taken, by wrapping them."""

    def __init__(self, kind: type, *names: str):
        self.seconds = 0.0
        for name in names:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", help="Hub id or folder; SmolLM2-135M-Instruct from the package registry by default"
    )
    parser.add_argument("--draft", default=str(HEAD), help="a head, a language model, or ngram")
    parser.add_argument("--tree", help="instead of the draft's own way")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compact", action="store_true", help="JSON without white space")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    tokenizer = loading.load_tokenizer(arguments.target)
    model = loading.load_target(arguments.target, dtype, arguments.device)
    draft = hf_specdec.load_draft(arguments.draft, dtype=dtype) if arguments.draft != "ngram" else "ngram"
    draft = hf_specdec.NgramDraft() if draft == "ngram" else draft.to(arguments.device)
    length = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    speculative: dict[str, Any] = {"assistant_model": draft, "tree": arguments.tree}
    if arguments.tree is None and isinstance(draft, transformers.PreTrainedModel):
        speculative["tree"] = "auto"
    clocks = Clock(GrammarMask, "__call__", "forced"), Clock(GrowingMask, "at_root", "below")
    seconds: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, int] = defaultdict(int)
    identical, masks, lengths = 0, [], defaultdict(list)
    for name in arguments.tasks:
        content, schema = TASKS[name]
        inputs = encode_turns(tokenizer, [content]).to(arguments.device)
        options = {"whitespace_flexible": False} if arguments.compact else None
        grammar = {"grammar": LLMatcher.grammar_from_json_schema(schema, defaults=options), "tokenizer": tokenizer}
        ways: dict[str, dict[str, Any]] = {
            "free": {},
            "free, drafted": speculative,
            "constrained": grammar,
            "constrained, drafted": grammar | speculative,
        }
        taken: dict[str, list[float]] = defaultdict(list)
        texts: dict[str, torch.Tensor] = {}
        for own in () if seconds else ways.values():  # warms up
            model.generate(**inputs, **length | {"max_new_tokens": 24}, **own)
        for _ in range(arguments.rounds):
            for way, own in ways.items():
                for clock in clocks:
                    clock.seconds = 0.0
                start = time.perf_counter()
                output = model.generate(**inputs, **length, **own)
                spent = time.perf_counter() - start
                texts[way] = output[0, inputs["input_ids"].shape[1] :]
                taken[way].append(spent)
                if way == "constrained, drafted":
                    masks.append(sum(clock.seconds for clock in clocks) / spent)
                if way.endswith("drafted"):
                    lengths[way].append(hf_specdec.last_metrics().mean_acceptance_length)
        identical += torch.equal(texts["constrained"], texts["constrained, drafted"])
        for way, times in taken.items():
            seconds[way].append(statistics.median(times))
            tokens[way] += len(texts[way])
            print(f"{name:10}{way:22}{len(texts[way]) / seconds[way][-1]:8.1f} tokens/s", flush=True)
    speed = {way: tokens[way] / sum(seconds[way]) for way in seconds}
    for way, found in speed.items():
        said = f", acceptance length {statistics.mean(lengths[way]):.2f}" if way in lengths else ""
        print(f"{way:22}{found:8.1f} tokens/s, {tokens[way]} tokens{said}")
    ratios = {
        "constrained over free, both drafted": speed["constrained, drafted"] / speed["free, drafted"],
        "constrained, drafted over plain": speed["constrained, drafted"] / speed["constrained"],
        "free, drafted over plain": speed["free, drafted"] / speed["free"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    share = statistics.mean(masks)
    print(
        f"masks: {100 * share:.1f} % of the time; texts identical to plain ones: {identical} of {len(arguments.tasks)}"
    )
    setting = {name: str(value) for name, value in vars(arguments).items()} | {"torch": torch.__version__}
    print(json.dumps({**setting, "tokens_per_second": speed, **ratios, "masks": share, "identical": identical}))


if __name__ == "__main__":
    main()
