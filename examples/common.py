"""What the examples share: options, loading, and one prompt decoded plainly and with drafts, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.benchmarking.prompts import encode_turns
from hf_specdec.smollm2 import smollm2_folder


GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def parser(description: str | None, max_new_tokens: int = 100) -> argparse.ArgumentParser:
    """The options of every example; an example adds its own, such as `--draft`."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", help="Hub id or folder; default: SmolLM2-135M-Instruct from a package")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    return options


def load(name: str | None, options: argparse.Namespace) -> PreTrainedModel:
    """The model of that name, SmolLM2 if there is none."""
    model = AutoModelForCausalLM.from_pretrained(name or smollm2_folder(), dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def load_target(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, which pads on the left, as batches of prompts need it."""
    tokenizer = AutoTokenizer.from_pretrained(options.target or smollm2_folder(), padding_side="left")
    return load(options.target, options), tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: str = "cpu") -> Any:
    """The prompts as users' turns where the model chats, else as they are: `[batch, tokens]` and their mask."""
    return encode_turns(tokenizer, prompts).to(device)


@dataclass(frozen=True)
class Run:
    """
    The new tokens of a `generate` call, `[batch, tokens]`, their number without what pads rows that have ended, and
    the seconds it took, prefill included.
    """

    tokens: torch.Tensor
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def generate(model: PreTrainedModel, inputs: Any, **options: Any) -> Run:
    """One call, timed; greedy unless `options` say otherwise."""
    start = time.perf_counter()
    output = model.generate(**inputs, **({} if options.get("do_sample") else GREEDY), **options)
    tokens = output[:, inputs["input_ids"].shape[1] :].cpu()  # waits for the device
    seconds = time.perf_counter() - start
    ends = model.generation_config.eos_token_id
    return Run(tokens, count(tokens, torch.tensor([] if ends is None else ends, dtype=torch.long)), seconds)


def count(tokens: torch.Tensor, ends: torch.Tensor) -> int:
    """The number of tokens in all rows of `[batch, tokens]`, each up to its first end token."""
    is_end = torch.isin(tokens, ends).int()
    return int((is_end.cumsum(dim=1) == is_end).sum())


def compare(model: PreTrainedModel, inputs: Any, drafts: dict[str, dict[str, Any]], **options: Any) -> dict[str, Run]:
    """
    Decodes plainly and with every entry of `drafts` (a name, and options of `generate` that speculate), and prints a
    line for each: tokens per second, speed-up, tokens per step, and, in greedy calls, whether the texts are equal. One
    run each: on a machine that is busy with other things the times say little.
    """
    for speculation in ({}, *drafts.values()):  # the first calls load kernels
        generate(model, inputs, **(options | {"max_new_tokens": 4}), **speculation)
    runs = {"plain": generate(model, inputs, **options)}
    width = max(map(len, ("plain", *drafts)))
    print(f"{'':{width}}  tokens/s  speed-up  tokens/step  accepted  identical")
    print(f"{'plain':{width}}  {runs['plain'].tokens_per_second:8.1f}      1.00         1.00")
    for name, speculation in drafts.items():
        run = runs[name] = generate(model, inputs, **options, **speculation)
        metrics = hf_specdec.last_metrics()
        identical = "" if options.get("do_sample") else "yes" if run.tokens.equal(runs["plain"].tokens) else "no"
        print(
            f"{name:{width}}  {run.tokens_per_second:8.1f}  "
            f"{run.tokens_per_second / runs['plain'].tokens_per_second:8.2f}  {metrics.mean_acceptance_length:11.2f}  "
            f"{metrics.draft_acceptance_rate:8.2f}  {identical}"
        )
    return runs


def show(tokenizer: PreTrainedTokenizerBase, run: Run) -> None:
    """Prints the texts of a run."""
    for text in tokenizer.batch_decode(run.tokens, skip_special_tokens=True):
        print(f"\n{text.strip()}")
