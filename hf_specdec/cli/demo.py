"""`hf-specdec demo`: one prompt, decoded plainly and with a tree of drafts, side by side in speed and text."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import hf_specdec

from ..benchmarking.contenders import GREEDY
from ..benchmarking.equality import first_difference
from ..benchmarking.prompts import encode_turns
from ..loading import DTYPES, WORDS, check_place, load_draft_to, load_tokenizer
from ..trees.text import parse_tree
from .arguments import checked_device, checked_dtype, load_in, or_bad_parameter, say_how_it_drafts
from .options import DeviceOption, DraftOption, TargetOption, TreeOption
from .printed_text import PrintedText


# A summary quotes its source, so n-gram drafts from the prompt are accepted often.
DEFAULT_PROMPT = """Summarize the following text in three sentences:

The tide mill at Carrow stands where the river meets the sea. Twice a day the incoming tide fills a pond behind a \
stone wall, and a wooden gate keeps the water in when the tide goes out. The miller then opens a smaller gate, and \
the falling water turns a wheel that drives two pairs of millstones. Because the tides move by about fifty minutes \
each day, the miller had to work at a different hour every day, often in the middle of the night. The mill ground \
wheat and barley for eleven villages until 1932, when a storm broke the wall. Volunteers repaired it in 2009, and \
the wheel has turned again every summer since."""

WARM_UP_TOKENS = 12
FEWEST_TOKENS, MOST_TOKENS = 64, 160
SECONDS_A_CALL = 12.0
"""What a plain call may take, by the warm-up, before fewer than `MOST_TOKENS` are generated."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The new tokens of one generate call, `[tokens]`, and the seconds it took, prefill included."""

    tokens: torch.Tensor
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def demo(
    target: TargetOption = None,
    draft: DraftOption = "ngram",
    tree: TreeOption = "default",
    prompt: Annotated[str, typer.Option(help="What to ask.", show_default="a text to summarize")] = DEFAULT_PROMPT,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to generate at most.",
            show_default=f"{MOST_TOKENS}, down to {FEWEST_TOKENS} where a call takes over {SECONDS_A_CALL:.0f} s",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls each way, in turns; the first ones are shown.")] = 3,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(DTYPES)}, or auto: on a CPU float32 or bfloat16, whose forwards are timed. In "
            "half precision near-ties may round either way.",
            show_default="auto on a CPU, else float32",
        ),
    ] = None,
    device: DeviceOption = None,
) -> None:
    """
    Generate with and without speculation in turns, and compare speed and text. Exits with 1 if float32 texts differ.
    """
    device = checked_device(device)
    config = hf_specdec.SpeculativeConfig(tree=or_bad_parameter("--tree", parse_tree, tree))
    or_bad_parameter("--draft", check_place, None if draft in WORDS else draft)
    logging.disable_progress_bar()
    console = Console()
    dtype = checked_dtype(dtype or ("auto" if device == "cpu" else "float32"), device, may_be_auto=True)
    model, dtype = load_in(dtype, device, target, "--target")
    tokenizer = or_bad_parameter("--target", load_tokenizer, target)
    assistant = or_bad_parameter("--draft", load_draft_to, draft, DTYPES[dtype], device, model, tokenizer)
    say_how_it_drafts(assistant)
    inputs = encode_turns(tokenizer, [prompt]).to(model.device)
    speculation = {"assistant_model": assistant, "speculative_config": config}

    with console.status("Warming up"):
        warm_up_tokens = min(WARM_UP_TOKENS, max_new_tokens or WARM_UP_TOKENS)
        first = _generate(model, inputs, max_new_tokens=warm_up_tokens)
        try:
            _generate(model, inputs, max_new_tokens=warm_up_tokens, **speculation)
        except ValueError as error:  # a draft or a tree that does not fit
            raise typer.BadParameter(str(error), param_hint="--draft, --tree") from error
    longest = {"max_new_tokens": max_new_tokens or _affordable(first)}

    shown = {**longest, "streamer": PrintedText(tokenizer)}
    console.rule("generate(**inputs)")
    plain = [_generate(model, inputs, **shown)]
    console.rule(f"generate(**inputs, assistant_model={draft}, tree={tree})", characters="─")
    sped_up = [_generate(model, inputs, **shown, **speculation)]
    console.rule()
    _say_turn(console, plain, sped_up)
    for _ in range(1, rounds):
        with console.status("Measuring in turns"):
            plain.append(_generate(model, inputs, **longest))
            sped_up.append(_generate(model, inputs, **longest, **speculation))
        _say_turn(console, plain, sped_up)

    console.print(_compare(plain, sped_up, hf_specdec.last_metrics()))
    if doubt := _doubt(_rates(plain), _rates(sped_up)):
        console.print(doubt)
    different = [pair for pair in zip(plain, sped_up, strict=True) if not torch.equal(pair[0].tokens, pair[1].tokens)]
    console.print(f"identical: {'no' if different else 'yes'}")
    if different:
        one, other = different[0]
        console.print(_explain_difference(one.tokens, other.tokens, tokenizer), markup=False)
        if dtype == "float32":
            raise typer.Exit(1)
        console.print(f"In {dtype}, near-ties between tokens round either way; compare texts with --dtype float32.")


def _affordable(warm_up: Run) -> int:
    """Tokens that a plain call generates in `SECONDS_A_CALL` by the warm-up, within the limits."""
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int(SECONDS_A_CALL * warm_up.tokens_per_second)))


def _say_turn(console: Console, plain: Sequence[Run], sped_up: Sequence[Run]) -> None:
    """Prints the newest turn."""
    one, other = plain[-1].tokens_per_second, sped_up[-1].tokens_per_second
    text = f"turn {len(plain)}: plain {one:.1f}, tree {other:.1f} tokens per second, {other / one:.2f} ×"
    console.print(text, highlight=False)


def _generate(model: PreTrainedModel, inputs: BatchEncoding, **options: Any) -> Run:
    """Times one greedy call. The device is done when it returns, because the tokens are copied to the host."""
    start = time.perf_counter()
    output = model.generate(**inputs, **GREEDY, **options)
    tokens = output[0, inputs["input_ids"].shape[1] :].cpu()
    return Run(tokens=tokens, seconds=time.perf_counter() - start)


def _rates(runs: Sequence[Run]) -> list[float]:
    return [run.tokens_per_second for run in runs]


def _compare(plain: Sequence[Run], sped_up: Sequence[Run], metrics: Any) -> Table:
    """Medians over all turns, and from where to where tokens per second went; a speed-up is that of one turn."""
    ratios = [other / one for one, other in zip(_rates(plain), _rates(sped_up), strict=True)]
    table = Table("", "plain", "tree", box=None)
    table.add_row("tokens", str(len(plain[0].tokens)), str(len(sped_up[0].tokens)))
    table.add_row("seconds", *(f"{statistics.median(run.seconds for run in runs):.2f}" for runs in (plain, sped_up)))
    table.add_row("tokens per second", *(_median(_rates(runs)) for runs in (plain, sped_up)))
    table.add_row("speed-up", "1.00", _median(ratios, digits=2))
    table.add_row("mean acceptance length", "1.00", f"{metrics.mean_acceptance_length:.2f}")
    table.add_row("draft acceptance rate", "", f"{metrics.draft_acceptance_rate:.3f}")
    return table


def _median(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the spread of several values."""
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.{digits}f}{spread}"


def _doubt(plain: Sequence[float], sped_up: Sequence[float]) -> str | None:
    """What to say of rates that differ more from turn to turn than from one way to the other."""
    difference = abs(statistics.median(sped_up) - statistics.median(plain))
    spread = max(max(rates) - min(rates) for rates in (plain, sped_up))
    if spread <= difference:
        return None
    return (
        f"The spread ({spread:.1f} tokens per second) is larger than the difference ({difference:.1f}): other work on "
        "this machine may decide which way looks faster. Measure again when it is idle, or with more --rounds."
    )


def _explain_difference(plain: torch.Tensor, sped_up: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    first = first_difference(plain.tolist(), sped_up.tolist())
    if first == min(len(plain), len(sped_up)):
        return f"One text has {len(plain)} tokens, the other {len(sped_up)}; the first {first} are equal."
    words = tokenizer.convert_ids_to_tokens([int(plain[first]), int(sped_up[first])])
    return f"They first differ at token {first}: {words[0]!r} plain, {words[1]!r} with the tree."
